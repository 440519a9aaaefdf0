"""What is known of the passes of a stage that need not be recorded (`direct`): their programs, with what these take and give."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from nxd_jax.pipeline.made import Made, MadeTensor, Result, Tree, described, held
from nxd_jax.pipeline.stages import FromStage, filled, tensors
from nxd_jax.pipeline.sums import storages_of
from torch_bridge.identity import any_is
from torch_bridge.ir.segment import Storage
from torch_bridge.replay.rerun import Rerun, Template

RECORDED = 2
"""Micro-batches that each stage records in a step, those whose backward passes come first: the first of these makes the gradients of weights, the second adds
to them, as all others do. One, where an earlier step has shown how that is done (`Adding`)."""

Orders = tuple[Sequence[int], Sequence[int]]
"""Micro-batches of a stage in the order of their backward passes: of those that are whole, and of those in two parts."""

Source = tuple[int, int | None, int]
"""Where a tensor comes from: stage, position among its results, which tensor of that value."""


class Given(NamedTuple):
    """What a forward pass hands on. near: to stages of this process, with how many read it; far: what is sent, with the stage; output: of the last stage."""

    near: list[tuple[FromStage, int, Any]]
    far: list[tuple[FromStage, int, Any]]
    output: Any = None


class Taken(NamedTuple):
    """What a forward pass takes, tensors or what a direct pass has made (`Made`), by where it comes from.

    args: of the stage; returned: inputs of the model that it returns, or makes the loss of, in the last stage.
    """

    args: dict[Any, Any]
    returned: dict[Any, Any]

    def values(self) -> Iterator[Any]:
        """All of it."""
        return itertools.chain(self.args.values(), self.returned.values())

    def leaves(self) -> list[list[Any]]:
        """What is in each value; all are tensors (`with_tensors`)."""
        return [pytree.tree_leaves(value) for value in self.values()]

    def with_tensors(self) -> Taken:
        """The same, all of it tensors."""
        return Taken({arg: value.value() if type(value) is Made else value for arg, value in self.args.items()}, self.returned)

    def arguments(self, args: Any) -> Any:
        """What the stage's module is called with. args: `Stage.args`."""
        return filled(args, self.args)

    def sources(self) -> list[tuple[torch.Tensor, Source]]:
        """Those that take gradients, of tensors from stages before, with where they came from."""
        from_stages = ((arg, value) for arg, value in self.args.items() if isinstance(arg, FromStage))
        return [(t, (arg.stage, arg.position, k)) for arg, value in from_stages for k, t in enumerate(tensors(value)) if t.requires_grad]


class Kept(NamedTuple):
    """What a direct forward pass keeps for its backward pass.

    taken: by the stage; inputs: the arrays of that; sources: of those that take gradients; results: what its program gave, None where no backward pass reads
    it.
    """

    taken: Taken
    inputs: list[Any]
    sources: list[Source]
    results: list[Any]


@dataclass(eq=False)
class KnownForward:
    """A forward pass that is known.

    program: of it. like: what its arguments have in common, by value; sources: of those that take gradients; given: `Tree`s for values; needed: what its
    backward pass reads of inputs and results, which are numbered behind them.
    """

    program: Rerun
    like: list[list[Any]]
    sources: list[Source]
    given: Given
    needed: frozenset[int]

    def __post_init__(self) -> None:
        self._trees: list[Tree | None] = [None] * len(self.like)
        """By argument, the tree of a value that was found to be alike."""

    def is_like(self, other: KnownForward) -> bool:
        """Whether another one takes, computes and gives the same: what is learned from its backward pass holds for this one."""
        return (self.like, self.sources, self.given) == (other.like, other.sources, other.given) and self.program.is_like(other.program)

    def inputs(self, taken: Taken) -> list[Any] | None:
        """The arrays that its program takes; None for other arguments."""
        arrays: list[Any] = []
        for k, value in enumerate(taken.values()):
            if type(value) is Made:
                if self._trees[k] is not value.tree:
                    if value.described() != self.like[k]:
                        return None
                    self._trees[k] = value.tree
                arrays += value.arrays
            else:
                leaves = pytree.tree_leaves(value)
                if described(leaves) != self.like[k]:
                    return None
                arrays += held(leaves)
        return arrays


@dataclass(eq=False)
class KnownBackward:
    """A backward pass that is known.

    program: None if there is nothing to compute before the pass of weights. names: of the results whose gradients arrive; like: what these have in common;
    returned: gradients of inputs, by place among the sources; parameters: with what their gradients are added up in; bumped: what of that is written.
    """

    program: Rerun | None
    names: tuple[Any, ...]
    like: list[Any]
    returned: list[tuple[int, Result]]
    parameters: list[nn.Parameter]
    sums: list[Any]
    bumped: list[torch.Tensor]

    def __post_init__(self) -> None:
        self._made: list[Result | None] = [None] * len(self.like)
        """By gradient that arrives, which result one was that was found to be alike."""

    def is_like(self, other: KnownBackward) -> bool:
        """Whether another one takes, computes and gives the same: what is learned from the pass of weights behind it holds for this one."""
        if self.program is None or other.program is None:
            return self.program is other.program
        return self.facts() == other.facts() and self.program.is_like(other.program)

    def facts(self) -> tuple[tuple[Any, ...], list[Any], list[tuple[int, Result]]]:
        """What it takes and gives beside its program's arrays."""
        return self.names, self.like, self.returned

    def arrays(self, names: tuple[Any, ...], arrived: Sequence[Any]) -> list[Any] | None:
        """Those of the gradients that arrived; None if they are other ones. names: of the results whose they are."""
        if names != self.names:
            return None
        arrays: list[Any] = []
        for k, grad in enumerate(arrived):
            if type(grad) is MadeTensor:
                if self._made[k] is not grad.of:
                    if grad.of.described(grad.array) != self.like[k]:
                        return None
                    self._made[k] = grad.of
                arrays.append(grad.array)
            else:
                if described([grad]) != [self.like[k]]:
                    return None
                arrays += held([grad])
        return arrays


class KnownWeights(NamedTuple):
    """The part of a backward pass that was put off.

    program: gives gradients of weights. grads: all of these, as numbers among the arrays that the pass of inputs took and gave, and behind them the program's
    results. add: adds them up in `sums`; parameters, bumped: as for a whole pass.
    """

    program: Rerun
    grads: list[int]
    add: Rerun
    parameters: list[nn.Parameter]
    sums: list[Any]
    bumped: list[torch.Tensor]


class Rest(NamedTuple):
    """What a direct backward pass of inputs leaves for that of weights. names, arrived: the gradients that it began with; arrays: what it took and gave."""

    kept: Kept
    names: tuple[Any, ...]
    arrived: list[Any]
    arrays: list[Any]


class Adding:
    """How gradients of weights are added to those that the first backward pass of a step has made, as another step showed.

    Args:
        making: the pass that made them there.
        adding: the one after it.
        held: storages of what the stage holds.
    """

    def __init__(self, making: KnownBackward, adding: KnownBackward, held: Sequence[Storage]):
        assert making.program is not None and adding.program is not None
        bumped = {id(t) for t in adding.bumped}
        self._held = len(held)
        self._making = Template(making.program, held)
        self._facts = making.facts(), adding.facts()
        self._adding = Template(adding.program, [*held, *storages_of(adding.sums)])
        self._bumped = [id(t) in bumped for t in adding.sums]

    def after(self, making: KnownBackward, held: Sequence[Storage]) -> KnownBackward | None:
        """What backward passes do after this one, in whose `sums` are the gradients that it made; None if that is not known. held: as above, now."""
        made, (names, like, returned) = self._facts
        known = len(held) == self._held and len(making.sums) == len(self._bumped) and made == making.facts()
        if not known or making.program is None or not self._making.is_like(making.program, held):
            return None
        program = self._adding.bound([*held, *storages_of(making.sums)])
        bumped = [t for t, is_bumped in zip(making.sums, self._bumped, strict=True) if is_bumped]
        if program is None or any_is(bumped, None):
            return None
        return KnownBackward(program, names, like, returned, making.parameters, making.sums, bumped)


@dataclass
class Learned:
    """Of a stage in this step.

    orders: its micro-batches by their backward passes, see `Direct`. recorded: those whose passes are recorded. backward: whole passes; making: the whole one
    that made the gradients of weights; inputs: those of inputs alone, where those of `weights` follow. needed, later: see `Worked`. arrays: by micro-batch
    whose recorded forward pass was the known one, its inputs', and what its program gave.
    """

    orders: Orders
    recorded: set[int]
    forward: KnownForward | None = None
    making: KnownBackward | None = None
    backward: KnownBackward | None = None
    inputs: KnownBackward | None = None
    weights: KnownWeights | None = None
    needed: frozenset[int] = frozenset()
    later: frozenset[int] = frozenset()
    arrays: dict[int, list[weakref.ref[Any] | None]] = field(default_factory=dict)

    def is_complete(self) -> bool:
        """Whether backward passes of all kinds that may be direct are known."""
        whole, parted = (len(order) > RECORDED for order in self.orders)
        return (self.backward is not None or not whole) and (self.weights is not None or not parted)
