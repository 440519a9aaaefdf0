"""`neuronx_distributed.trainer.trainer`: the configuration, and the model and optimizer that follow it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nxd_jax._flags import flag
from nxd_jax.optimizer import NeuronEPZero1Optimizer, NeuronZero1Optimizer, wholes
from nxd_jax.tensor_parallel import casting, parallel_groups
from nxd_jax.trainer import building, config
from nxd_jax.trainer.model import NxDModel
from nxd_jax.trainer.optimizer import NxDOptimizer
from nxd_jax.utils import _constructors
from torch_bridge.replay import player, replay_policy

NxDConfig = dict[str, Any]


def neuronx_distributed_config(
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    context_parallel_size: int = 1,
    pipeline_config: dict[str, Any] | None = None,
    optimizer_config: dict[str, Any] | None = None,
    activation_checkpoint_config: Any = None,
    pad_model: bool = False,
    sequence_parallel: bool = False,
    model_init_config: dict[str, Any] | None = None,
    lora_config: Any = None,
    mixed_precision_config: dict[str, Any] | None = None,
    sequential_move_factor: int = 11,
    lnc_size: int = 1,
) -> NxDConfig:
    """`neuronx_distributed.neuronx_distributed_config`: a dict with all options of a run, checked and with their defaults.

    *_parallel_size: how many ranks share out a model's tensors, layers, experts and sequences; data parallelism is what is left of the world.
    optimizer_config: {"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 1.0} (max_grad_norm may be None without clipping).
    mixed_precision_config: {"use_master_weights", "use_fp32_grad_acc"} (as ZeRO-1 is), {"use_master_weights_in_ckpt": False}; True needs ZeRO-1 when the
    optimizer is made.
    activation_checkpoint_config: None, "full" (every transformer layer), or the classes of modules to compute again in the backward pass.
    pad_model: pad the attention of a model of transformers with heads of zeros, to a multiple of the tensor parallel size.
    sequence_parallel: for models that read it; a warning if no layer has it enabled.
    model_init_config: {"sequential_move_factor": 11, "meta_device_init": False, "param_init_fn": None}.
    lora_config: a `LoraConfig`. lnc_size: physical cores in a logical one.

    If torch.distributed has been initialised, so are the model parallel groups. The dicts given are not changed. 1 and 0 will do for True and False.

    Raises AssertionError for options that are no dict, ValueError for unknown keys and impossible values, TypeError for wrong types, and RuntimeError for
    sizes that do not divide the world.
    """
    config.sizes(
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        expert_parallel_size=expert_parallel_size,
        context_parallel_size=context_parallel_size,
        sequential_move_factor=sequential_move_factor,
        lnc_size=lnc_size,
    )
    chosen = config.optimizer(optimizer_config)
    found = {
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        "expert_parallel_size": expert_parallel_size,
        "context_parallel_size": context_parallel_size,
        "pipeline_config": config.pipeline(pipeline_config),
        "optimizer_config": chosen,
        "activation_checkpoint_config": config.activation_checkpoint(activation_checkpoint_config),
        "pad_model": flag("pad_model", pad_model),
        "sequence_parallel": flag("sequence_parallel", sequence_parallel),
        "model_init_config": config.model_init(model_init_config, sequential_move_factor),
        "lora_config": building.checked_lora(lora_config),
        "mixed_precision_config": config.mixed_precision(mixed_precision_config, chosen["zero_one_enabled"]),
        "lnc_size": lnc_size,
    }
    if dist.is_initialized():
        building.lay_out(found)
    return found


def initialize_parallel_model(
    nxd_config: NxDConfig, model_fn: Callable[..., torch.nn.Module], *model_args: Any, **model_kwargs: Any
) -> NxDModel:
    """`neuronx_distributed.initialize_parallel_model`: make a model with `model_fn(*model_args, **model_kwargs)` and wrap it as the configuration says.

    In this order: model parallel groups (if there are none), the model, padding, the move to xla, activation checkpoints, LoRA. With `meta_device_init`
    the model is made on "meta", and given its values by `param_init_fn` and moved module by module before it is padded: the host never holds it. What a core
    will hold: `nxd_jax.trainer.footprint`. The model is played from recordings where that is sound (`torch_bridge.optimize`), unless NXD_JAX_REPLAY=0.

    `include_buffers` (keyword, or a bool right after `model_fn`, as NxD has it) also makes buffers on the meta device. A bool without which `model_fn`
    cannot be called is taken for `model_fn`'s; if both are possible it is `include_buffers`, with a warning.

    Raises TypeError if `model_fn` gives no module, RuntimeError where "full" checkpointing does not know the transformer layers, ValueError where no
    module is of a class to checkpoint or attention heads cannot be padded, AssertionError for padding a model that is not of transformers. Warns, naming
    them, of parameters that `param_init_fn` leaves without values; RuntimeError for such buffers.
    """
    include_buffers = bool(model_kwargs.pop("include_buffers", False))
    if model_args and isinstance(model_args[0], bool) and _is_include_buffers(model_fn, model_args, model_kwargs):
        include_buffers, *rest = model_args
        model_args = tuple(rest)
    building.check_config(nxd_config)
    building.lay_out(nxd_config)
    if nxd_config["pipeline_parallel_size"] > 1:
        return NxDModel(building.make_pipeline(nxd_config, lambda: model_fn(*model_args, **model_kwargs), include_buffers), nxd_config)
    model = building.make(nxd_config, lambda: model_fn(*model_args, **model_kwargs), include_buffers)
    building.add_checkpoints(nxd_config, model)
    model = building.add_lora(nxd_config, model)
    if replay_policy.of_parallel_models():
        player.optimize(model)
    return NxDModel(model, nxd_config)


def _is_include_buffers(model_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the first of these arguments is not `model_fn`'s. Warns if it could be either."""

    def fits(given: tuple[Any, ...]) -> bool:
        try:
            inspect.signature(model_fn).bind(*given, **kwargs)
        except TypeError:
            return False
        return True

    try:
        with_it, without_it = fits(args), fits(args[1:])
    except ValueError:  # a builtin without a signature
        return True
    if with_it and without_it:
        warnings.warn(
            f"initialize_parallel_model(nxd_config, model_fn, {args[0]}, ...): {args[0]} was taken for include_buffers, as neuronx_distributed has it. If it "
            "is model_fn's, pass it by keyword, or pass include_buffers before it",
            stacklevel=3,
        )
    return without_it or not with_it


def initialize_parallel_optimizer(
    nxd_config: NxDConfig, optimizer_class: type[torch.optim.Optimizer], parameters: Any, **defaults: Any
) -> NxDOptimizer:
    """`neuronx_distributed.initialize_parallel_optimizer`: an optimizer whose `step()` also reduces and clips gradients, with ZeRO-1 if enabled.

    optimizer_class: any optimizer; steps of torch's SGD, Adam, AdamW, Adagrad and Adafactor and of AdamW_FP32OptimParams are recorded as one op each, unless
    `fused`, `foreach` or `capturable` says otherwise. Optimizers that look at whole tensors (Muon, LBFGS, ...) raise NotImplementedError where ranks hold
    parts of them, except Adafactor, which puts parts together; one of your own sees the parts. parameters: the model's, or groups of them. defaults: the
    optimizer's options.

    Raises RuntimeError for precision options (`mixed_precision_config`) that need ZeRO-1, if it is not enabled.
    """
    building.check_config(nxd_config)
    if "decoupled_weight_decay" in defaults and not _takes(optimizer_class, "decoupled_weight_decay"):
        del defaults["decoupled_weight_decay"]  # as NxD does: AdamW's groups have it, and its constructor does not take it
    return NxDOptimizer(initialize_optimizer_from_class(nxd_config, optimizer_class, parameters, **defaults), nxd_config)


def _takes(optimizer_class: Any, option: str) -> bool:
    """Whether a class, or a function that makes optimizers, has an argument of this name; one that only passes keywords on has those of its base."""
    try:
        return any(option in taken for taken in _constructors.parameters(optimizer_class))
    except ValueError:  # a builtin without a signature
        return False


def initialize_optimizer_from_class(
    nxd_config: NxDConfig, optimizer_class: type[torch.optim.Optimizer], parameters: Any, model: Any = None, **defaults: Any
) -> torch.optim.Optimizer:
    """`trainer.initialize_optimizer_from_class`: the optimizer itself: ZeRO-1 around the class, or the class."""
    options = nxd_config["optimizer_config"]
    if not options["zero_one_enabled"]:
        optimizer = optimizer_class(parameters, **defaults)
        wholes.prepare(optimizer)
        return optimizer
    precision = nxd_config["mixed_precision_config"]
    wide = precision["use_master_weights"] and casting.wide_dtype() == torch.double
    kind = NeuronEPZero1Optimizer if parallel_groups.size("ep") > 1 else NeuronZero1Optimizer
    return kind(
        parameters,
        optimizer_class,
        optimizer_dtype=torch.double if wide else None,
        grad_clipping=options["grad_clipping"],
        max_norm=options.get("max_grad_norm"),
        pin_layout=False,
        grad_norm_groups=parallel_groups.lists("tp"),
        use_grad_acc_hook=precision["use_fp32_grad_acc"],
        higher_cc_precision=precision["use_fp32_grad_acc"],
        save_master_weights=precision["use_master_weights_in_ckpt"],
        **defaults,
    )


def filter_to_local_parameter_group(optimizer: torch.optim.Optimizer, model: Any) -> None:
    """`trainer.filter_to_local_parameter_group`: keep in an optimizer's groups only parameters that this pipeline stage has."""
    local = set(model.parameters())
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p in local]
