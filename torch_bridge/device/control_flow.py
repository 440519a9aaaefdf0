"""`torch.cond`, `while_loop`, `scan` and `map` of xla tensors: as eager torch runs them, op by op.

torch has its tracer look into their functions, and that wants plain tensors. Here every op is recorded anyway. A predicate is read: what it depends on is run,
unless it is a small integer that the host knows, such as a counter.
"""

from __future__ import annotations

import inspect
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


def _scan(combine: Callable[..., Any], init: Sequence[torch.Tensor], xs: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    """combine: takes the leaves of a carry and of a slice. Returns the last carry and all outputs stacked, nested as `combine` returns them."""
    carry: Any = init
    outputs = []
    for k in range(len(xs[0])):
        carry, output = combine(*_pytree.tree_leaves(carry), *(x[k] for x in xs))
        found = _pytree.tree_leaves(carry)
        if [_facts(x) for x in found] != [_facts(x) for x in init]:
            raise RuntimeError(
                f"scan: combine_fn must return a carry like the one it was given, {_said(init)}, and returned {_said(found)}"
            )
        outputs.append(output)
    return carry, _stacked(outputs)


def _stacked(outputs: Sequence[Any]) -> Any:
    return _pytree.tree_map(lambda *y: torch.stack(y) if isinstance(y[0], torch.Tensor) else y[0], outputs[0], *outputs[1:])


def _mapped(f: Callable[..., Any], xs: Sequence[torch.Tensor], args: Sequence[Any], *, xs_spec: Any, args_spec: Any) -> Any:
    more = _pytree.tree_unflatten(args, args_spec)
    return _stacked([f(_pytree.tree_unflatten(row, xs_spec), *more) for row in zip(*xs, strict=True)])


_RUN: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "_cond_op_wrapper": (_cond, ()),
    "_while_loop_op_wrapper": (_while_loop, ()),
    "run_flattened_scan": (_scan, ()),
    "run_flattened_map": (_mapped, ("xs_spec", "args_spec")),
}
"""What the functions do that torch compiles for its operators of control flow, and which of its variables say how their arguments are nested."""


def run_on_xla(function: object, compiled: Callable[[], Callable[..., Any]]) -> Callable[..., Any] | None:
    """For a function of torch's that stands for control flow: one that runs it on xla tensors, and is what torch compiles for others. Else None."""
    found = _RUN.get(getattr(function, "__name__", ""))
    if found is None or not str(getattr(function, "__module__", "")).startswith(_PACKAGE):
        return None
    run, names = found

    def called(*args: Any, **kwargs: Any) -> Any:
        on_xla = any(isinstance(x, torch.Tensor) and x.device.type == "xla" for x in _pytree.tree_leaves((args, kwargs)))
        if not on_xla:
            return compiled()(*args, **kwargs)
        outer = inspect.getclosurevars(function).nonlocals if names else {}  # type: ignore[arg-type]
        return run(*args, **kwargs, **{name: outer[name] for name in names})

    return called


def _facts(x: object) -> object:
    return (x.dtype, tuple(x.shape)) if isinstance(x, torch.Tensor) else type(x)


def _said(found: Sequence[Any]) -> str:
    return ", ".join(f"{x.dtype}{list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__ for x in found)
