"""`neuronx_distributed.utils.activation_checkpoint`: modules that compute their activations again in the backward pass instead of keeping them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torch_wrapper
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, CheckpointWrapper

from torch_bridge.torch_xla.utils.checkpoint import checkpoint

_INNER = torch_wrapper._CHECKPOINT_WRAPPED_MODULE


class NxDCheckpointWrapper(CheckpointWrapper):
    """torch's `CheckpointWrapper`. Names of parameters, modules and state dict entries are those that the model has without it.

    `named_modules()` gives the wrapper and what it wraps the same name (NxD leaves the inner one's a `_checkpoint_wrapped_module` at the end).
    """

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        for name, module in super().named_modules(*args, **kwargs):
            yield ".".join(part for part in name.split(".") if part != _INNER), module


def checkpoint_wrapper(
    module: torch.nn.Module,
    checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Callable[..., Any] | None = None,
    **checkpoint_fn_kwargs: Any,
) -> torch.nn.Module:
    """Wrap one module. checkpoint_fn: what checkpoints, called as `torch.utils.checkpoint.checkpoint` with `checkpoint_fn_kwargs`.

    Without it `torch_xla.utils.checkpoint` (reentrant, whatever `checkpoint_impl` says): the recomputation cannot be merged with the first
    computation, and random numbers are the same in both. Keyword arguments of the module work too.
    """
    if checkpoint_fn is None:
        checkpoint_fn = functools.partial(checkpoint, use_reentrant=True)
        checkpoint_impl = CheckpointImpl.REENTRANT
    return NxDCheckpointWrapper(module, checkpoint_impl, checkpoint_fn, **checkpoint_fn_kwargs)


def apply_activation_checkpointing(
    model: Any,
    checkpoint_wrapper_fn: Callable[[torch.nn.Module], torch.nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[torch.nn.Module], bool] = lambda _: True,
) -> None:
    """Wrap, in place, every module inside `model` (not itself) for which `check_fn` holds, innermost first.

    Of a pipeline model its transformer layers are wrapped, whatever `check_fn` says; of an `NxDModel` what `check_fn` chooses in its local modules.
    """
    for module in _local_modules(model):
        _wrap_children(module, checkpoint_wrapper_fn, _choice(model, check_fn), {})


def _local_modules(model: Any) -> list[torch.nn.Module]:
    stages = _of_pipeline(model, "local_stage_modules")
    if stages is not None:
        return list(stages)
    local = getattr(type(model), "local_modules", None)
    return list(local(model)) if local is not None else [model]


def _choice(model: Any, check_fn: Callable[[torch.nn.Module], bool]) -> Callable[[torch.nn.Module], bool]:
    layer = _of_pipeline(model, "transformer_layer_cls")
    return check_fn if layer is None else lambda m: isinstance(m, layer)


def _of_pipeline(model: Any, name: str) -> Any:
    """An attribute that pipeline models have; None for other models."""
    return getattr(model, name, None) if hasattr(type(model), "cut_pipeline_stage") else None


def _wrap_children(
    module: torch.nn.Module,
    wrap: Callable[[torch.nn.Module], torch.nn.Module],
    chosen: Callable[[torch.nn.Module], bool],
    done: dict[torch.nn.Module, torch.nn.Module],
) -> None:
    """Replace chosen modules below `module` by wrapped ones. A module that occurs several times stays one module."""
    for name, child in module._modules.items():
        if child is None or isinstance(child, CheckpointWrapper):
            continue
        if child not in done:
            _wrap_children(child, wrap, chosen, done)
            done[child] = wrap(child) if chosen(child) else child
        module._modules[name] = done[child]
