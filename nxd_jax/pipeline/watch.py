"""Passes of stages that are recorded, for `direct` to learn from what their programs take and give."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nxd_jax.pipeline import made
from nxd_jax.pipeline.known_passes import Adding, Given, KnownBackward, KnownForward, KnownWeights, Learned, Source, Taken
from nxd_jax.pipeline.stages import Worked
from nxd_jax.pipeline.sums import storages_of, sums_of, unhooked
from torch_bridge.identity import same
from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.replay import rerun
from torch_bridge.replay.rerun import Ran, Rerun

if TYPE_CHECKING:
    from nxd_jax.pipeline.direct import Direct


class Watch:
    """A pass that is recorded, for `Direct` to learn from."""

    def __init__(self, of: Direct, stage: int, micro_batch: int, parameters: Sequence[nn.Parameter], arrived: Sequence[Any]):
        self._of, self._stage, self._micro_batch = of, stage, micro_batch
        self._parameters, self._arrived = parameters, arrived
        self._programs: list[Ran] = []
        self._arrays: list[weakref.ref[Any] | None] = []
        """Of a backward pass of inputs: all that it took and gave; and by `id()` of storages which of these they got."""
        self._made: dict[int, int] = {}
        self._makes = False
        if of.on:
            player = of.players[stage]
            self._counted = player.played, player.played_backward
            self._held = [t._storage.held for t in arrived]
            self._stage_holds = [t._storage for t in player.reads()]
            lasting = (s for s in (*self._stage_holds, *storages_of(sums_of(parameters))) if s is not None and s.held is not None)
            self._lasting = {id(s.held): s for s in lasting}

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

    def learn_forward(self, taken: Taken, sources: Sequence[Source], given: Given) -> None:
        """From a forward pass. taken: tensors; sources: of those that take gradients; given: what it handed on."""
        ran = self._ran(1, 0)
        if ran is None:
            self._record_another()
            return
        of, learned = self._of, self._of.learned[self._stage]
        leaves = taken.leaves()
        like = [known for value in leaves if (known := made.described(value)) is not None]
        inputs = [t._storage for value in leaves for t in value if isinstance(t, XLATensor)]
        number = _numbers(ran)
        if len(like) < len(leaves) or any(id(s) in number for s in inputs):
            return
        program = rerun.learn(ran, [s.held for s in inputs], self._lasting)
        near = [(name, readers, made.tree(value, number)) for name, readers, value in given.near]
        far = [(name, to, made.tree(value, number)) for name, to, value in given.far]
        output = made.tree(given.output, number)
        if program is None or program.written or None in (output, *(tree for *_, tree in (*near, *far))):
            return
        worked = of.known.of.get(self._stage)
        found = KnownForward(program, like, list(sources), Given(near, far, output), frozenset() if worked is None else worked.needed)
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
        if self._makes:
            learned.making = known
            worked = self._of.known.of.get(self._stage)
            if worked is not None and worked.adding is not None:
                learned.backward = worked.adding.after(known, self._stage_holds)
                if learned.backward is None:
                    self._of.known.unlike.add(self._stage)
        else:
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
        if adding.draws or not self._draws_its_own(ran) or not unhooked(self._parameters):
            return
        number = before._made | {storage: k + len(before._arrays) for storage, k in _numbers(ran).items()}
        made = [number[id(g._storage)] for g in grads if id(g._storage) in number]
        program = rerun.learn(ran, _alive(before._arrays), self._lasting)
        add = rerun.learn(adding, held, self._lasting)
        if program is None or add is None or program.written or len(made) < len(grads):
            return
        if len(add.written) < len(_numbers(adding)) or len(add.slots()) < len(grads):
            return  # one of the gradients was not there before
        sums = sums_of(self._parameters)
        learned.weights = KnownWeights(program, made, add, list(self._parameters), sums, _written(add, sums))
        first = set() if learned.inputs.program is None else learned.inputs.program.slots()
        self._remember(learned, first, program.slots().union(made))

    def _remember(self, learned: Learned, needed: Set[int], later: Set[int] = frozenset()) -> None:
        """For later steps: passes of this stage can be direct, if this was the last kind of backward passes that was not known."""
        learned.needed |= needed | later
        learned.later |= later
        if learned.forward is not None and learned.is_complete():
            program = weakref.ref(learned.forward.program.program)
            self._of.known.of[self._stage] = Worked(program, learned.needed, learned.later, self._adding(learned))

    def _adding(self, learned: Learned) -> Adding | None:
        """How backward passes go on after the first one, from this step or an earlier one."""
        known = self._of.known
        if self._stage in known.unlike:
            return None
        if learned.making is not None and learned.backward is not None:
            return Adding(learned.making, learned.backward, self._stage_holds)
        worked = known.of.get(self._stage)
        return None if worked is None else worked.adding

    def _learn_gradients(
        self,
        learned: Learned,
        known: KnownBackward | None,
        names: tuple[Any, ...],
        sources: Sequence[Any],
        returned: Sequence[Any],
        later: Sequence[Any] = (),
        passed: Mapping[int, Any] | None = None,
    ) -> KnownBackward | None:
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
        like = made.described(self._arrived)
        if like is None or not same((t._storage.held for t in self._arrived), self._held):
            return None
        program = None if ran is None else rerun.learn(ran, _alive(taken), self._lasting)
        places = {source: k for k, (_, source) in enumerate(sources)}
        grads = [(places[source], result) for t, source in returned if (result := made.result(t, number)) is not None]
        if (program is None and not nothing) or len(grads) < len(returned) or not unhooked(self._parameters):
            return None
        written = set() if program is None else {id(s) for _, s in program.written}
        sums = sums_of(self._parameters)
        new = number.keys() - written - {id(t._storage) for t, _ in returned} - {id(g._storage) for g in later}
        self._makes = bool(new)  # gradients that were not there before: the next pass adds to them
        if new and (later or known is not None or written or not new <= {id(storage) for storage in storages_of(sums)}):
            return None
        found = KnownBackward(program, names, like, grads, list(self._parameters), sums, _written(program, sums))
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
