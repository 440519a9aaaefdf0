"""`neuronx_distributed.utils.activation_checkpoint`: modules that compute their activations again in the backward pass instead of keeping them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torch_wrapper
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, CheckpointWrapper
from torch.utils import _pytree as pytree

import nxd_jax.tensor_parallel.random  # noqa: F401  its states are kept beside torch's
from torch_bridge.mesh import random_state
from torch_bridge.torch_xla.core import xla_model
from torch_bridge.torch_xla.utils.checkpoint import _torch_checkpoint

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

    Without it `recomputed`, whatever `checkpoint_impl` says; `checkpoint_fn_kwargs` may then be `preserve_rng_state`.
    """
    if checkpoint_fn is None:
        return NxDCheckpointWrapper(module, CheckpointImpl.NO_REENTRANT, functools.partial(_of_module, checkpoint_fn_kwargs))
    return NxDCheckpointWrapper(module, checkpoint_impl, checkpoint_fn, **checkpoint_fn_kwargs)


def _of_module(options: dict[str, Any], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return recomputed(module, args, kwargs, **options)


def recomputed(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], preserve_rng_state: bool = True) -> Any:
    """`module(*args, **kwargs)` without keeping its activations: the backward pass computes them again. (NxD has no such function.)

    torch's checkpoint without reentrance does it, so that hooks of parameters run once and the module can be played from a recording; the compiler cannot merge
    the two computations, and random numbers are the same in both (`preserve_rng_state`), also those of `get_xla_rng_tracker()`. Tensors may be anywhere in
    nested arguments and results, and need not require gradients for the module's parameters to get theirs. Without gradients to compute (`no_grad`, everything
    frozen) this is a plain call.

    Raises ValueError for a key-value cache among the arguments, which the second computation would change again, and TypeError for a result whose tensors
    autograd would not see.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)), is_leaf=_is_cache)
    direct = any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)
    if not torch.is_grad_enabled() or not (direct or any(p.requires_grad for p in module.parameters())):
        return module(*args, **kwargs)
    _refuse_caches(module, leaves)
    call = _Call(module, spec, preserve_rng_state)
    outs = _torch_checkpoint(call, *leaves, use_reentrant=False, preserve_rng_state=preserve_rng_state)
    for out in outs:
        if isinstance(out, torch.Tensor) and out.requires_grad:
            out.register_hook(call.reached)
    return pytree.tree_unflatten(outs, call.result)


class _Call:
    """A module's call, with the leaves of its nested arguments as arguments and the leaves of its result as result.

    What runs after a gradient of a result has been told of (`reached`) is the second computation: it waits for the gradients, and has the random state of the
    first.
    """

    def __init__(self, module: torch.nn.Module, spec: pytree.TreeSpec, preserve_rng_state: bool):
        self.module = module
        self.spec = spec
        self.result: Any = None
        """The structure of the result."""
        self._preserve = preserve_rng_state
        self._gradients: list[torch.Tensor] = []
        self._state: Any = None
        self._axes: random_state.Axes = ()
        self._beside: Callable[[], None] | None = None

    def reached(self, gradient: torch.Tensor) -> None:
        """The backward pass has come to a result."""
        if gradient.device.type == "xla" and gradient.is_floating_point() and gradient.numel():
            self._gradients.append(gradient.detach())

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        gradients, self._gradients = self._gradients, []
        if not gradients:
            self._state, self._axes = random_state.DEFAULT.get_state(), random_state.DEFAULT.axes
            self._beside = random_state.beside()
            return self._run(leaves)
        if not self._preserve:
            return self._run(_once_known(leaves, gradients))
        with xla_model.fork_rng(), _drawing(self._axes, self._beside):
            random_state.DEFAULT.set_state(self._state)
            return self._run(_once_known(leaves, gradients))

    def _run(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        found, result = pytree.tree_flatten(self.module(*args, **kwargs))
        self.result = self.result or result
        _check_result(self.module, found)
        return tuple(found)


@contextlib.contextmanager
def _drawing(axes: random_state.Axes, beside: Callable[[], None] | None) -> Iterator[None]:
    """A block in which ranks draw differently along these axes. beside: puts the tracker's states back, if there are any. Afterwards all is as it was."""
    default = random_state.DEFAULT
    before, now = default.axes, random_state.beside()
    default.axes = axes
    if beside is not None:
        beside()
    try:
        yield
    finally:
        default.axes = before
        if now is not None:
            now()


def _once_known(leaves: Sequence[Any], gradients: Sequence[torch.Tensor]) -> list[Any]:
    """The same values, which cannot be computed with before the gradients are known."""
    chosen = [x for x in leaves if isinstance(x, torch.Tensor) and x.device.type == "xla" and x.is_floating_point()]
    if not gradients or not chosen:
        return list(leaves)
    behind = dict(zip(map(id, chosen), _Behind.apply(len(chosen), *chosen, *gradients), strict=True))
    return [behind.get(id(x), x) for x in leaves]


class _Behind(torch.autograd.Function):
    """The first `n` tensors, for which the others must be known. Nothing is kept for the backward pass, which lets gradients pass.

    A barrier says so too, but XLA's compiler for CPUs drops barriers before it decides what runs when, and would then compute everything again at the
    start, which saves nothing. It does not see that a comparison with itself and its opposite cover all cases.
    """

    @staticmethod
    def forward(ctx: Any, n: int, *tensors: torch.Tensor) -> Any:
        firsts = [g.flatten()[0] for g in tensors[n:]]
        known = functools.reduce(torch.logical_and, [(x == x) | (x != x) for x in firsts])
        found = tuple(torch.where(known, x, x.new_zeros(())) for x in tensors[:n])
        ctx.mark_non_differentiable(*[x for x, needs in zip(found, ctx.needs_input_grad[1:], strict=False) if not needs])
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, *grads, *[None] * (len(ctx.needs_input_grad) - 1 - len(grads)))


def _is_cache(x: object) -> bool:
    """Whether something is one of transformers' key-value caches (which some versions register as nested data)."""
    kind = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    return kind is not None and isinstance(x, kind)


def _refuse_caches(module: torch.nn.Module, leaves: Sequence[Any]) -> None:
    if any(_is_cache(x) for x in leaves):
        raise ValueError(
            f"{type(module).__name__} computes its activations again in the backward pass and was given a key-value cache, which would then be written twice: "
            "set config.use_cache = False, or pass use_cache=False, in training"
        )


def _check_result(module: torch.nn.Module, leaves: Sequence[Any]) -> None:
    for x in leaves:
        if dataclasses.is_dataclass(x) and any(isinstance(v, torch.Tensor) for v in vars(x).values()):
            raise TypeError(
                f"{type(module).__name__} computes its activations again and returns a {type(x).__name__}, whose tensors would get no gradients: return a "
                "tensor, or tuples, lists or dicts of tensors (or register the class with torch.utils._pytree.register_dataclass)"
            )


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


def _of_pipeline(model: object, name: str) -> Any:
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
