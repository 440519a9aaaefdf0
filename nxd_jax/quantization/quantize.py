"""`neuronx_distributed.quantization.quantize`: a model with quantized layers."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from nxd_jax.modules.lora.layer import LoraLayer
from nxd_jax.quantization.quantization_config import get_default_custom_qconfig_dict
from nxd_jax.quantization.quantization_mappings import get_default_quant_module_mappings

logger = logging.getLogger("nxd_jax")


def convert(
    module: nn.Module,
    q_config: Any = None,
    inplace: bool = False,
    mapping: Mapping[Callable[..., Any], Any] | None = None,
    include: str | Sequence[str] | None = None,
    modules_to_not_convert: Sequence[str] | None = None,
    quantize_weights: bool = False,
) -> nn.Module:
    """A model whose parallel linear layers are quantized ones.

    The quantized layers have zeros for weights, as in NxD: the values come from a quantized checkpoint, which is loaded next. quantize_weights: they have
    those of the float layers, quantized.

    q_config: one of `quantization_config`'s dicts, default int8 with one scale for each weight. inplace: change the model itself; otherwise it stays as it
    is, and what is not quantized is copied. mapping: by class (not by its subclasses) what takes a layer's place, with a class method
    from_float(mod=, q_config=); default `quantization_mappings`. include: patterns as of shell files; what is in modules whose name fits one is quantized, and
    nothing else. modules_to_not_convert: such patterns, or words: modules stay as they are if their name fits one or has it within. A layer that is used in
    two places is so afterwards. If the model is such a layer itself, the quantized one is returned. LoRA adapters in the model stay as they are, beside
    quantized layers.

    Raises AssertionError if both lists are given, ValueError for quantize_weights with a from_float that does not take it, and for a model whose weights
    contain its LoRA adapters for now. A pattern of `include` that fits nothing is warned of.
    """
    if include is not None and modules_to_not_convert is not None:
        raise AssertionError(
            f"give include or modules_to_not_convert, not both; got include={include} and modules_to_not_convert={modules_to_not_convert}"
        )
    config = get_default_custom_qconfig_dict() if q_config is None else q_config
    table = get_default_quant_module_mappings() if mapping is None else mapping
    more = {"quantize_weights": True} if quantize_weights else {}
    made: dict[int, nn.Module] = {}
    places: list[tuple[str, int]] = []
    for name, layer in _chosen(module, include, modules_to_not_convert):
        if type(layer) in table:
            places.append((name, id(layer)))
            if id(layer) not in made:
                kind = table[type(layer)]
                _check_from_float(kind, more)
                made[id(layer)] = kind.from_float(mod=layer, q_config=config, **more)
    if not inplace:
        module = _copied(module, made)
    for name, key in places:
        if not name:
            return made[key]
        parent, _, child = name.rpartition(".")
        module.get_submodule(parent)._modules[child] = made[key]
    return module


def _chosen(module: nn.Module, include: str | Sequence[str] | None, but: Sequence[str] | None) -> list[tuple[str, nn.Module]]:
    """Modules by name, also under every other name they have, without the factors of LoRA adapters."""
    adapted = [m for m in module.modules() if isinstance(m, LoraLayer)]
    if any(layer.merged for layer in adapted):
        raise ValueError(
            "quantize.convert: the model's LoRA adapters are merged for now, and its next forward takes them out again: call merge_and_unload(), which "
            "merges for good, or unmerge_lora(), before"
        )
    factors = {m for layer in adapted for factor in (layer.lora_A, layer.lora_B) for m in factor.modules()}
    found = [(name, m) for name, m in module.named_modules(remove_duplicate=False) if m not in factors]
    if but is not None:
        words = [but] if isinstance(but, str) else list(but)
        return [(name, m) for name, m in found if not any(w in name or _fits(name, w) for w in words)]
    if include is None:
        return found
    patterns = [include] if isinstance(include, str) else list(include)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in found):
            logger.warning("quantize.convert: include=%r fits no module's name", pattern)
    return [(name, m) for name, m in found if any(_fits(name, pattern) for pattern in patterns)]


def _fits(name: str, pattern: str) -> bool:
    """Whether a pattern fits a module's name, or that of a module which it is in."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:k]), pattern) for k in range(1, len(parts) + 1))


def _check_from_float(kind: Any, more: dict[str, Any]) -> None:
    parameters = inspect.signature(kind.from_float).parameters
    if more and "quantize_weights" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ValueError(
            f"quantize_weights=True: {kind.__name__}.from_float takes no such argument; add it, or load a quantized checkpoint afterwards"
        )


def _copied(module: nn.Module, made: Mapping[int, nn.Module]) -> nn.Module:
    """A copy of a model that has some layers replaced, so that these need not be copied. Parameters keep the attributes that torch's copies lose."""
    new = copy.deepcopy(module, dict(made))
    replaced = set(map(id, made.values()))
    for name, layer in new.named_modules():
        if id(layer) in replaced:
            continue
        old = module.get_submodule(name)
        for key, parameter in layer.named_parameters(recurse=False):
            for attribute, value in vars(old.get_parameter(key)).items():
                if not hasattr(parameter, attribute):
                    setattr(parameter, attribute, value)
    return new


def direct_cast_quantize(tensor: torch.Tensor, downcast_dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a narrower dtype, without a scale."""
    return tensor.to(downcast_dtype)
