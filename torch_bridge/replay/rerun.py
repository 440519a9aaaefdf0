"""Running a program again on other arrays, without recording what it computes: for whoever knows that the next runs would be the same but for those.

`noted` says what ran in a block. `learn` turns one such run into a `Rerun`: each input of the program is one of the arrays that will be others each time
(`slots`), what a storage holds that lasts, or a constant. A run that is not that simple gives none.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from torch_bridge import _compat
from torch_bridge.config import fork_guard
from torch_bridge.config.settings import SETTINGS
from torch_bridge.identity import any_is, same
from torch_bridge.ir.segment import LOCK, Storage
from torch_bridge.mesh import stacked_arrays
from torch_bridge.passes import scalar_inputs
from torch_bridge.precision import precision_mode
from torch_bridge.replay import torch_state
from torch_bridge.runtime import executor, interrupts
from torch_bridge.runtime.session import STATE

if TYPE_CHECKING:
    from torch_bridge.compiler.program import Program
    from torch_bridge.compiler.program_spec import Execution

Draw = tuple[int, int]
"""Seed and offset of one draw of random numbers."""


class Ran(NamedTuple):
    """One run of a program.

    inputs: by port, what storages held, or a program before gave, that comes in through it. numbers: the Python numbers behind them.
    kept: `id()`s of constants. results: by result, the storages that waited for it.
    """

    program: Program
    inputs: list[list[Any]]
    numbers: list[Any]
    draws: list[Draw]
    kept: frozenset[int]
    results: list[list[Storage]]


@contextlib.contextmanager
def noted() -> Iterator[list[Ran]]:
    """A block, and what its session runs in it, in order. Blocks do not nest."""
    session = STATE.session
    found: list[Ran] = []

    def note(program: Program, run: Execution, args: Sequence[Any], live: Mapping[int, Sequence[Storage]]) -> None:
        spec, segment = program.spec, run.segment
        ports = spec.ports.inputs
        inputs = [[segment.leaves[-v - 1] if (v := spec.inputs[i]) < 0 else args[at] for i in port] for at, port in enumerate(ports)]
        found.append(
            Ran(
                program,
                inputs,
                list(args[len(ports) : len(ports) + len(spec.kinds)]),
                [(seed, offset) for _, seed, offset in segment.draws] if spec.draws else [],
                frozenset(map(id, segment.kept)),
                [list(live.get(vid, ())) for vid in spec.results],
            )
        )

    session.noting = note
    try:
        yield found
    finally:
        session.noting = None


def usual() -> bool:
    """Whether nobody follows single operations or what segments become, or has them run otherwise: a program alone is then all there is to a run."""
    session = STATE.session
    return session.runs_as_usual() and not (SETTINGS.extract_only or session.current.nodes or torch_state.observed())


def learn(ran: Ran, slots: Sequence[Any], lasting: Mapping[int, Storage]) -> Rerun | None:
    """What runs it again with other arrays in the `slots`, None if it is not known what one of its inputs is.

    slots: what each held (None: nothing); lasting: storages that stay, by the `id()` of what they held before the run. Results for one of them go there.
    """
    numbers = {id(held): k for k, held in enumerate(slots) if held is not None}
    if len(numbers) < sum(held is not None for held in slots) or not lasting.keys().isdisjoint(numbers):
        return None  # one array in two places
    stays = {id(storage) for storage in lasting.values()}
    written = [(k, storage) for k, storages in enumerate(ran.results) for storage in storages if id(storage) in stays]
    new = {id(storage) for _, storage in written}
    roles: list[list[_Role]] = []
    for port in ran.inputs:
        found = [_role(held, numbers, lasting, ran.kept) for held in port]
        if any(
            role is None or (isinstance(role, Storage) and id(role) not in new and role.held is not held)
            for role, held in zip(found, port, strict=True)
        ):
            return None
        roles.append([role for role in found if role is not None])
    if any(not isinstance(role, Storage) for at in ran.program.spec.ports.donated for role in roles[at]):
        return None
    if not new <= {id(role) for port in roles for role in port}:
        return None  # it makes one of nothing that it gets: of a tensor that was full of one number
    if any(storage.facts is not None and storage.facts.links for storages in ran.results for storage in storages):
        return None
    return Rerun(ran.program, ran.draws, ran.numbers, roles, written)


def _role(held: Any, slots: Mapping[int, int], lasting: Mapping[int, Storage], kept: frozenset[int]) -> _Role | None:
    """What an input is, by the `id()` of what was held."""
    found: _Role | None = slots.get(id(held), lasting.get(id(held)))
    return _Constant(held) if found is None and id(held) in kept else found


class _Constant(NamedTuple):
    """An input that stays. held: what it is."""

    held: Any


def _alike(a: _Role, b: _Role) -> bool:
    """Whether two inputs are the same. (Arrays are not compared by value.)"""
    return a.held is b.held if type(a) is _Constant and type(b) is _Constant else type(a) is type(b) and a == b


_Role = int | Storage | _Constant
"""What an input of a program is: the number of a slot, what a storage holds that lasts, or a constant."""


class Rerun:
    """A program that can be run again (`learn`).

    Attributes:
        program: it.
        draws: seeds and offsets of its draws in the run that it was learned from.
        written: the results that storages get which last, as (number of the result, storage).
    """

    def __init__(
        self, program: Program, draws: list[Draw], numbers: list[Any], ports: list[list[_Role]], written: list[tuple[int, Storage]]
    ):
        self.program = program
        self.draws = draws
        self.written = written
        self._ports = ports
        self._numbers = numbers
        new = {id(storage) for _, storage in written}
        self._read = [role for port in ports for role in port if isinstance(role, Storage) and id(role) not in new]
        self._arrays = [storage.held for storage in self._read]
        spec = program.spec
        self._stacked = spec.ports.stacked_inputs
        self._taken = sorted(spec.ports.donated)
        self._one_each = not any(self._stacked)
        self._first = [port[0] for port in ports]
        self._placed: list[Any] | None = None
        self._all_placed: bool | None = None

    def slots(self) -> set[int]:
        """Numbers of the slots that it reads."""
        return {role for port in self._ports for role in port if type(role) is int}

    def is_like(self, other: Rerun) -> bool:
        """Whether another one is the same program, with the same slots, storages, constants and numbers in its inputs."""
        return (
            self.program is other.program
            and all(map(_alike, itertools.chain(*self._ports), itertools.chain(*other._ports)))
            and all(map(np.array_equal, self._numbers, other._numbers))
        )

    def run(self, slots: Sequence[Any], draws: Sequence[Draw] = ()) -> list[Any] | None:
        """What the program gives, by result, with these arrays in the slots. Storages that last and are written have their new values then.

        None, and nothing is done, if what it reads beside them is not what it was, or the precision that the environment asks for. Raises what a run raises.
        """
        with LOCK, interrupts.deferred():
            fork_guard.check()
            program = self.program
            if not same(map(_HELD, self._read), self._arrays) or precision_mode.current() != program.spec.mode:
                return None
            args = self._arguments(slots)
            if args is None:
                return None
            further = [scalar_inputs.packed_draws(draws)] if program.spec.draws else []
            further += precision_mode.extra_inputs(program.spec.mode)
            placed = self._is_placed(args)
            if placed:
                assert program.spec.labels is not None
                further = program.spec.labels.placed(further)
            args += self._numbers_placed() if placed else self._numbers
            args += further
            found = executor.run_again(program, args, placed)
            for k, storage in self.written:
                storage.settle(found[k])
                storage.writes += 1
        return found

    def _is_placed(self, args: Sequence[Any]) -> bool:
        """Whether all arrays that it takes lie where it runs. Looked up in the first run: others take the same ones."""
        if self._all_placed is None:
            labels = self.program.spec.labels
            self._all_placed = labels is not None and all(getattr(a.sharding, "mesh", None) is labels.mesh for a in args)
        return self._all_placed

    def _numbers_placed(self) -> list[Any]:
        """The numbers as arrays there."""
        if self._placed is None:
            assert self.program.spec.labels is not None
            self._placed = self.program.spec.labels.placed(self._numbers)
        return self._placed

    def _arguments(self, slots: Sequence[Any]) -> list[Any] | None:
        """As `Program.arguments` makes them; None if a storage has nothing, or rows do not lie as the program takes them."""
        shared = [at for at in self._taken if self._is_shared(at)] if self._taken else []
        if self._one_each:
            held = [slots[role] if type(role) is int else role.held for role in self._first]  # type: ignore[union-attr]
            if any_is(held, None):
                return None
            args = held if stacked_arrays.Row not in set(map(type, held)) else list(map(stacked_arrays.plain, held))
        else:
            args = []
            for port, stacked in zip(self._ports, self._stacked, strict=True):
                rows = [slots[role] if type(role) is int else role.held for role in port]  # type: ignore[union-attr]
                if any_is(rows, None):
                    return None
                args.append(stacked_arrays.together(rows) if stacked else stacked_arrays.plain(rows[0]))
            if any_is(args, None):
                return None
        for at in shared:
            if self._stacked[at] or args[at] is self._first[at].held:  # type: ignore[union-attr]
                with _compat.enable_x64():
                    args[at] = jnp.array(args[at], copy=True)
        return args

    def _is_shared(self, at: int) -> bool:
        """Whether somebody but its storage has what the program takes over there."""
        port = self._ports[at]
        if len(port) == 1:
            return sys.getrefcount(port[0].held) > _ALONE  # type: ignore[union-attr]
        return any(sys.getrefcount(role.held) > _ALONE for role in port)  # type: ignore[union-attr]


class Template:
    """A `Rerun` for a time when arrays are others, and storages may be. It keeps none of these alive, nor the program.

    Args:
        of: what it is made from.
        lasting: the storages that last which that reads and writes, in an order that has a meaning: later they are known by their places.
    """

    def __init__(self, of: Rerun, lasting: Sequence[Storage | None]):
        places = {id(storage): k for k, storage in enumerate(lasting) if storage is not None}
        self._program = weakref.ref(of.program)
        self._draws, self._numbers = of.draws, of._numbers
        self._ports = _by_place(of, places)
        self._written = [(k, _Lasting(places.get(id(storage), _NOWHERE))) for k, storage in of.written]

    def is_like(self, of: Rerun, lasting: Sequence[Storage | None]) -> bool:
        """Whether it would be the same made from another one, which writes nothing. lasting: the storages of that."""
        places = {id(storage): k for k, storage in enumerate(lasting) if storage is not None}
        return (
            self._program() is of.program
            and not self._written
            and not of.written
            and all(map(_is_same_role, itertools.chain(*self._ports), itertools.chain(*_by_place(of, places))))
            and all(map(np.array_equal, self._numbers, of._numbers))
        )

    def bound(self, lasting: Sequence[Storage | None]) -> Rerun | None:
        """The `Rerun` on the storages that are there now, in the same places; None if something is gone."""
        program = self._program()
        ports = [[_found(role, lasting) for role in port] for port in self._ports]
        written = [(k, storage) for k, role in self._written if isinstance(storage := _found(role, lasting), Storage)]
        if program is None or any_is(itertools.chain(*ports), None) or len(written) < len(self._written):
            return None
        return Rerun(program, self._draws, self._numbers, ports, written)  # type: ignore[arg-type]


_NOWHERE = -1


class _Lasting(NamedTuple):
    """A storage that lasts, by its place; `_NOWHERE` for one that was not among those."""

    place: int


_Kept = int | _Lasting | weakref.ref[Any]
"""A role without what it holds; constants are weak references."""


def _by_place(of: Rerun, places: Mapping[int, int]) -> list[list[_Kept]]:
    """Its roles. places: of the storages that last, by `id()`."""
    return [[_kept(role, places) for role in port] for port in of._ports]


def _kept(role: _Role, places: Mapping[int, int]) -> _Kept:
    if isinstance(role, int):
        return role
    return weakref.ref(role.held) if isinstance(role, _Constant) else _Lasting(places.get(id(role), _NOWHERE))


def _is_same_role(a: _Kept, b: _Kept) -> bool:
    """Arrays are not compared by value."""
    return a() is b() is not None if isinstance(a, weakref.ref) and isinstance(b, weakref.ref) else type(a) is type(b) and a == b


def _found(kept: _Kept, lasting: Sequence[Storage | None]) -> _Role | None:
    """The role now; None if what it was is gone."""
    if isinstance(kept, int):
        return kept
    if isinstance(kept, _Lasting):
        return None if kept.place == _NOWHERE else lasting[kept.place]
    held = kept()
    return None if held is None else _Constant(held)


_HELD = attrgetter("held")
_ALONE = 2
"""References to what only its storage holds: the storage's, and that of the call that counts them."""
