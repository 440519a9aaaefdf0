"""State dicts into a model with adapters: names and shapes made the model's, which names there should be, and what becomes of adapters that are not there."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from nxd_jax.modules.lora import state as lora_state
from nxd_jax.modules.lora.config import LoraConfig
from nxd_jax.modules.lora.layer import LoraLayer, any_on_ranks

logger = logging.getLogger("nxd_jax")

_OWN = "module."


class Loading(NamedTuple):
    """What is being loaded. prefix: where the model is in the state dict. expected: the names (ours) that should be in it and are loaded. adapters: whether
    it has some.
    """

    prefix: str = ""
    expected: frozenset[str] = frozenset()
    adapters: bool = False


def begin(model: Any, stored: Collection[str], known: Mapping[str, Any], config: Any, prefix: str = "") -> Loading:
    """What a state dict with these names (ours), made with this configuration, is to fill.

    Weights of the base without adapters: adapters of a checkpoint stay, with the biases and modules that train beside them; all others start anew, as their
    effect may be in the weights. Raises ValueError if none of the names is in the model.
    """
    if stored and not known.keys() & set(stored):
        there, here = ", ".join(list(stored)[:3]), ", ".join(model._adapter_names()[:3])
        raise ValueError(f"none of the {len(stored)} names in the state dict is in the model. It has {there}; the model has {here}")
    adapters = set(model._adapter_names())
    base = known.keys() - adapters
    factors = tuple(f"{name}.lora_" for name in model._layers)
    found = any(n.startswith(factors) for n in stored)
    if not found and _has_weights(stored, model._layers):
        kept = model.is_checkpoint_loaded and not is_merged(config)
        if kept:
            _keep(model)
        else:
            _reset(model._layers)
        return Loading(prefix, frozenset(base if kept else (n for n in known if not n.startswith(factors))))
    expected = (adapters if adapters & set(stored) else set()) | (base if base & set(stored) else set())
    return Loading(prefix, frozenset(expected), found)


def before(model: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Names and shapes of a state dict made those of the model: full tensors cut, `module.` inserted."""
    model.unmerge_lora()
    given = {name[len(prefix) :]: state.pop(name) for name in list(state) if name.startswith(prefix)}
    config = given.pop(lora_state.CONFIG, None)
    model._check_scaling(config, "the state dict")
    known = nn.Module.state_dict(model.module, keep_vars=True)
    groups = lora_state.groups_of(model.module)
    named = lora_state.own_entries(given, known)
    model._loading = begin(model, named, known, config, prefix)
    for name, value in named.items():
        like = known.get(name)
        if like is None or name in model._loading.expected:
            state[f"{prefix}{_OWN}{name}"] = (
                lora_state.local(name, like, value, groups.get(id(like))) if isinstance(like, torch.Tensor) else value
            )


def after(model: Any, keys: Any) -> None:
    """Leave of the missing names those that should be there; all as they are in state dicts."""
    prefix, expected, _ = model._loading
    inner = prefix + _OWN
    shown = [(name, name[len(inner) :].replace(".base_layer.", ".") if name.startswith(inner) else None) for name in keys.missing_keys]
    keys.missing_keys[:] = [name if own is None else prefix + own for name, own in shown if own is None or own in expected]
    keys.unexpected_keys[:] = [prefix + name.removeprefix(inner) if name.startswith(inner) else name for name in keys.unexpected_keys]


def is_merged(config: object) -> bool:
    """Whether a checkpoint with this configuration has adapters merged into its weights."""
    values = vars(config) if isinstance(config, LoraConfig) else config if isinstance(config, Mapping) else {}
    return bool(values.get("merge_lora") and values.get("save_lora_base"))


def _has_weights(stored: Collection[str], layers: Mapping[str, LoraLayer]) -> bool:
    """Whether a state dict has weights of layers with adapters."""
    return any(f"{n}.{last}" in stored for n, m in layers.items() for last in m.base_layer._parameters if not lora_state.is_bias(last))


def _keep(model: Any) -> None:
    if model.lora_ckpt is not None:
        model.load_state_dict()
    logger.info("LoRA: the state dict has weights of the base model alone: the adapters stay what the checkpoint made them")


def _reset(layers: Mapping[str, LoraLayer]) -> None:
    used = False
    with torch.no_grad():
        for layer in layers.values():
            for factor in getattr(layer, layer.zero_at_start).parameters():
                used = used or any_on_ranks(factor)
                factor.zero_()
    if used:
        logger.warning(
            "LoRA: the state dict has weights of the base model alone. The adapters, which had been trained, start at zero again: their effect may be in the "
            "weights. To have both, load the adapters after the base, or with load_lora_from_ckpt=True"
        )
