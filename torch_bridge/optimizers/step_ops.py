"""A known optimizer's step as one op of the graph: `torch_bridge::optimizer_step` updates a list of parameters and their state.

What it does to each is in `update_rules.py`, and in `adafactor.py` where tensors that several ranks share out are looked at as wholes. Import this
after `backend.ensure()` (which brings JAX up).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from torch_bridge.compiler import kept_inputs
from torch_bridge.ir.entry import Entry, Lift, Slot
from torch_bridge.ir.layout import Layout
from torch_bridge.ir.segment import Foretell
from torch_bridge.ir.view_entries import flat
from torch_bridge.lowerings import Stacks, lowering, traced_once, update_rules
from torch_bridge.lowerings.types import Array, Scalar
from torch_bridge.optimizers import adafactor
from torch_bridge.precision.precision_mode import Mode
from torch_bridge.recorder import tensor
from torch_bridge.recorder.dispatch import STATE, special

Arrays = list[Array]
_STEP = "(str rule, {}, Tensor[] grads, {}, {}, {}, float[] numbers, str options) -> {}"
_library = torch.library.Library("torch_bridge", "FRAGMENT")
_library.define(
    f"optimizer_step{_STEP}".format(
        "Tensor[] params", "Tensor[] first", "Tensor[] second", "Tensor[] third", "(Tensor[], Tensor[], Tensor[], Tensor[])"
    )
)
_library.define(
    f"optimizer_step_{_STEP}".format("Tensor(a!)[] params", "Tensor(b!)[] first", "Tensor(c!)[] second", "Tensor(d!)[] third", "()")
)
ops = torch.ops.torch_bridge
kept_inputs.STEPS.add(ops.optimizer_step.default)

Tensors = Sequence[torch.Tensor]


def _meta(rule: str, params: Tensors, grads: Tensors, first: Tensors, second: Tensors, third: Tensors, *_: object) -> Any:
    return tuple([t.new_empty(t.shape) for t in given] for given in (params, first, second, third))


def _on_cpu(*_: object) -> Any:
    raise RuntimeError(
        "a graph with a fused optimizer step runs on xla only: give the optimizer foreach=False to record torch's own operations"
    )


_library.impl("optimizer_step", _meta, "Meta")
_library.impl("optimizer_step", _on_cpu, "CPU")
_library.impl("optimizer_step_", _on_cpu, "CPU")


def _by_parameter(args: Sequence[Any]) -> bool:
    """Adafactor's step looks at many parameters together."""
    return args[0] in update_rules.RULES


_STACKS = Stacks(lists=(1, 2, 3, 4, 5), replaces=(1, 3, 4, 5), elementwise=True, when=_by_parameter)


@lowering(ops.optimizer_step.default, entrywise=True, stacks=_STACKS, floats=("numbers",), mode=True)
def _optimizer_step(
    rule: str,
    params: Arrays,
    grads: Arrays,
    first: Arrays,
    second: Arrays,
    third: Arrays,
    numbers: Sequence[Scalar],
    options: str,
    *,
    mode: Mode,
) -> Any:
    states = _columns((first, second, third), len(params))
    if rule == "adafactor":
        new = adafactor.adafactor(params, grads, states, numbers, options)
    else:
        flags = frozenset(options.split(","))
        new = [traced_once.call(_step, (rule, p, g, s, numbers, flags, mode), {}) for p, g, s in zip(params, grads, states, strict=True)]
    given = [x for x in (params, first, second, third) if x]
    lists = [[x[k].astype(old.dtype) for x, old in zip(new, before, strict=True)] for k, before in enumerate(given)]
    return (*lists, *[[] for _ in range(4 - len(lists))])


def _step(rule: str, p: Array, g: Array, state: Arrays, numbers: Sequence[Scalar], flags: frozenset[str], mode: Mode) -> Arrays:
    return update_rules.RULES[rule](update_rules.Arithmetic(mode), p, g, state, numbers, flags)


def _columns(lists: Sequence[Sequence[Any]], count: int) -> list[list[Any]]:
    """For each parameter its state, from the lists that are not empty."""
    return [[x[k] for x in lists if x] for k in range(count)]


# -- recording ----------------------------------------------------------------------------------------

_ENTRIES: dict[tuple[Any, ...], Entry] = {}
_STORAGE, _LAYOUT = attrgetter("_storage"), attrgetter("_layout")


@special(ops.optimizer_step_.default)
def _record(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """One node, however many tensors: what `dispatch.record` does for any op, without describing each argument."""
    rule, params, grads, first, second, third, numbers, options = args
    tensors = [*params, *grads, *first, *second, *third]
    storages, views = list(map(_STORAGE, tensors)), list(map(_LAYOUT, tensors))
    counts = (len(params), len(grads), len(first), len(second), len(third))
    key = (rule, options, counts, len(numbers), tuple(views))
    entry = _ENTRIES.get(key)
    of_grads = slice(len(params), len(params) + len(grads))
    if entry is None:
        read = tuple(views)
        entry = _ENTRIES[key] = _entry(rule, counts, [*views[: of_grads.start], *views[of_grads.stop :]], read, len(numbers), options)
    segment = STATE.session.current
    inputs = tuple(segment.read_all(storages, views))
    if (foretell := kwargs.get("foretell")) is not None:
        segment.foretold.append((len(segment.nodes), foretell))
    vid = segment.emit(entry, inputs, tuple(numbers))
    del storages[of_grads], views[of_grads]
    segment.write_all(storages, views, vid)


def _entry(rule: str, counts: Sequence[int], written: Sequence[Layout], read: Sequence[Layout], numbers: int, options: str) -> Entry:
    """counts: tensors in each of the five lists. read, written: layouts of the op's inputs and of what its results go to."""
    slots = iter([Slot(k) for k in range(len(read))])
    lists = [[next(slots) for _ in range(n)] for n in counts]
    lifts = [Lift(k, float) for k in range(numbers)]
    found = Entry(ops.optimizer_step.default, (rule, *lists, lifts, options), {}, tuple(map(flat, written)))
    found.paths = tuple((k, j) for k, n in enumerate([counts[0], *counts[2:]]) for j in range(n))
    return found


def update(
    rule: str,
    params: Tensors,
    grads: Tensors,
    states: Sequence[Tensors],
    numbers: Sequence[float],
    options: str = "",
    foretell: Foretell | None = None,
) -> None:
    """Record one op that updates xla parameters, and their state (up to three lists of tensors), in place. numbers may change without a new program.

    foretell: says which numbers it will have in the next step, as far as that is known.
    """
    lists = [*states, *[[] for _ in range(3 - len(states))]]
    args = (rule, params, grads, *lists, [float(x) for x in numbers], options)
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        with torch.no_grad():
            ops.optimizer_step_(*args)
    else:  # torch's dispatcher would take hundreds of tensors apart and put them together again
        tensor.dispatch(ops.optimizer_step_.default, args, {"foretell": foretell})
    torch.autograd.graph.increment_version([t for given in (params, *states) for t in given])
