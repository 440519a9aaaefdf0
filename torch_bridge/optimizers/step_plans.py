"""What a step of torch's SGD, Adam, AdamW, Adagrad and Adafactor is: the tensors and numbers of one op for each group of parameters (that had as many steps).

State is torch's: made by its own code, under its names, with `step` on the CPU, so a program has no input for each. `gather` looks at a group and says whether
its step is what the rules in `update_rules` compute; nothing is changed before all groups have been looked at.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import optim

from torch_bridge.identity import any_is
from torch_bridge.ir.segment import Foretell
from torch_bridge.mesh import rank_numbers, sharding, spmd
from torch_bridge.optimizers.fused_step import Update
from torch_bridge.optimizers.group_cache import Counters, Known
from torch_bridge.precision import precision_mode
from torch_bridge.recorder import op_rules
from torch_bridge.recorder.tensor import XLATensor

Group = dict[str, Any]
Column = list[Any]
"""A state of that name for each parameter; None where there is none."""

_CHOICES = ("foreach", "fused", "capturable", "differentiable")
_NUMBERS = ("lr", "weight_decay", "momentum", "dampening", "lr_decay", "beta2_decay", "d", "betas", "eps")
_PLAIN = (float, int, bool, type(None))


class Gathered(NamedTuple):
    """A group's parameters that have gradients, those, their states by name, and their step counters (none if the class does not count); counters: these,
    if they were brought together."""

    optimizer: Any
    group: Group
    params: list[Any]
    grads: list[Any]
    columns: list[Column]
    steps: list[torch.Tensor]
    counters: Counters | None = None

    def counted(self) -> Iterator[tuple[float, Sequence[int]]]:
        """Count a step for each parameter; then how many there were, and the places of the parameters that had so many."""
        if not self.steps:
            return
        if self.counters is not None:
            counts = self.counters.count()
        else:
            torch._foreach_add_(self.steps, 1)
            counts = [step.item() for step in self.steps]
        if counts.count(counts[0]) == len(counts):
            yield counts[0], range(len(counts))
            return
        for found in dict.fromkeys(counts):
            yield found, [k for k, n in enumerate(counts) if n == found]

    def update(self, rule: str, places: Sequence[int], columns: list[Column], numbers: list[float], **flags: Any) -> Update:
        """Of the parameters at these places."""
        group = self.group
        given = {"decay": group["weight_decay"] != 0, "maximize": group.get("maximize", False), **flags}
        names = {name for name, on in given.items() if on}
        if len(places) == len(self.params):
            return Update(rule, self.params, columns, numbers, names, self.grads)
        params, grads, *picked = [[column[k] for k in places] for column in (self.params, self.grads, *columns)]
        return Update(rule, params, picked, numbers, names, grads)


@dataclass(frozen=True)
class Plan:
    """Of a class of torch. updates: what to record. names: of its states, by group. made: lists that its `_init_group` fills, 0 if it makes no state.

    counts: whether it counts steps. fits: whether states are there that belong to the parameters. numbers: of a group's update, behind so many steps.
    """

    updates: Callable[[Gathered], Iterator[Update]]
    names: Callable[[Group], tuple[str, ...]]
    made: int
    fits: Callable[[list[Any], list[Column]], bool]
    counts: bool = True
    numbers: Callable[[Group, float], list[float]] | None = None

    def foretell(self, given: Gathered, number: int) -> Foretell | None:
        """What says the numbers of the next update of a group (by number), if they change with its options and steps alone. Keeps no tensors alive."""
        if self.numbers is None or (self.counts and given.counters is None):
            return None
        return functools.partial(_foretold, self, weakref.ref(given.optimizer), number, given.counters)


def gather(plan: Plan, optimizer: torch.optim.Optimizer) -> list[Gathered] | None:
    """What all groups' steps take, with new state where there is none; None if one of them is not what the rules compute."""
    known = _KNOWN.setdefault(optimizer, {})
    found = [_look(plan, optimizer, number, known) for number in range(len(optimizer.param_groups))]
    return None if any(x is None for x in found) else [x for x in found if x is not None]


_KNOWN: weakref.WeakKeyDictionary[Any, dict[int, Known]] = weakref.WeakKeyDictionary()
"""By optimizer: its groups, by number, as they were."""
_NOTES = 16
"""How often notes are made of one group: where it is another one every time, they cost more than they save."""


def _look(plan: Plan, optimizer: torch.optim.Optimizer, number: int, known: dict[int, Known]) -> Gathered | None:
    """A group, in full only if it is not what it was."""
    group = optimizer.param_groups[number]
    if not plain(group):
        return None
    names = plan.names(group)
    before = known.get(number)
    looked = before.look(optimizer, group) if before is not None and before.names == names else None
    if before is not None and looked is not None:
        return Gathered(optimizer, group, *looked, before.counters)
    found = _gather(plan, optimizer, group)
    if found is not None and spmd.active():
        _divide_as_parameters(found.params, found.columns)
    times = 0 if before is None else before.times
    if found is not None and times < _NOTES and Known.possible(group, found[2:6]):
        made = known[number] = Known(optimizer, names, found[2:6], times + 1)
        return found._replace(counters=made.counters)
    return found


def rounds() -> bool:
    """Whether the environment has every op's result rounded, where Adafactor's rule rounds what torch computes on the host."""
    mode = precision_mode.current()
    return mode.float32 is not None or mode.float64 is not None


def plain(group: Group) -> bool:
    """Whether a group's options leave the step to the rules: how torch should do it is not said, and numbers are Python's own, the same for all ranks."""
    if group.get("foreach") is False or any(group.get(name) for name in _CHOICES):
        return False
    given = [group.get(name) for name in _NUMBERS]
    return all(_is_plain(y) for x in given for y in (x if type(x) is tuple else (x,)))


def _is_plain(x: object) -> bool:
    return type(x) in _PLAIN or (isinstance(x, float) and not rank_numbers.is_ranked(x))


def _gather(plan: Plan, optimizer: Any, group: Group) -> Gathered | None:
    params = group["params"]
    grads = [p.grad for p in params]
    if any_is(grads, None):
        params = [p for p, g in zip(params, grads, strict=True) if g is not None]
        grads = [g for g in grads if g is not None]
    if not set(map(type, (*params, *grads))) <= {XLATensor}:
        return None
    names = plan.names(group)
    columns: list[Column] = []
    steps: list[Any] = []
    if names and params:
        held = [optimizer.state[p] for p in params]
        if plan.made and not all(held):
            optimizer._init_group(group, *[[] for _ in range(plan.made)])
        columns = [[state.get(name) for state in held] for name in names]
        steps = [state.get("step") for state in held] if plan.counts else []
    if _apart(params, grads, columns) and _counters(steps) and _fit(plan, params, grads, columns):
        return Gathered(optimizer, group, params, grads, columns, steps)
    return None


_FITTING: set[Any] = set()
"""Layouts of parameters, gradients and states that were found to fit."""
_MOST = 256


def _fit(plan: Plan, params: list[Any], grads: list[Any], columns: list[Column]) -> bool:
    """Whether parameters and gradients hold real numbers of one dtype, and states belong to them."""
    key = (plan, *[None if t is None else t._layout for given in (params, grads, *columns) for t in given])
    if key in _FITTING:
        return True
    found = all(p.is_floating_point() and p.dtype == g.dtype for p, g in zip(params, grads, strict=True)) and plan.fits(params, columns)
    if found:
        if len(_FITTING) >= _MOST:
            _FITTING.clear()
        _FITTING.add(key)
    return found


def _counters(steps: Sequence[Any]) -> bool:
    """Whether they are numbers on the host, each its own."""
    return set(map(type, steps)) <= {torch.Tensor} and all(map(_IS_CPU, steps)) and len(set(map(id, steps))) == len(steps)


_IS_CPU = attrgetter("is_cpu")


def _like(p: Any, t: Any) -> bool:
    """Whether a state has its parameter's shape and dtype."""
    return t is not None and (t._layout is p._layout or (t._layout.size, t._layout.dtype) == (p._layout.size, p._layout.dtype))


def _all_like(params: list[Any], columns: list[Column]) -> bool:
    return all(_like(p, t) for column in columns for p, t in zip(params, column, strict=True))


def _some_like(params: list[Any], columns: list[Column]) -> bool:
    return all(t is None or _like(p, t) for column in columns for p, t in zip(params, column, strict=True))


def _factored(params: list[Any], columns: list[Column]) -> bool:
    """Whether parameters with several dims have factors, and others variances."""
    return all((r is not None) == (c is not None) == (p.dim() > 1) != (v is not None) for p, r, c, v in zip(params, *columns, strict=True))


def _apart(params: Sequence[Any], grads: Sequence[Any], columns: Sequence[Column]) -> bool:
    """Whether what is written is on xla and shares no memory, with each other or with gradients: the rules read everything before they write."""
    written = list(params)
    for column in columns:
        written += column
    if any_is(written, None):
        written = [t for t in written if t is not None]
    if not set(map(type, written)) <= {XLATensor}:
        return False
    storages = {id(t._storage) for t in written}
    return len(storages) == len(written) and storages.isdisjoint([id(g._storage) for g in grads])


def _foretold(plan: Plan, optimizer: weakref.ref[Any], number: int, counters: Counters | None) -> tuple[float, ...] | None:
    """The numbers of a group's next update; None if the optimizer is gone, its parameters had different numbers of steps, or its options are no numbers any
    more: a tensor's arithmetic would be recorded where the script is."""
    found = optimizer()
    step = 0.0 if counters is None else counters.next()
    if found is None or number >= len(found.param_groups) or step is None or plan.numbers is None:
        return None
    group = found.param_groups[number]
    return tuple(map(float, plan.numbers(group, step))) if plain(group) else None


# -- what each records ------------------------------------------------------------------------------


def _sgd_numbers(group: Group, step: float) -> list[float]:
    return [group["weight_decay"], group["momentum"], 1 - group["dampening"], -group["lr"]]


def _sgd(given: Gathered) -> Iterator[Update]:
    group = given.group
    numbers = _sgd_numbers(group, 0)
    if not given.params:
        return
    if not given.columns:
        yield given.update("sgd", range(len(given.params)), [], numbers, nesterov=group["nesterov"])
        return
    (buffers,) = given.columns
    new = [k for k, t in enumerate(buffers) if t is None]
    for k in new:  # zeros, of which nothing is kept: then the first step is the same program as all others
        p = given.params[k]
        buffers[k] = given.optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    started = set(new)
    for chosen, weight in ((new, 1.0), ([k for k in range(len(buffers)) if k not in started], numbers[2])):
        if chosen:
            yield given.update("sgd", chosen, [buffers], [*numbers[:2], weight, numbers[3]], nesterov=group["nesterov"])


def _adam_numbers(group: Group, step: float) -> list[float]:
    (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
    return [
        1 - lr * decay if group.get("decoupled_weight_decay", False) else decay,
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**step) ** 0.5,
        group["eps"],
        -lr / (1 - beta1**step),
    ]


def _adam(given: Gathered) -> Iterator[Update]:
    group = given.group
    for step, places in given.counted():
        yield given.update("adam", places, given.columns, _adam_numbers(group, step), decoupled=group.get("decoupled_weight_decay", False))


def _adagrad_numbers(group: Group, step: float) -> list[float]:
    rate = group["lr"] / (1 + (step - 1) * group["lr_decay"])
    return [group["weight_decay"], group["eps"], -rate]


def _adagrad(given: Gathered) -> Iterator[Update]:
    for step, places in given.counted():
        yield given.update("adagrad", places, given.columns, _adagrad_numbers(given.group, step))


def _adafactor(given: Gathered) -> Iterator[Update]:
    group = given.group
    if not given.params:
        return
    lr, (eps1, eps2) = group["lr"], group["eps"]
    eps1 = torch.finfo(given.params[0].dtype).eps if eps1 is None else eps1
    rows, columns, variances = given.columns
    for step, places in given.counted():
        numbers = [1 - lr * group["weight_decay"], step ** group["beta2_decay"], min(lr, 1 / step**0.5), eps1, eps2, group["d"]]
        for states in ([rows, columns], [variances]):
            _lie_as_parameters(given.params, states)
            chosen = [k for k in places if states[0][k] is not None]
            if chosen:
                yield given.update("adafactor", chosen, states, numbers)


def _divide_as_parameters(params: list[Any], states: list[Column]) -> None:
    """State that was loaded, and so is replicated on the devices of an annotated program, is divided as its parameter is."""
    for state in states:
        for p, t in zip(params, state, strict=True):
            if t is None or t._storage.segment is not None or t._storage.held is None or t._storage.spec is not None:
                continue
            lies = p._storage.spec or spmd.lies(p._storage.held)
            if lies is not None and t._storage.layout.size == p._storage.layout.size:
                t._storage.held = spmd.put(t._storage.held, lies)


def _lie_as_parameters(params: list[Any], states: list[Column]) -> None:
    """New state differs among the ranks among which its parameter does, which torch's way of making it (from the gradient) does not say."""
    for state in states if sharding.active() or spmd.active() else []:
        for p, t in zip(params, state, strict=True):
            if t is not None and t._storage.constant:
                op_rules.lie_as(t, p)


def _adam_names(group: Group) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")


PLANS: dict[type, Plan] = {
    optim.SGD: Plan(
        _sgd, lambda group: ("momentum_buffer",) if group["momentum"] != 0 else (), 0, _some_like, counts=False, numbers=_sgd_numbers
    ),
    optim.Adam: Plan(_adam, _adam_names, 6, _all_like, numbers=_adam_numbers),
    optim.Adagrad: Plan(_adagrad, lambda group: ("sum",), 4, _all_like, numbers=_adagrad_numbers),
    optim.Adafactor: Plan(_adafactor, lambda group: ("row_var", "col_var", "variance"), 6, _factored),
}
"""By the class that defines the step: AdamW's is Adam's."""
