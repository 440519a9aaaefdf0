"""Which modules of a model get an adapter, by name."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

logger = logging.getLogger("nxd_jax")

_WRAPPED = "_checkpoint_wrapped_module"

_Q_V = ("q_proj", "v_proj", "qkv_proj")
_QKV = ("query_key_value",)
_QUERY_VALUE = ("query", "value")

USUAL_TARGETS: dict[str, tuple[str, ...]] = {
    "bart": ("q_proj", "v_proj"),
    "bert": _QUERY_VALUE,
    "bloom": _QKV,
    "chatglm": _QKV,
    "clip": ("q_proj", "v_proj"),
    "codegen": ("qkv_proj",),
    "cohere": _Q_V,
    "dbrx": ("Wqkv", "qkv_proj"),
    "deberta": ("in_proj",),
    "deberta-v2": ("query_proj", "value_proj"),
    "distilbert": ("q_lin", "v_lin"),
    "electra": _QUERY_VALUE,
    "falcon": _QKV,
    "gemma": _Q_V,
    "gemma2": _Q_V,
    "gemma3_text": _Q_V,
    "gpt2": ("c_attn",),
    "gpt_bigcode": ("c_attn",),
    "gpt_neo": ("q_proj", "v_proj"),
    "gpt_neox": ("query_key_value", "qkv_proj"),
    "gptj": ("q_proj", "v_proj"),
    "granite": _Q_V,
    "llama": _Q_V,
    "mistral": _Q_V,
    "mixtral": _Q_V,
    "mpt": ("Wqkv",),
    "mt5": ("q", "v"),
    "olmo": _Q_V,
    "olmo2": _Q_V,
    "opt": ("q_proj", "v_proj"),
    "phi": ("q_proj", "v_proj"),
    "phi3": ("qkv_proj",),
    "qwen2": _Q_V,
    "qwen3": _Q_V,
    "roberta": _QUERY_VALUE,
    "stablelm": _Q_V,
    "t5": ("q", "v"),
    "vit": _QUERY_VALUE,
    "whisper": ("q_proj", "v_proj"),
    "xlm-roberta": _QUERY_VALUE,
}
"""For `target_modules=None`: the attention projections of query and value (or all in one) that models of a `config.model_type` have. With NxD's fused
`qkv_proj` in their place, that one."""

_SHOWN = 8


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Every module below `model` once, by its dotted name as it is without activation checkpointing (and then without the wrapper)."""
    names = ((tuple(p for p in name.split(".") if p != _WRAPPED), module) for name, module in model.named_modules())
    return {".".join(parts): module for parts, module in names if any(parts)}


def matches(name: str, targets: Sequence[str] | str) -> bool:
    """Whether a module's dotted name is meant: by a regular expression for all of it, or by one of several names that it is or ends with."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == t or name.endswith(f".{t}") for t in targets)


def find(model: nn.Module, targets: Sequence[str] | str, field: str) -> dict[str, nn.Module]:
    """The modules that are meant, by name.

    Raises ValueError, naming some modules that the model has, if there are none. Of several names, those that match nothing are logged as a warning.
    """
    modules = modules_of(model)
    found = {name: module for name, module in modules.items() if matches(name, targets)}
    if not found:
        raise ValueError(f"LoraConfig: {field}={targets!r} matches no module. The model has {_some(modules)}")
    unused = [] if isinstance(targets, str) else [t for t in targets if not any(matches(name, [t]) for name in found)]
    if unused:
        logger.warning("LoraConfig: %s: no module is called %s. The model has %s", field, " or ".join(map(repr, unused)), _some(modules))
    return found


def usual_targets(model: nn.Module) -> list[str]:
    """The projections that models of this one's type usually adapt. Raises ValueError if the type is not known, or the model has none of them."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    names = list(modules_of(model))
    if kind not in USUAL_TARGETS:
        raise ValueError(
            f"LoraConfig: pass target_modules: there are no usual ones for a model with config.model_type {kind!r}. The model has {_some(names)}"
        )
    found = [t for t in USUAL_TARGETS[kind] if any(matches(name, [t]) for name in names)]
    if not found:
        raise ValueError(
            f"LoraConfig: pass target_modules: the usual ones of {kind}, {', '.join(USUAL_TARGETS[kind])}, are not in the model. It has {_some(names)}"
        )
    return found


def replace(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Put other modules in the place of some, wherever they occur."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and child in new:
                module._modules[name] = new[child]


def _some(names: Iterable[str]) -> str:
    """Some of the names, one of each kind: without the numbers in lists of layers."""
    kinds = {re.sub(r"\.\d+(?=\.|$)", ".*", name): name for name in reversed(list(names))}
    last = [name for kind, name in reversed(kinds.items()) if not any(other.startswith(f"{kind}.") for other in kinds)]
    return ", ".join(last[:_SHOWN]) + (f" and {len(last) - _SHOWN} more like these" if len(last) > _SHOWN else "")
