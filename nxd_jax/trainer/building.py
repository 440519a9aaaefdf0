"""The steps of `initialize_parallel_model`: groups, model, padding, device, activation checkpoints, adapters."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nxd_jax.pipeline.model import NxDPPModel
from nxd_jax.tensor_parallel import head_padding, parallel_groups
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from nxd_jax.tensor_parallel.qkv_linear import GQAQKVColumnParallelLinear
from nxd_jax.trainer.post_partition_hooks import hooks
from nxd_jax.utils import _device, activation_checkpoint, model_utils
from torch_bridge.mesh import world

logger = logging.getLogger("nxd_jax")

_PADDED = (ColumnParallelLinear, RowParallelLinear)

_SIZES = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_parallel_size": "ep",
}
"""Options in the order of `parallel_groups.plan`, and the kinds of groups whose sizes they are."""

_KEYS = (*_SIZES, "optimizer_config", "activation_checkpoint_config", "pad_model", "sequence_parallel", "model_init_config", "lora_config")
_KEYS += ("mixed_precision_config", "lnc_size")


def check_config(nxd_config: object) -> None:
    """Raise TypeError for what is not a configuration."""
    if not isinstance(nxd_config, dict):
        raise TypeError(f"nxd_config must be what neuronx_distributed_config(...) returns, got {type(nxd_config).__name__}")
    missing = [key for key in _KEYS if key not in nxd_config]
    if missing:
        raise TypeError(f"nxd_config must be what neuronx_distributed_config(...) returns; this dict has no {', '.join(missing)}")


def lay_out(nxd_config: dict[str, Any]) -> None:
    """Divide the ranks into groups of the configured sizes, unless they are."""
    if not dist.is_initialized():
        from torch_bridge.collectives import backend

        backend.init_process_group("xla")
    if parallel_groups.initialized() and _is_laid_out(nxd_config):
        return
    parallel_groups.lay_out(parallel_groups.plan(*(nxd_config[name] for name in _SIZES)), nxd_config["lnc_size"])


def _is_laid_out(nxd_config: dict[str, Any]) -> bool:
    """Whether the groups have the configured sizes (a size above the world's counts as the world's)."""
    same = all(min(nxd_config[name], world.size()) == parallel_groups.size(kind) for name, kind in _SIZES.items())
    return same and parallel_groups.current().lnc_size == nxd_config["lnc_size"]


def make(nxd_config: dict[str, Any], model_fn: Callable[[], Any], include_buffers: bool) -> torch.nn.Module:
    """The model on its device (on xla, or on the CPU in `NXD_CPU_MODE`), with weights."""
    options = nxd_config["model_init_config"]
    meta = options["meta_device_init"]
    model = _made(nxd_config, model_fn, meta, include_buffers)
    padded = _attention_to_pad(model) if nxd_config["pad_model"] else ()
    if not meta:
        _pad(model, padded)
    factor, init = options["sequential_move_factor"], options["param_init_fn"] if meta else None
    model = model_utils.get_model_sequential(model, _device.get_device(), factor, init)
    if meta:  # only now are there weights to put zeros beside
        _pad(model, padded)
    return model


def on_meta(nxd_config: dict[str, Any], model_fn: Callable[[], Any]) -> torch.nn.Module:
    """The model without weights: what `make` puts on the device, as shapes. Buffers are real."""
    model = _made(nxd_config, model_fn, True, False)
    _pad(model, _attention_to_pad(model) if nxd_config["pad_model"] else ())
    return model


def pipeline_on_meta(nxd_config: dict[str, Any], model: torch.nn.Module) -> NxDPPModel:
    """A model without weights (`on_meta`) as stages of a pipeline, which stay without."""
    if isinstance(model, NxDPPModel):
        return model
    return _pipeline(model, {**(nxd_config["pipeline_config"] or {}), "use_model_wrapper": True}, None)


def make_pipeline(nxd_config: dict[str, Any], model_fn: Callable[[], Any], include_buffers: bool) -> NxDPPModel:
    """The model as stages of a pipeline, each with its weights on its cores. Raises ValueError for more pipeline ranks than the world has."""
    if (wanted := nxd_config["pipeline_parallel_size"]) > world.size():
        raise ValueError(
            f"pipeline_parallel_size={wanted} needs {wanted} ranks or more, and there are {world.size()}: start the script with more of them "
            "(nxd-run or torchrun, --nproc_per_node), or lower pipeline_parallel_size"
        )
    options = nxd_config["model_init_config"]
    meta = options["meta_device_init"]
    given = {**(nxd_config["pipeline_config"] or {}), "use_model_wrapper": True}
    with model_utils.init_on_device("meta", include_buffers=include_buffers) if meta else contextlib.nullcontext():
        model = model_fn()
    if isinstance(model, NxDPPModel):
        _check_nothing_to_add(nxd_config)
        pipeline = model
    else:
        init = options["param_init_fn"] if meta else None
        pipeline = _pipeline(_prepared(nxd_config, model, given.get("transformer_layer_cls"), init), given, init)
    hooks.execute_all_hooks(pipeline)
    model_utils.get_model_sequential(pipeline, _device.get_device(), options["sequential_move_factor"])
    return pipeline


def _check_nothing_to_add(nxd_config: dict[str, Any]) -> None:
    """Raise ValueError for options that change a model before it is traced, where `model_fn` returns a pipeline."""
    asked = {
        "activation_checkpoint_config": nxd_config["activation_checkpoint_config"] is not None,
        "pad_model": nxd_config["pad_model"],
        "lora_config": _wants_lora(nxd_config),
    }
    for name in (name for name, is_asked in asked.items() if is_asked):
        raise ValueError(
            f"{name} changes the model before it is cut into stages, but model_fn returns an NxDPPModel: let model_fn return the plain model, and give "
            "NxDPPModel's arguments as pipeline_config"
        )


def _prepared(nxd_config: dict[str, Any], model: Any, layer: type[torch.nn.Module] | None, param_init_fn: Any) -> Any:
    """A model, or the layers of the manual mode, as it is to be traced: padded, with activation checkpoints and adapters.

    Adapters need the weights they stand beside: a model with them is moved to the device here, one without when its stages are known.
    """
    if isinstance(model, list):
        layers = torch.nn.ModuleList(model)
        add_checkpoints(nxd_config, layers, layer)
        if _wants_lora(nxd_config):
            raise NotImplementedError(
                "lora_config with manual_pp_partition=True is not supported: let model_fn return the whole model, and give pipeline_cuts or "
                "auto_partition=True as pipeline_config"
            )
        return list(layers)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"model_fn must return a torch.nn.Module, or a list of them with manual_pp_partition=True, got {type(model).__name__}"
        )
    padded = _attention_to_pad(model) if nxd_config["pad_model"] else ()
    if padded and param_init_fn is not None:
        raise NotImplementedError(
            "pad_model=True with meta_device_init=True and pipeline_parallel_size > 1 is not supported: there are no weights to put zeros beside when the "
            "model is cut. Set meta_device_init=False"
        )
    _pad(model, padded)
    add_checkpoints(nxd_config, model, layer)
    if not _wants_lora(nxd_config):
        return model
    options = nxd_config["model_init_config"]
    model_utils.get_model_sequential(model, _device.get_device(), options["sequential_move_factor"], param_init_fn)
    return add_lora(nxd_config, model)


def _pipeline(model: Any, given: dict[str, Any], param_init_fn: Callable[..., Any] | None) -> NxDPPModel:
    """A pipeline of what pipeline_config says. Raises ValueError for keys that NxDPPModel does not have."""
    known = set(inspect.signature(NxDPPModel).parameters) - {"module"}
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ValueError(f"pipeline_config has no option {', '.join(unknown)}; it takes NxDPPModel's: {', '.join(sorted(known))}")
    if param_init_fn is not None:
        given = {**given, "param_init_fn": param_init_fn}
    return NxDPPModel(model, **given)


def _made(nxd_config: dict[str, Any], model_fn: Callable[[], Any], meta: bool, include_buffers: bool) -> torch.nn.Module:
    with model_utils.init_on_device("meta", include_buffers=include_buffers) if meta else contextlib.nullcontext():
        model = model_fn()
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model_fn must return a torch.nn.Module, got {type(model).__name__}")
    if nxd_config["sequence_parallel"] and not any(getattr(m, "sequence_parallel_enabled", False) for m in model.modules()):
        logger.warning(
            "sequence_parallel=True, but no layer of %s has sequence_parallel_enabled=True: model_fn is to pass it to its layers",
            type(model).__name__,
        )
    return model


# -- padding -----------------------------------------------------------------------------------------


def _attention_to_pad(model: torch.nn.Module) -> tuple[type, ...]:
    """The classes of a model's attention modules, whose parallel layers are to be padded; none if the heads divide already."""
    if not model_utils.is_hf_pretrained_model(model):
        raise AssertionError(
            f"pad_model=True needs a model of transformers, whose config has num_attention_heads, got {type(model).__name__}: call "
            "parallel_layers.pad.pad_model(model, tp_degree, n_heads, wrapped_classes) in model_fn"
        )
    heads, tensor_parallel_size = _heads(model), parallel_groups.size("tp")
    if heads % tensor_parallel_size == 0:
        return ()
    found = {type(m): m for m in model.modules() if "Attention" in type(m).__name__ and any(isinstance(c, _PADDED) for c in m.modules())}
    if not found:
        raise ValueError(
            f"pad_model=True: {heads} attention heads do not divide by tensor_parallel_size={tensor_parallel_size}, and {type(model).__name__} has no "
            "module that is called ...Attention and has ColumnParallelLinear or RowParallelLinear layers to pad: replace its linear layers by them in "
            "model_fn, or call parallel_layers.pad.pad_model(model, tp_degree, n_heads, wrapped_classes) there"
        )
    fused = [name for name, m in model.named_modules() if isinstance(m, GQAQKVColumnParallelLinear)]
    if fused:
        raise ValueError(
            f"pad_model=True pads ColumnParallelLinear and RowParallelLinear, not '{fused[0]}', a GQAQKVColumnParallelLinear: give the model a number of heads "
            f"that divides by tensor_parallel_size={tensor_parallel_size}, or separate projections"
        )
    return tuple(found)


def _heads(model: torch.nn.Module) -> int:
    return int(model.config.num_attention_heads)  # type: ignore[union-attr, arg-type]


def _pad(model: torch.nn.Module, classes: tuple[type, ...]) -> None:
    if classes:
        logger.info("pad_model: attention heads in %s", ", ".join(c.__name__ for c in classes))
        head_padding.pad_model(model, parallel_groups.size("tp"), _heads(model), classes)


# -- activation checkpoints and adapters -----------------------------------------------------------------


def add_checkpoints(nxd_config: dict[str, Any], model: torch.nn.Module, layer: type[torch.nn.Module] | None = None) -> None:
    """Wrap the modules that are to compute their activations again. layer: the class that "full" means, if it is known."""
    chosen = nxd_config["activation_checkpoint_config"]
    if chosen is None:
        return
    full = (layer,) if layer is not None else None
    classes = (
        full or _transformer_layers(model) if chosen == "full" else tuple(chosen) if isinstance(chosen, (list, tuple, set)) else (chosen,)
    )
    count = sum(isinstance(m, classes) for m in model.modules())
    names = ", ".join(c.__name__ for c in classes)
    if not count:
        raise ValueError(
            f"activation_checkpoint_config: the model has no module of class {names}, so no activation would be computed again"
        )
    if model_utils.is_hf_pretrained_model(model) and getattr(model.config, "use_cache", False):
        logger.info("config.use_cache is off: layers that are computed again would write to a key-value cache twice")
        model.config.use_cache = False  # type: ignore[union-attr]
    logger.info("activation checkpoints: %d modules of %s", count, names)
    activation_checkpoint.apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, classes))


def _transformer_layers(model: torch.nn.Module) -> tuple[type, ...]:
    """The classes of a model's transformer layers."""
    names = set(getattr(model, "_no_split_modules", None) or ()) if model_utils.is_hf_pretrained_model(model) else set()
    if model_utils.is_nxdt_pretrained_model(model):
        names = {"ParallelTransformerLayer"}
    found = tuple({type(m) for m in model.modules() if type(m).__name__ in names})
    if not found:
        raise RuntimeError(
            f"activation_checkpoint_config='full' does not know which modules of {type(model).__name__} are its transformer layers: it is no model of "
            "transformers with `_no_split_modules`. Give the class of the layers in place of 'full'"
        )
    return found


def checked_lora(lora_config: object) -> Any:
    """A `LoraConfig` or None. Raises TypeError for anything else."""
    if lora_config is None:
        return None
    from nxd_jax.modules.lora import LoraConfig

    if not isinstance(lora_config, LoraConfig):
        raise TypeError(f"lora_config must be a LoraConfig (from neuronx_distributed.modules.lora), got {type(lora_config).__name__}")
    return lora_config


def _wants_lora(nxd_config: dict[str, Any]) -> bool:
    found = nxd_config["lora_config"]
    return found is not None and bool(getattr(found, "enable_lora", True))


def add_lora(nxd_config: dict[str, Any], model: torch.nn.Module) -> torch.nn.Module:
    """The model with adapters, if there is a LoRA configuration that is not switched off."""
    if not _wants_lora(nxd_config):
        return model
    from nxd_jax.modules.lora import get_lora_model

    return get_lora_model(model, nxd_config["lora_config"])
