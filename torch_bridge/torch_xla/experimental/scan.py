"""`torch_xla.experimental.scan`: a loop over the leading dimension of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree


def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any, partition_fn: Any = None, is_fn_pure: bool = False, reverse: bool = False
) -> tuple[Any, Any]:
    """`torch_xla.experimental.scan.scan`: the last carry and the stacked ys of `carry, y = fn(carry, x)` for each slice x of `xs` along dimension 0.

    init, xs, carries and ys: tensors in tuples, lists and dicts; a y may be None. reverse: from the last slice to the first; ys keep the slices' order. The
    loop is recorded slice by slice, so autograd, random numbers and side effects are those of a Python loop; equal slices in a row may be compiled as one
    loop (`NXD_JAX_FOLD`). `partition_fn` and `is_fn_pure`, which say how torch_xla traces `fn`, are not needed. ValueError for `xs` without tensors, of
    different lengths or empty; TypeError if `fn` does not return a pair; RuntimeError for carries that change their structure, shapes or dtypes.
    """
    leaves, spec = _pytree.tree_flatten(xs)
    lengths = {x.shape[0] if isinstance(x, torch.Tensor) and x.dim() else None for x in leaves}
    if len(lengths) != 1 or not (length := lengths.pop()):
        shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__ for x in leaves]
        raise ValueError(f"scan: xs must hold tensors with the same length of dimension 0, at least 1; got {shapes}")
    carry, ys = init, [None] * length
    for k in reversed(range(length)) if reverse else range(length):
        found = fn(carry, _pytree.tree_unflatten([x[k] for x in leaves], spec))
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError(f"scan: fn must return (carry, y), got {type(found).__name__}")
        _check(carry, found[0])
        carry, ys[k] = found
    return carry, _pytree.tree_map(lambda *y: None if y[0] is None else torch.stack(y), ys[0], *ys[1:])


def _check(before: Any, now: Any) -> None:
    """Raises RuntimeError for a carry unlike the one before."""
    (old, old_spec), (new, new_spec) = _pytree.tree_flatten(before), _pytree.tree_flatten(now)
    if old_spec != new_spec or any(map(_facts_differ, old, new)):
        raise RuntimeError(
            f"scan: fn must return a carry like the one it was given ({_pytree.tree_map(_facts, before)}), got {_pytree.tree_map(_facts, now)}"
        )


def _facts(x: object) -> Any:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else x


def _facts_differ(a: Any, b: Any) -> bool:
    return isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor) or (
        isinstance(a, torch.Tensor) and (a.shape, a.dtype) != (b.shape, b.dtype)
    )
