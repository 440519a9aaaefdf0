"""`torch.cond` and `while_loop` of xla tensors: as eager torch runs them, op by op.

torch has its tracer look into their functions, and that wants plain tensors. Here every op is recorded anyway. A predicate is read: what it depends on is run,
unless it is a small integer that the host knows, such as a counter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

_PACKAGE = "torch._higher_order_ops."


def _cond(pred: object, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any] = ()) -> Any:
    return (true_fn if pred else false_fn)(*operands)


def _while_loop(condition: Callable[..., Any], body: Callable[..., Any], carried: Sequence[Any], more: Sequence[Any] = ()) -> Any:
    """carried: the leaves of what the loop carries. Returns the last ones, nested as the body returned them."""
    results: Any = tuple(carried)
    while condition(*carried, *more):
        results = body(*carried, *more)
        found = _pytree.tree_leaves(results)
        if [_facts(x) for x in found] != [_facts(x) for x in carried]:
            raise RuntimeError(
                f"while_loop: body_fn must return tensors like those it was given, {_said(carried)}, and returned {_said(found)}"
            )
        carried = found
    return results


_RUN: dict[str, Callable[..., Any]] = {"_cond_op_wrapper": _cond, "_while_loop_op_wrapper": _while_loop}
"""What the functions do that torch compiles for its operators of control flow."""


def run_on_xla(function: object, compiled: Callable[[], Callable[..., Any]]) -> Callable[..., Any] | None:
    """For a function of torch's that stands for control flow: one that runs it on xla tensors, and is what torch compiles for others. Else None."""
    run = _RUN.get(getattr(function, "__name__", ""))
    if run is None or not str(getattr(function, "__module__", "")).startswith(_PACKAGE):
        return None

    def called(*args: Any, **kwargs: Any) -> Any:
        on_xla = any(isinstance(x, torch.Tensor) and x.device.type == "xla" for x in _pytree.tree_leaves((args, kwargs)))
        return run(*args, **kwargs) if on_xla else compiled()(*args, **kwargs)

    return called


def _facts(x: object) -> object:
    return (x.dtype, tuple(x.shape)) if isinstance(x, torch.Tensor) else type(x)


def _said(found: Sequence[Any]) -> str:
    return ", ".join(f"{x.dtype}{list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__ for x in found)
