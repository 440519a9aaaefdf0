"""torch functions of CPU tensors and numbers that differ by rank: each rank's own result, as a tensor that differs by rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from torch_bridge.mesh import rank_numbers, world
from torch_bridge.recorder import rank_array
from torch_bridge.recorder.rank_tensor import RankTensor, check_writable, divide, join, memory, on_each, own, varied_axes, write_each


def compute(func: Callable[..., Any], args: Any, kwargs: Any, generators: Sequence[Any] = ()) -> Any:
    """What a torch function gives on each rank, of CPU tensors and numbers that differ by rank.

    Raises PlainNumberNeeded where that is no tensor: a write into a tensor that all ranks share, gradients of one, shapes that differ.
    """
    if len(world.current().hosted) == 1:
        return func(*own(args, 0), **own(kwargs, 0))
    target = _target(func, args, kwargs)
    if target is not None and not isinstance(target, RankTensor) and not divide(target):
        if getattr(func, "__name__", "") == "fill_":
            return target.copy_(compute(torch.full_like, args, kwargs))
        raise _refused((args, kwargs))
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise _refused((args, kwargs))
    if target is not None:
        return _write(target, func, args, kwargs, generators)
    where = _where(kwargs, tensors)
    if where == "meta":
        return func(*own(args, 0), **own(kwargs, 0))
    return _make_on_xla(func, args, kwargs, generators) if where == "xla" else _make(func, args, kwargs, generators)


def _refused(given: Any) -> rank_numbers.PlainNumberNeeded:
    """The error for the first number that differs by rank among some arguments."""
    number = next((x for x in tree_leaves(given) if rank_numbers.is_ranked(x)), None)
    return rank_numbers.refuse((0,) if number is None else tuple(rank_numbers.per_rank(number)))


def _write(target: RankTensor, func: Callable[..., Any], args: Any, kwargs: Any, generators: Sequence[Any]) -> Any:
    """A function that writes to a tensor that differs by rank: it returns that, or nothing."""
    check_writable(target)
    results = write_each([target], tree_leaves((args, kwargs)), lambda: on_each(func, args, kwargs, generators))
    return target if isinstance(results[0], torch.Tensor) else None


def _make(func: Callable[..., Any], args: Any, kwargs: Any, generators: Sequence[Any]) -> Any:
    """A function that gives something new, of each rank's arguments."""
    leaves = tree_leaves((args, kwargs))
    found = join(on_each(func, args, kwargs, generators), None if generators else varied_axes(leaves), memory(leaves))
    return found.requires_grad_() if kwargs.get("requires_grad") else found


def _make_on_xla(func: Callable[..., Any], args: Any, kwargs: Any, generators: Sequence[Any]) -> Any:
    """The same on xla: made on the CPU, then moved."""
    on_cpu = {**{k: v for k, v in kwargs.items() if k != "requires_grad"}, "device": "cpu"}
    found = tree_map(lambda t: t.uploaded() if isinstance(t, RankTensor) else t, _make(func, args, on_cpu, generators))
    return found.requires_grad_() if kwargs.get("requires_grad") else found


def _where(kwargs: Any, tensors: Sequence[torch.Tensor]) -> str:
    """Where a function that makes a tensor makes it; "cpu" for all others."""
    device = kwargs.get("device")
    if device is None:
        return "cpu" if tensors else torch.get_default_device().type
    return torch.device(device).type


def _target(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor that a torch function writes to, if it does."""
    name = getattr(func, "__name__", "")
    if kwargs.get("out") is not None:
        return kwargs["out"]
    writes = name == "__setitem__" or (name.startswith("__i") and name not in ("__int__", "__index__", "__invert__"))
    writes = writes or (name.endswith("_") and not name.endswith("__"))
    return args[0] if writes and args else None


# -- functions that would not ask ---------------------------------------------------------------------

_FUNCTIONS = (
    "tensor", "as_tensor", "asarray", "from_numpy", "full", "scalar_tensor", "arange", "full_like", "roll", "select", "randint", "randint_like",
)  # fmt: skip
_METHODS = ("new_tensor", "new_full", "select", "roll", "narrow")


@functools.cache
def install() -> None:
    """Let functions that insist on plain numbers take those that differ by rank.

    `Tensor.__getitem__` is left alone: with one in Python a tensor is a sequence to C code, and `torch.tensor([a, b])` of tensors fails. Slices
    of CPU tensors are `cpu_slices`'.
    """
    torch.utils._device._device_constructors()  # `with torch.device(...)` knows torch's own functions, by a set that it makes at its first use
    for owner, names in ((torch, _FUNCTIONS), (torch.Tensor, _METHODS)):
        for name in names:
            replace(owner, name, _taking_ranks(getattr(owner, name)))


def replace(owner: object, name: str, function: Callable[..., Any]) -> None:
    """Put a function in the place of one of torch's, for TorchScript too, which looks them up by identity."""
    builtin = torch.jit._builtins._find_builtin(getattr(owner, name)) if owner is torch else None
    if builtin is not None:
        torch.jit._builtins._register_builtin(function, builtin)
    setattr(owner, name, function)


def _taking_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if not (hold_ranks(args) or (kwargs and hold_ranks(tuple(kwargs.values())))):
            return original(*args, **kwargs)
        return rank_numbers.hooks().torch_function(function, args, kwargs, original)

    return function


_NESTED = {list, tuple}
_KINDS = (*rank_numbers.KINDS, RankTensor, rank_array.RankArray)


def hold_ranks(given: Collection[Any], kinds: Collection[type] = _KINDS, nested: Collection[type] = _NESTED) -> bool:
    """Whether numbers or tensors that differ by rank are among some, or in lists of them; quick for long lists of other numbers. kinds: of what differs;
    nested: of what is looked into (of dicts, the values)."""
    found = set(map(type, given))
    if not found.isdisjoint(kinds):
        return True
    return not found.isdisjoint(nested) and any(
        hold_ranks(x.values() if type(x) is dict else x, kinds, nested) for x in given if type(x) in nested
    )
