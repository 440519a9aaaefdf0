"""Passes of stages as one call of a program each, where the first micro-batches of a step have shown that this is all they are.

Recording a pass, even one that is played (`torch_bridge.replay`), and looking its program up takes several times as long as JAX's call. So each step records
the first passes of every stage, and learns from them what its programs take and give (`torch_bridge.replay.rerun`). Later passes of the step call these
programs: same numbers, no autograd, no tensors but those that go to other stages. Nothing is taken from one step to the next but which stages this worked
for, so whatever a script changes between steps is seen.

It takes part only where no code of the script's runs in a step: all stages are played, no hooks on weights, no loss function of the script's. A backward
pass that turns out to be another one computes its forward pass again, in the ordinary way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from nxd_jax.pipeline.stages import FromStage, Known, Worked
from torch_bridge.identity import same
from torch_bridge.ir.layout import Layout
from torch_bridge.ir.segment import Storage
from torch_bridge.recorder import autograd_engine
from torch_bridge.recorder.tensor import XLATensor, make
from torch_bridge.replay import accumulate_grad, rerun
from torch_bridge.replay.player import Player
from torch_bridge.replay.rerun import Ran, Rerun

RECORDED = 2
"""Micro-batches that each stage records in a step, those whose backward passes come first: the first of these makes the gradients of weights, the second adds
to them, as all others do."""
FAILURES = 3
"""Direct forward passes that may be computed again one after the other, their backward passes being others, before all are recorded for good."""

Orders = tuple[Sequence[int], Sequence[int]]
"""Micro-batches of a stage in the order of their backward passes: of those that are whole, and of those in two parts."""

_GRAD = attrgetter("grad")
_PLAIN = (bool, int, float, str, type(None), torch.device, torch.dtype, torch.Size)


class Result(NamedTuple):
    """A tensor that a program makes. number: of the result; base, view: layouts of its storage and its own; spec: how ranks hold it; grad: it takes
    gradients."""

    number: int
    base: Layout
    view: Layout
    spec: Any
    grad: bool


class Tree(NamedTuple):
    """A value of plain objects and tensors that a program makes."""

    leaves: list[Any]
    how: Any


class Given(NamedTuple):
    """What a forward pass hands on. near: to stages of this process, with how many read it; far: what is sent, with the stage; output: of the last stage."""

    near: list[tuple[FromStage, int, Any]]
    far: list[tuple[FromStage, int, Any]]
    output: Any = None


class Taken(NamedTuple):
    """What a forward pass takes. args: of the stage; returned: inputs of the model that it returns, or makes the loss of, in the last stage."""

    args: Any
    returned: dict[Any, Any]


class Kept(NamedTuple):
    """What a direct forward pass keeps for its backward pass.

    taken: by the stage; sources: those that take gradients, with where they came from; results: what its program gave, None where no backward pass reads it.
    """

    taken: Taken
    sources: list[tuple[torch.Tensor, Any]]
    results: list[Any]


class _Forward(NamedTuple):
    """A forward pass that is known. like: what its arguments have in common; needed: what its backward pass reads of inputs and results, which are
    numbered behind them."""

    program: Rerun
    like: Any
    given: Given
    needed: frozenset[int]

    def is_like(self, other: _Forward) -> bool:
        """Whether another one takes, computes and gives the same: what is learned from its backward pass holds for this one."""
        return (self.like, self.given) == (other.like, other.given) and self.program.is_like(other.program)


class _Backward(NamedTuple):
    """A backward pass that is known.

    program: None if there is nothing to compute before the pass of weights. names: of the results whose gradients arrive; like: what these have in common;
    returned: gradients of inputs, by place among the sources; parameters: with what their gradients are added up in; bumped: what of that is written.
    """

    program: Rerun | None
    names: tuple[Any, ...]
    like: Any
    returned: list[tuple[int, Result]]
    parameters: list[nn.Parameter]
    sums: list[Any]
    bumped: list[torch.Tensor]

    def is_like(self, other: _Backward) -> bool:
        """Whether another one takes, computes and gives the same: what is learned from the pass of weights behind it holds for this one."""
        if self.program is None or other.program is None:
            return self.program is other.program
        return (self.names, self.like, self.returned) == (other.names, other.like, other.returned) and self.program.is_like(other.program)


class _Weights(NamedTuple):
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


@dataclass
class _Learned:
    """Of a stage in this step.

    orders: its micro-batches by their backward passes, see `Direct`. recorded: those whose passes are recorded. backward: whole passes; inputs: those of inputs
    alone, where those of `weights` follow. needed, later: see `Worked`. arrays: by micro-batch whose recorded forward pass was the known one, its inputs', and
    what its program gave.
    """

    orders: Orders
    recorded: set[int]
    forward: _Forward | None = None
    backward: _Backward | None = None
    inputs: _Backward | None = None
    weights: _Weights | None = None
    needed: frozenset[int] = frozenset()
    later: frozenset[int] = frozenset()
    arrays: dict[int, list[weakref.ref[Any] | None]] = field(default_factory=dict)

    def is_complete(self) -> bool:
        """Whether backward passes of all kinds that may be direct are known."""
        whole, parted = (len(order) > RECORDED for order in self.orders)
        return (self.backward is not None or not whole) and (self.weights is not None or not parted)


class Direct:
    """The direct passes of one step.

    Args:
        modules: of the stages that this process has a part of, by their numbers.
        orders: by stage, the micro-batches in the order of their backward passes: those with a whole one, and those with one of inputs and one of weights.
        known: of the steps before.
        seed: of the random numbers of a stage's pass over a micro-batch.
        possible: whether no code of the script's runs in the step beside the modules.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        orders: Mapping[int, Orders],
        known: Known,
        seed: Callable[[int, int], int],
        possible: bool,
    ):
        self.known = known
        self.seed = seed
        self.players = {k: found for k, module in modules.items() if type(found := module.__dict__.get("forward")) is Player}
        self.learned = {k: _Learned(orders[k], {mb for order in orders[k] for mb in order[:RECORDED]}) for k in modules}
        self.on = possible and known.failures < FAILURES and len(self.players) == len(modules) and rerun.usual()
        """Whether passes of this step are learned from."""
        self.ready = self.on and known.of.keys() >= modules.keys()
        """Whether forward passes may be direct: it worked for all stages in an earlier step, and has in this one so far."""

    def watch(self, stage: int, micro_batch: int, parameters: Sequence[nn.Parameter] = (), arrived: Sequence[Any] = ()) -> Watch:
        """A pass is about to be recorded. parameters: whose gradients it adds up, if it is a backward pass; arrived: the gradients that it starts with."""
        return Watch(self, stage, micro_batch, parameters, arrived)

    def forward(self, stage: int, micro_batch: int, taken: Taken, sources: list[Any]) -> tuple[Kept, Given] | None:
        """A forward pass; None, and nothing is done, where it has to be recorded."""
        learned = self.learned.get(stage)
        known = learned.forward if learned is not None and self.ready and micro_batch not in learned.recorded else None
        if known is None or not rerun.usual():
            return None
        leaves = pytree.tree_leaves(tuple(taken))
        if _described(leaves) != known.like:
            return None
        inputs = _held(leaves)
        found = known.program.run(inputs, self.draws(known.program, stage, micro_batch))
        if found is None:
            return None
        player = self.players[stage]
        player.calls += 1
        player.played += 1
        storages: dict[int, Storage] = {}
        near = [(name, readers, _filled(tree, found, storages)) for name, readers, tree in known.given.near]
        far = [(name, to, _filled(tree, found, storages)) for name, to, tree in known.given.far]
        given = Given(near, far, _filled(known.given.output, found, storages))
        return Kept(taken, sources, [held if k in known.needed else None for k, held in enumerate(found, len(inputs))]), given

    def backward(self, stage: int, micro_batch: int, kept: Kept, names: tuple[Any, ...], arrived: Sequence[Any]) -> list[Any] | None:
        """The gradients of its inputs with where these came from; those of weights are added up. None, and nothing is done, if it is none that is known.

        names: of the results whose gradients have arrived.
        """
        known = self.learned[stage].backward
        if known is None or not same(_sums(known.parameters), known.sums) or not _unhooked(known.parameters):
            return None
        made = self._gradients(known, stage, micro_batch, kept, names, arrived)
        if made is not None:
            torch.autograd.graph.increment_version(known.bumped)
        return None if made is None else made[0]

    def input_backward(
        self, stage: int, micro_batch: int, kept: Kept, names: tuple[Any, ...], arrived: Sequence[Any]
    ) -> tuple[list[Any], Rest] | None:
        """The same without gradients of weights, and what is left for those."""
        known = self.learned[stage].inputs
        made = None if known is None else self._gradients(known, stage, micro_batch, kept, names, arrived)
        if made is None:
            return None
        grads, arrays = made
        worked = self.known.of.get(stage)
        if worked is not None:
            arrays = [array if k in worked.later else None for k, array in enumerate(arrays)]
        return grads, Rest(kept._replace(results=[]), names, list(arrived), arrays)

    def weight_backward(self, stage: int, micro_batch: int, rest: Rest) -> bool:
        """Add up the gradients of weights. False, and nothing is done, if how is not known."""
        known = self.learned[stage].weights
        if known is None or not rerun.usual() or not same(_sums(known.parameters), known.sums) or not _unhooked(known.parameters):
            return False
        found = known.program.run(rest.arrays, self.draws(known.program, stage, micro_batch))
        if found is None:
            return False
        arrays = rest.arrays + found
        if known.add.run([arrays[k] for k in known.grads]) is None:
            return False
        torch.autograd.graph.increment_version(known.bumped)
        return True

    def _gradients(
        self, known: _Backward, stage: int, micro_batch: int, kept: Kept, names: tuple[Any, ...], arrived: Sequence[Any]
    ) -> tuple[list[Any], list[Any]] | None:
        """Run the program of a backward pass: gradients of inputs with where these came from; and all arrays that it took and gave."""
        if not rerun.usual() or names != known.names or _described(arrived) != known.like:
            return None
        slots = [*_held(pytree.tree_leaves(tuple(kept.taken))), *kept.results, *_held(arrived)]
        found = [] if known.program is None else known.program.run(slots, self.draws(known.program, stage, micro_batch))
        if found is None:
            return None
        self.players[stage].played_backward += 1
        self.known.failures = 0
        storages: dict[int, Storage] = {}
        return [(_tensor(of, found, storages), kept.sources[k][1]) for k, of in known.returned], slots + found

    def draws(self, program: Rerun, stage: int, micro_batch: int) -> list[rerun.Draw]:
        """The random numbers of a pass."""
        seed = self.seed(stage, micro_batch) if program.draws else 0
        return [(seed, offset) for _, offset in program.draws]

    def failed(self, stage: int) -> None:
        """A direct forward pass has a backward pass that is not known."""
        self.known.failures += 1
        self.forget(stage)

    def forget(self, stage: int) -> None:
        """Record the passes of this step from here on, and those of this stage in the next one, too."""
        self.known.of.pop(stage, None)
        self.ready = False


class Watch:
    """A pass that is recorded, for `Direct` to learn from."""

    def __init__(self, of: Direct, stage: int, micro_batch: int, parameters: Sequence[nn.Parameter], arrived: Sequence[Any]):
        self._of, self._stage, self._micro_batch = of, stage, micro_batch
        self._parameters, self._arrived = parameters, arrived
        self._programs: list[Ran] = []
        self._arrays: list[weakref.ref[Any] | None] = []
        """Of a backward pass of inputs: all that it took and gave; and by `id()` of storages which of these they got."""
        self._made: dict[int, int] = {}
        if of.on:
            player = of.players[stage]
            self._counted = player.played, player.played_backward
            self._held = [t._storage.held for t in arrived]
            tensors = [*player.reads(), *(g for g in _sums(parameters) if isinstance(g, XLATensor))]
            self._lasting = {id(t._storage.held): t._storage for t in tensors if t._storage.held is not None}

    @contextmanager
    def running(self) -> Iterator[None]:
        """A block in which what was recorded runs."""
        if not self._of.on:
            yield
            return
        with rerun.noted() as self._programs:
            yield

    def _was_played(self, forward: int, backward: int) -> bool:
        """Whether there were so many passes, and all were played."""
        player = self._of.players[self._stage]
        return (player.played - self._counted[0], player.played_backward - self._counted[1]) == (forward, backward)

    def _ran(self, forward: int, backward: int) -> Ran | None:
        """What ran, if that was one program for one pass that was played, with the random numbers of this pass."""
        if not self._of.on or len(self._programs) != 1 or not self._was_played(forward, backward) or self._of.players[self._stage].asks():
            return None
        ran = self._programs[0]
        return ran if self._draws_its_own(ran) else None

    def _draws_its_own(self, ran: Ran) -> bool:
        """Whether all random numbers of a run are those of this pass."""
        seed = self._of.seed(self._stage, self._micro_batch) if ran.draws else 0
        return all(s == seed for s, _ in ran.draws)

    def learn_forward(self, taken: Taken, given: Given) -> None:
        """From a forward pass. given: what it handed on."""
        ran = self._ran(1, 0)
        if ran is None:
            self._record_another()
            return
        of, learned = self._of, self._of.learned[self._stage]
        leaves = pytree.tree_leaves(tuple(taken))
        like, inputs = _described(leaves), [t._storage for t in leaves if isinstance(t, XLATensor)]
        number = _numbers(ran)
        if like is None or any(id(s) in number for s in inputs):
            return
        program = rerun.learn(ran, [s.held for s in inputs], self._lasting)
        near = [(name, readers, _tree(value, number)) for name, readers, value in given.near]
        far = [(name, to, _tree(value, number)) for name, to, value in given.far]
        output = _tree(given.output, number)
        if program is None or program.written or None in (output, *(tree for *_, tree in (*near, *far))):
            return
        worked = of.known.of.get(self._stage)
        found = _Forward(program, like, Given(near, far, output), frozenset() if worked is None else worked.needed)
        if learned.forward is None:
            learned.forward = found
            if worked is None or worked.program() is not program.program:  # which results its backward pass reads is not known yet
                of.forget(self._stage)
        elif not learned.forward.is_like(found):
            return
        given_and_made = [*(s.held for s in inputs), *(at[0].held if at else None for at in ran.results)]
        learned.arrays[self._micro_batch] = [None if held is None else weakref.ref(held) for held in given_and_made]

    def _record_another(self) -> None:
        """Nothing can be learned from this micro-batch, as its pass was recorded op by op to check what is played, say."""
        learned = self._of.learned.get(self._stage)
        if learned is not None and self._micro_batch in learned.recorded:
            order = next(order for order in learned.orders if self._micro_batch in order)
            learned.recorded.update(order[: len(learned.recorded.intersection(order)) + 1])

    def learn_backward(self, names: tuple[Any, ...], sources: Sequence[Any], returned: Sequence[Any]) -> None:
        """From a whole backward pass. names: of the results whose gradients have arrived; returned: gradients of inputs, with where these came from."""
        learned = self._of.learned.get(self._stage)
        known = None if learned is None else self._learn_gradients(learned, learned.backward, names, sources, returned)
        if known is None or learned is None or known.program is None:
            return
        learned.backward = known
        self._remember(learned, known.program.slots())

    def learn_input_backward(
        self, names: tuple[Any, ...], sources: Sequence[Any], returned: Sequence[Any], grads: Sequence[Any], passed: Mapping[int, Any]
    ) -> None:
        """From a backward pass of inputs alone. grads: of weights; passed: what its program gave the one that was put off, by the value's id."""
        learned = self._of.learned.get(self._stage)
        known = None if learned is None else self._learn_gradients(learned, learned.inputs, names, sources, returned, grads, passed)
        if known is not None and learned is not None and (known.program is None or not known.program.written):
            learned.inputs = known

    def learn_weight_backward(self, before: Watch, grads: Sequence[Any], held: Sequence[Any]) -> None:
        """From the rest of it. before: the pass of inputs; held: what the storages of the weights' gradients held before they were added up."""
        learned = self._of.learned.get(self._stage)
        if learned is None or learned.weights is not None or learned.inputs is None or not before._arrays or len(self._programs) != 2:
            return
        ran, adding = self._programs
        if adding.draws or not self._draws_its_own(ran) or not _unhooked(self._parameters):
            return
        number = before._made | {storage: k + len(before._arrays) for storage, k in _numbers(ran).items()}
        made = [number[id(g._storage)] for g in grads if id(g._storage) in number]
        program = rerun.learn(ran, _alive(before._arrays), self._lasting)
        add = rerun.learn(adding, held, self._lasting)
        if program is None or add is None or program.written or len(made) < len(grads):
            return
        if len(add.written) < len(_numbers(adding)) or len(add.slots()) < len(grads):
            return  # one of the gradients was not there before
        sums = _sums(self._parameters)
        learned.weights = _Weights(program, made, add, list(self._parameters), sums, _written(add, sums))
        first = set() if learned.inputs.program is None else learned.inputs.program.slots()
        self._remember(learned, first, program.slots().union(made))

    def _remember(self, learned: _Learned, needed: Set[int], later: Set[int] = frozenset()) -> None:
        """For later steps: passes of this stage can be direct, if this was the last kind of backward passes that was not known."""
        learned.needed |= needed | later
        learned.later |= later
        if learned.forward is not None and learned.is_complete():
            self._of.known.of[self._stage] = Worked(weakref.ref(learned.forward.program.program), learned.needed, learned.later)

    def _learn_gradients(
        self,
        learned: _Learned,
        known: _Backward | None,
        names: tuple[Any, ...],
        sources: Sequence[Any],
        returned: Sequence[Any],
        later: Sequence[Any] = (),
        passed: Mapping[int, Any] | None = None,
    ) -> _Backward | None:
        """What is known of a backward pass that gave these gradients of inputs, if that can be repeated and is not known.

        later: gradients that are added up later. Notes what a pass took and gave for that of weights, unless it is another one than the known one.
        """
        arrays = learned.arrays.pop(self._micro_batch, None)
        nothing = self._of.on and passed is not None and not self._programs and self._was_played(0, 1)  # no input takes gradients
        ran = None if nothing else self._ran(0, 1)
        if (ran is None and not nothing) or arrays is None:
            return None
        number: dict[int, int] = {}
        given: list[Any] = []
        if ran is not None:
            number = _numbers(ran)
            vids = ran.program.spec.results
            given = [(passed or {}).get(vid, found[0].held if found else None) for vid, found in zip(vids, ran.results, strict=True)]
        taken = [*arrays, *map(weakref.ref, self._held)]
        like = _described(self._arrived)
        if like is None or not same((t._storage.held for t in self._arrived), self._held):
            return None
        program = None if ran is None else rerun.learn(ran, _alive(taken), self._lasting)
        places = {source: k for k, (_, source) in enumerate(sources)}
        grads = [(places[source], result) for t, source in returned if (result := _result(t, number)) is not None]
        if (program is None and not nothing) or len(grads) < len(returned) or not _unhooked(self._parameters):
            return None
        written = set() if program is None else {id(s) for _, s in program.written}
        if number.keys() - written - {id(t._storage) for t, _ in returned} - {id(g._storage) for g in later}:
            return None  # a gradient that was not there before: the next pass adds to it
        sums = _sums(self._parameters)
        found = _Backward(program, names, like, grads, list(self._parameters), sums, _written(program, sums))
        if known is not None and not known.is_like(found):
            return None
        self._arrays = [*taken, *(None if x is None else weakref.ref(x) for x in given)]
        self._made = {storage: len(taken) + k for storage, k in number.items()}
        return found if known is None else None


def _written(program: Rerun | None, sums: Sequence[Any]) -> list[torch.Tensor]:
    """Those of the tensors that a program writes."""
    written = set() if program is None else {id(storage) for _, storage in program.written}
    return [t for t in sums if isinstance(t, XLATensor) and id(t._storage) in written]


def _alive(refs: Sequence[weakref.ref[Any] | None]) -> list[Any]:
    """The arrays that are still there, None for others."""
    return [None if ref is None else ref() for ref in refs]


def _numbers(ran: Ran) -> dict[int, int]:
    """Which result each storage got, by `id()`."""
    return {id(storage): k for k, found in enumerate(ran.results) for storage in found}


def _held(leaves: Sequence[Any]) -> list[Any]:
    """The arrays of the tensors among them."""
    return [x._storage.held for x in leaves if isinstance(x, XLATensor)]


def _described(leaves: Sequence[Any]) -> list[Any] | None:
    """What values have in common that one program takes; None if one cannot be compared, or has no array."""
    found: list[Any] = []
    for x in leaves:
        if isinstance(x, XLATensor):
            held = x._storage.held
            if held is None or x._storage.pending:
                return None
            found.append((x._layout, x._storage.layout, x.requires_grad, x._storage.spec, held.sharding))
        elif type(x) in _PLAIN:
            found.append((type(x), repr(x) if type(x) is float else x))
        else:
            return None
    return found


def _result(t: Any, number: Mapping[int, int]) -> Result | None:
    """A tensor as a program's result, None if it is not one. number: of storages, by `id()`."""
    found = number.get(id(t._storage)) if type(t) is XLATensor else None
    if found is None:
        return None
    return Result(found, t._storage.layout, t._layout, t._storage.spec, t.requires_grad)


def _tree(value: Any, number: Mapping[int, int]) -> Tree | None:
    """A value by the results that its tensors are; None if there is something else in it."""
    leaves, how = pytree.tree_flatten(value)
    found = [_result(x, number) if isinstance(x, torch.Tensor) else x for x in leaves]
    if any(x is None and isinstance(leaf, torch.Tensor) for x, leaf in zip(found, leaves, strict=True)):
        return None
    return Tree(found, how) if all(type(x) in (Result, *_PLAIN) for x in found) else None


def _filled(tree: Tree, results: Sequence[Any], storages: dict[int, Storage]) -> Any:
    """The value, with tensors on what a program gave."""
    return pytree.tree_unflatten([_tensor(x, results, storages) if type(x) is Result else x for x in tree.leaves], tree.how)


def _tensor(of: Result, results: Sequence[Any], storages: dict[int, Storage]) -> torch.Tensor:
    """A tensor on what a program gave. storages: those that are there, by number of the result."""
    storage = storages.get(of.number)
    if storage is None:
        storage = storages[of.number] = Storage(of.base, results[of.number])
        if of.spec is not None:
            storage.describe(spec=of.spec)
    t = make(of.view, storage)
    return t.requires_grad_() if of.grad else t


def _sums(parameters: Sequence[nn.Parameter]) -> list[Any]:
    """What gradients are added up in: `.grad`, and the optimizer's `.main_grad` (`autograd_engine.adds_up`); None where there is none."""
    return [*map(_GRAD, parameters), *(getattr(p, "main_grad", None) for p in parameters)]


def _unhooked(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether gradients may be added up without telling anybody."""
    return accumulate_grad.unwatched() and not any(p._backward_hooks or not autograd_engine.only_adds_up(p) for p in parameters)
