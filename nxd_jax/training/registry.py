"""Which data module and which model a configuration names.

| in the file | data module | model |
|---|---|---|
| `model_source: hf`, "mixtral" in `name` | HFDataModule | HFMixtralModule |
| `model_source: hf` | HFDataModule | HFLLamaModule |
| `model_source: hf`, `model_alignment_strategy` | ModelAlignmentDataModule | as above |
| `model_source: megatron` | MegatronDataModule | MegatronGPTModel |
| `data_module: my_package.MyData`, `model_module: my_package.MyModel` | yours | yours |
| `model_source: mine` after `register("mine", ...)`, in a module that `nxdt-train --import` names | yours | yours |

A class of yours is called with (cfg, trainer). `_target_` inside `data` or `model` means the same as the two keys above. (In the original, users edit its
training.py.)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Entry:
    """data, model: classes, or functions, of (cfg, trainer)."""

    data: Callable[[Any, Any], Any]
    model: Callable[[Any, Any], Any]


_ENTRIES: dict[str, Entry] = {}


def register(model_source: str, data: Callable[[Any, Any], Any], model: Callable[[Any, Any], Any]) -> None:
    """Let `model_source: NAME` in a YAML file mean these classes. Raises ValueError for the names that are there already."""
    if model_source in ("hf", "megatron") or _ENTRIES.get(model_source, Entry(data, model)) != Entry(data, model):
        raise ValueError(f"model_source {model_source!r} is taken; register your classes under another name")
    _ENTRIES[model_source] = Entry(data, model)


def is_registered(model_source: Any) -> bool:
    """Whether `register` was called for a name."""
    return isinstance(model_source, str) and model_source in _ENTRIES


def find(cfg: Any) -> Entry:
    """The classes that a configuration names.

    Raises ValueError for an unknown model_source, NotImplementedError for what this release does not train.
    """
    data = _named(cfg, "data_module", "data")
    model = _named(cfg, "model_module", "model")
    if data is not None and model is not None:
        return Entry(data, model)
    found = _by_source(cfg)
    return Entry(data or found.data, model or found.model)


def _by_source(cfg: Any) -> Entry:
    source = cfg.get("model_source")
    if source in _ENTRIES:
        return _ENTRIES[source]
    if (reason := why_not(cfg)) is not None:
        raise NotImplementedError(reason)
    if source == "megatron":
        return _megatron()
    if source != "hf":
        raise ValueError(f"model_source: {source!r} must be hf or megatron" + (f", or one of {', '.join(_ENTRIES)}" if _ENTRIES else ""))
    return _hugging_face("mixtral" in str(cfg.get("name") or ""), cfg.get("model_alignment_strategy") is not None)


def why_not(cfg: Any) -> str | None:
    """Why this release does not train a configuration that names no classes of the user's; None if it does."""
    if cfg.get("model_source") == "megatron" and cfg.get("model_alignment_strategy") is not None:
        return (
            "model_alignment_strategy is not trained with model_source: megatron: convert the weights to a Hugging Face model and use model_source: hf, or "
            "take the key out to train on all tokens"
        )
    return None


def _hugging_face(mixtral: bool, aligned: bool) -> Entry:
    return Entry(_data(aligned), _mixtral() if mixtral else _llama())


def _megatron() -> Entry:
    from nxd_jax.training.lightning_modules.data.megatron.data_module import MegatronDataModule
    from nxd_jax.training.lightning_modules.model.megatron.megatron_gpt_model import MegatronGPTModel

    return Entry(MegatronDataModule, MegatronGPTModel)


def _data(aligned: bool) -> Callable[[Any, Any], Any]:
    if aligned:
        from nxd_jax.training.lightning_modules.data.model_alignment_data_module import ModelAlignmentDataModule

        return ModelAlignmentDataModule
    from nxd_jax.training.lightning_modules.data.hf_data_module import HFDataModule

    return HFDataModule


def _mixtral() -> Callable[[Any, Any], Any]:
    from nxd_jax.training.lightning_modules.model.hf_models.mixtral_model import HFMixtralModule

    return HFMixtralModule


def _llama() -> Callable[[Any, Any], Any]:
    from nxd_jax.training.lightning_modules.model.hf_models.llama_model import HFLLamaModule

    return HFLLamaModule


def _named(cfg: Any, key: str, section: str) -> Any:
    """A class that a configuration gives by its import path."""
    said = cfg.get(key) or (cfg.get(section) or {}).get("_target_")
    if said is None:
        return None
    module, _, name = str(said).rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{key}: {said!r} cannot be imported as package.module.Class ({error}); is its folder in PYTHONPATH? nxdt-train also looks in the "
            "working folder and beside the configuration"
        ) from error
