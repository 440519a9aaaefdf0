"""A played call as one call of its program: nothing is recorded, and no tensors are made but those that it returns.

For calls that follow each other and run at once, such as the tokens of `generate()`. `at_once` makes a call in the ordinary way and runs what it recorded; if
it was played and nothing else waited, the program that ran is all there is to the next calls of the same kind, and a `Direct` calls it. What the module's
code reads is not asked again: whoever has a `Direct` knows that no other code has run since. What the tensors are, torch's settings and the environment are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import torch

from torch_bridge import _compat
from torch_bridge.config import fork_guard
from torch_bridge.config.settings import SETTINGS
from torch_bridge.identity import any_is, same
from torch_bridge.ir.segment import LOCK, Results, Segment, Storage
from torch_bridge.mesh import places, sharding, spmd
from torch_bridge.passes import scalar_inputs
from torch_bridge.precision import precision_mode
from torch_bridge.recorder import dispatch
from torch_bridge.recorder.tensor import make
from torch_bridge.replay import output_trees, recordings, torch_state
from torch_bridge.runtime import executor, interrupts, transfer

if TYPE_CHECKING:
    from torch_bridge.compiler.program import Program
    from torch_bridge.replay.module_calls import Call
    from torch_bridge.replay.recordings import Forward, Kind
    from torch_bridge.runtime.session import Session

_STORAGE, _HELD = map(attrgetter, ("_storage", "held"))


class _Wiring(NamedTuple):
    """Between what a call is given and the values of a segment with nothing else in it.

    leaves: for each, the number of the storage that it was read from, or (a constant of the tape) its array. wrote: numbers of storages and their new values.
    outs: for each storage of what is returned, the tensors on it, and its value. numbers: lifted Python numbers, by type.
    """

    leaves: list[Any]
    wrote: list[tuple[int, int]]
    outs: list[tuple[recordings.Made, int]]
    numbers: dict[type, Any]


def at_once(call: Call, kind: Kind, new: Sequence[torch.Tensor]) -> tuple[Any, Direct | None]:
    """Make a call and run all that is recorded: its result; and what does the same for calls like it, if it was played and that is possible.

    new: arguments in whose places these will have others.
    """
    session = dispatch.STATE.session
    segment = session.current
    alone = not segment.nodes and not segment.leaves and _usual(session)
    played = call.player.played
    result = call.run(kind)
    wiring = None
    if alone and call.player.played > played:
        with LOCK:
            wiring = _wiring(call, kind.forwards[0], segment, result)
    executor.sync()
    numbers = None if wiring is None else _numbers(call, new)
    if wiring is None or numbers is None or not _is_all(session.recent[-1], wiring):
        return result, None
    return result, Direct(call, kind.forwards[0], wiring, session.recent[-1], numbers)


def _usual(session: Session) -> bool:
    """Whether nobody follows what runs, or has it run otherwise."""
    return session.runs_as_usual() and not (SETTINGS.extract_only or transfer.WITNESS is not None or places.in_use() or spmd.active())


def _wiring(call: Call, forward: Forward, segment: Segment, result: Any) -> _Wiring | None:
    """None for a call that a program alone does not say all of."""
    tape = forward.tape
    if tape.draws or tape.asked or any(forward.needs) or segment.fills or segment.sharers or segment is not dispatch.STATE.session.current:
        return None
    if output_trees.gives_back(forward.rest) or any(made.constant for made in forward.outs):
        return None
    number = {id(storage): k for k, storage in enumerate(call.given)}
    constants = {id(c.array): c.array for c in tape.constants}
    leaves: list[Any] = []
    for at, array in enumerate(segment.leaves):
        held = segment.holders.get(-at - 1)
        storage = None if held is None else held()
        known = number.get(id(storage)) if storage is not None else constants.get(id(array))
        if known is None:
            return None
        leaves.append(known)
    wrote = [(k, call.given[k].vid) for k in tape.written()]
    tensors = output_trees.taken_apart(result, call.known(call.tensors)).tensors
    outs = [(made, t._storage.vid) for made, t in zip(forward.outs, tensors, strict=True)]
    storages = [*(call.given[k] for k, _ in wrote), *(t._storage for t in tensors)]
    if any(s.segment is not segment or s.vid < 0 for s in storages) or any(s.facts is not None and s.facts.links for s in storages):
        return None
    return _Wiring(leaves, wrote, outs, {kind: scalar_inputs.flat(segment.numbers, kind) for kind in (float, int)})


def _numbers(call: Call, new: Sequence[torch.Tensor]) -> list[int] | None:
    """Of the storages of arguments that others will take the places of; None if one is not all of its storage, is written, or shares it with something else."""
    found = []
    written = {id(call.given[k]) for k in call.kind.forwards[0].tape.written()}
    for t in new:
        storage = t._storage  # type: ignore[attr-defined]
        whole = t._layout is storage.layout and t.is_contiguous()  # type: ignore[attr-defined]
        if not whole or id(storage) in written or sum(other._storage is storage for other in call.every) != 1:
            return None
        found.append(next(k for k, other in enumerate(call.given) if other is storage))
    return found


def _is_all(program: Program, wiring: _Wiring) -> bool:
    """Whether a program does all that was recorded, and takes nothing that is not known."""
    spec = program.spec
    values = {vid for _, vid in wiring.wrote} | {vid for _, vid in wiring.outs}
    return (
        set(spec.results) == values
        and all(-len(wiring.leaves) <= vid < 0 for vid in spec.inputs)
        and not (spec.draws or any(spec.ports.stacked_inputs) or any(spec.ports.stacked_outputs))
    )


class Direct:
    """Calls of a played module that are like one that was made (`at_once`), one after the other, on the same tensors but for those that are new in each.

    It has the tensors of that call, and so keeps their storages; which arrays these hold is looked up in each call.
    """

    def __init__(self, call: Call, forward: Forward, wiring: _Wiring, program: Program, new: list[int]):
        spec = program.spec
        self._session = dispatch.STATE.session
        self._program = program
        self._player = call.player
        self._ambient = call.ambient
        self._forward, self._wiring = forward, wiring
        place = {number: k for k, number in enumerate(new)}
        self._like = [(t.shape, t.dtype) for t in map(call.first.__getitem__, new)]
        anew = {call.given[k] for k in new}
        self._tensors = [t for t in call.every if t._storage not in anew]
        self._storages = list(map(_STORAGE, self._tensors))
        self._bumped = [call.every[k] for k in forward.bumped]
        self._written = [call.given[k] for k, _ in wiring.wrote]
        written = set(self._written)
        self._read = [s for k, s in enumerate(call.given) if s not in written and k not in place]
        self._arrays = list(map(_HELD, self._read))
        self._order: list[Any] = []
        """By input: the place of a new tensor, a storage, or an array."""
        for port in spec.ports.inputs:
            found = wiring.leaves[-spec.inputs[port[0]] - 1]
            self._order.append(found if type(found) is not int else place.get(found, call.given[found]))
        self._taken = [at in spec.ports.donated for at in range(len(self._order))]
        self._packed = [spec.slots[kind].pack(wiring.numbers[kind]) for kind in spec.kinds]

    def call(self, new: Sequence[torch.Tensor]) -> Any:
        """What the module returns. new: CPU tensors of the shapes and dtypes that the new ones had. (What it returns is never None.)

        None, and nothing is done, if these, the other tensors, torch's settings or the environment are not what they were.
        """
        session = self._session
        if dispatch.STATE.session is not session or session.current.nodes or not _usual(session):
            return None
        if torch_state.observed() or torch_state.now() != self._ambient or precision_mode.current() != self._program.spec.mode:
            return None
        if not all(type(t) is torch.Tensor and (t.shape, t.dtype) == like for t, like in zip(new, self._like, strict=True)):
            return None
        with LOCK, interrupts.deferred():
            fork_guard.check()
            if not self._is_as_it_was():
                return None
            args = self._arguments(new)
            made: dict[int, Storage] = {}
            waiting = [(vid, storage) for storage, (_, vid) in zip(self._written, self._wiring.wrote, strict=True)]
            for of, vid in self._wiring.outs:
                if of.storage not in made:
                    made[of.storage] = storage = Storage(of.base)
                    if of.spec is not None:
                        storage.describe(spec=of.spec)
                    waiting.append((vid, storage))
            self._player.calls += 1
            found = executor.run_again(self._program, args)
            Results.of(waiting).settle(self._program.spec.results, found)
            self._player.played += 1
            for storage in self._written:
                storage.writes += 1
        torch.autograd.graph.increment_version(self._bumped)
        outs = [make(of.view, made[of.storage]) for of, _ in self._wiring.outs]
        return output_trees.put_together(outs, (), self._forward.rest, self._forward.how)

    def _is_as_it_was(self) -> bool:
        """Whether tensors are on the storages that they were on, those that are read hold what they held, and those that are written hold something."""
        return (
            same(map(_STORAGE, self._tensors), self._storages)
            and same(map(_HELD, self._read), self._arrays)
            and not any_is(map(_HELD, self._written), None)
        )

    def _arguments(self, new: Sequence[torch.Tensor]) -> list[Any]:
        """As `Program.arguments` makes them; what the program takes over and somebody else holds is copied first."""
        hosts = list(map(transfer.to_array if sharding.active() else transfer.to_host, new))
        args: list[Any] = []
        for found, taken in zip(self._order, self._taken, strict=True):
            if type(found) is int:
                args.append(hosts[found])
            elif type(found) is not Storage:
                args.append(found)
            elif taken and sys.getrefcount(found.held) > _ALONE:
                with _compat.enable_x64():
                    args.append(jnp.array(found.held, copy=True))
            else:
                args.append(found.held)
        return args + self._packed + precision_mode.extra_inputs(self._program.spec.mode)


_ALONE = 2
"""References to an array that only its storage holds: the storage's, and that of the call that counts them."""
