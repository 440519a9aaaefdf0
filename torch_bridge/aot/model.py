"""Programs with the weights and states that they share, on devices."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import torch
from jax import export

from torch_bridge import _compat
from torch_bridge.aot import branches, devices, exporting, facts
from torch_bridge.aot.facts import Facts, Held, Initial, Tensor
from torch_bridge.collectives import index_checks
from torch_bridge.compiler import executable_cache, xla_options
from torch_bridge.mesh import processes
from torch_bridge.runtime import transfer

logger = logging.getLogger("nxd_jax")

RankWeights = Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced program without its code. initial: what states begin with, if not with zeros, and weights that need not be given (each rank's own, too)."""

    facts: Facts
    forms: exporting.Forms
    initial: Mapping[str, Initial] = dataclasses.field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        alike = (self.facts, self.forms, self.initial.keys()) == (other.facts, other.forms, other.initial.keys())
        return alike and all(_initially_same(t, other.initial[name]) for name, t in self.initial.items())

    __hash__ = None  # type: ignore[assignment]


class OnDevice:
    """A rank's result that is still on its device: `.cpu()` waits for it and brings it over."""

    def __init__(self, array: Any, rank: int, of: Tensor, where: devices.Placement):
        self._array, self._rank, self._of, self._where = array, rank, of, where

    @property
    def shape(self) -> torch.Size:
        """As the rank sees it."""
        return torch.Size(self._of.shape)

    @property
    def dtype(self) -> torch.dtype:
        """torch's."""
        return self._of.dtype

    @property
    def device(self) -> torch.device:
        """xla, with the rank as its number."""
        return torch.device("xla", self._rank)

    def cpu(self) -> torch.Tensor:
        """The values as a new CPU tensor."""
        return _to_torch(self._where.read(self._array, self._rank))

    def to(self, device: Any) -> torch.Tensor:
        """`.to("cpu")`."""
        if torch.device(device).type != "cpu":
            raise NotImplementedError(f"results of a traced model go to the CPU only, got {device}: use .cpu()")
        return self.cpu()

    def __repr__(self) -> str:
        return f"OnDevice({self._of}, rank {self._rank})"


class Model:
    """Programs by tag. Weights are there once, and a state that several programs name is one: what one writes the others read.

    `add` programs, `set_weights`, `start`, then `run`. Threads may call `run`: calls wait for each other.
    """

    def __init__(self, where: devices.Placement | None = None) -> None:
        self.programs: dict[str, Program] = {}
        self.weights: dict[str, Held] = {}
        self.states: dict[str, Held] = {}
        self.started = False
        self._where = where
        self._arrays: dict[str, Any] = {}
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._own_weights: dict[str, list[Any]] = {}
        self._state_names: dict[str, tuple[str, ...]] = {}
        self._readers: list[str] = []  # tags of programs that read a state without updating it
        self._alone: set[str] = set()  # names of buffers of which some program has its own
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Model:
        """Programs and weights, which nobody writes to, are shared; states are its own, and go on from what they are."""
        found = memo[id(self)] = Model(self._where)
        with self._lock:
            for name in ("programs", "weights", "states", "_compiled", "_state_names", "_readers", "_alone"):
                setattr(found, name, copy.copy(getattr(self, name)))
            found.started = self.started
            found._arrays = {name: self._copied(array) if name in self.states else array for name, array in self._arrays.items()}
        return found

    def _copied(self, state: Any) -> Any:
        return self.where.put(lambda rank: self.where.read(state, rank), False)

    def add(self, tag: str, program: Program) -> None:
        """Add a program. A buffer that no checkpoint holds (`Program.initial`) and that has other values than another program's of that name is its own, and is
        named `name@tag`. Raises ValueError if its weights, states or ranks do not fit those that are there."""
        others = next(iter(self.programs.values()), None)
        if others is not None and others.facts.ranks != program.facts.ranks:
            raise ValueError(f"program {tag!r} was traced for {program.facts.ranks}, the others for {others.facts.ranks}")
        program = self._with_its_own(tag, program)
        weights = {t.name: t for t in program.facts.weights}
        states = {t.name: t for t in program.facts.states}
        for name, t in {**weights, **states}.items():
            known = self.weights.get(name) or self.states.get(name)
            if known is not None and (known.shape, known.dtype) != (t.shape, t.dtype):
                raise ValueError(f"program {tag!r} has {t}, the others {known}: programs that share weights and states need the same")
        _check_shared(tag, program, [*self.programs.items(), (tag, program)])
        self._check_beginnings(tag, program)
        self.programs[tag] = program
        self._state_names[tag] = tuple(states)
        self.states.update(states)
        self.weights.update(weights)
        for name in self.states:  # what one program updates is a state for all
            self.weights.pop(name, None)
        self._readers = [tag for tag, p in self.programs.items() if any(t.name in self.states for t in p.facts.weights)]

    def _with_its_own(self, tag: str, program: Program) -> Program:
        """The program with other names for buffers of its own."""
        own = {t.name for t in program.facts.weights if t.name in program.initial and t.name in self.weights}
        names = {n: f"{n}@{tag}" for n in own if not all(_begin_alike(n, program, p) for p in self.programs.values() if _holds(p, n))}
        self._alone.update(names)
        weights = tuple(dataclasses.replace(t, name=names.get(t.name, t.name)) for t in program.facts.weights)
        initial = {names.get(n, n): t for n, t in program.initial.items()}
        return Program(dataclasses.replace(program.facts, weights=weights), program.forms, initial) if names else program

    def _check_beginnings(self, tag: str, program: Program) -> None:
        """What one program updates must begin with the same values in all."""
        updated = {*self.states, *(t.name for t in program.facts.states)}
        for other, p in self.programs.items():
            for name in sorted(updated & {*program.initial, *p.initial}):
                values = _beginning(name, program), _beginning(name, p)
                if name in self._alone or (values[0] is not None and values[1] is not None and not _initially_same(values[0], values[1])):
                    raise ValueError(
                        f"{name} is a state, and begins with other values in program {tag!r} than in {other!r}: programs share states by name, so give it the "
                        "same values, or another name"
                    )

    @property
    def ranks(self) -> facts.Ranks:
        """Of all programs."""
        return next(iter(self.programs.values())).facts.ranks

    @property
    def where(self) -> devices.Placement:
        """Where the ranks compute, decided when first asked for."""
        if self._where is None:
            self._where = devices.place(self.ranks, {tag: p.forms for tag, p in self.programs.items()})
        return self._where

    # -- weights and states --------------------------------------------------------------------------

    def set_weights(self, of_ranks: Sequence[RankWeights]) -> None:
        """Put weights on the devices: a dict for each rank that this process hosts, ascending. Names that no program has are passed over.

        Values are cast to the dtype that was traced. Raises ValueError for missing names, other shapes, and ranks that differ in a shared weight.
        """
        hosted = self.where.hosted
        if len(of_ranks) != len(hosted):
            raise ValueError(f"weights are needed for {len(hosted)} ranks, got {len(of_ranks)} dicts")
        initial = self._initial()
        missing = [
            n
            for n in self.weights
            if any(n not in w and _initially(initial.get(n), r) is None for r, w in zip(hosted, of_ranks, strict=True))
        ]
        if missing:
            raise ValueError(f"{len(missing)} weights are missing: {_few(missing)}; they are named as in the traced module's state_dict()")
        by_rank = dict(zip(hosted, of_ranks, strict=True))
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # most of it is copying
            new = dict(zip(self.weights, pool.map(lambda t: self._weight(t, by_rank, initial), self.weights.values()), strict=True))
        self._arrays = {n: a for n, a in self._arrays.items() if n in self.states} | new
        self._own_weights.clear()

    def check_weights(self, of_ranks: Sequence[RankWeights]) -> None:
        """ValueError for weights of another shape, or of another kind of numbers, than were traced. Names that no program has are passed over."""
        for name, of in self.weights.items():
            for own in of_ranks:
                if name in own:
                    _to_host(own[name], of)

    def _weight(self, of: Held, by_rank: Mapping[int, RankWeights], initial: Mapping[str, Initial]) -> Any:
        def host(rank: int) -> np.ndarray:
            t = by_rank[rank].get(of.name)
            if t is None:
                t = _initially(initial[of.name], rank)
                assert t is not None
            return _to_host(t, of)

        if of.shared and len(by_rank) > 1:
            first = by_rank[self.where.hosted[0]].get(of.name)
            for rank, own in by_rank.items():
                if own.get(of.name) is not first and not np.array_equal(_bits(host(rank)), _bits(host(self.where.hosted[0]))):
                    raise ValueError(
                        f"{of.name} was traced as a weight that all ranks share, and rank {rank} is given other values than rank {self.where.hosted[0]}: "
                        "set its attribute tensor_model_parallel (set_tensor_model_parallel_attributes) before the trace"
                    )
        return self.where.put(host, of.shared)

    def _initial(self) -> dict[str, Initial]:
        return {name: t for p in self.programs.values() for name, t in p.initial.items()}

    def reset_states(self) -> None:
        """Let states begin anew."""
        initial = self._initial()
        for name, of in self.states.items():
            begins = _initially(initial.get(name), self.where.hosted[0])
            host = _to_host(torch.zeros(of.shape, dtype=of.dtype) if begins is None else begins, of)
            self._arrays[name] = self.where.put(lambda rank, host=host: host, False)

    def read(self, name: str, rank: int) -> torch.Tensor:
        """A rank's values of a weight or state. Raises KeyError for an unknown name or a rank that is elsewhere."""
        of = self._find(name, rank)
        return _to_torch(self.where.read(self._arrays[name], rank, self._is_shared(name))).view(of.shape)

    @property
    def has_weights(self) -> bool:
        """Whether all weights are on the devices."""
        return bool(self.programs) and all(name in self._arrays for name in self.weights)

    def held(self) -> list[dict[str, torch.Tensor]]:
        """The weights of each rank that this process hosts, as they are on the devices: new CPU tensors, one for all ranks where they share it. None before
        `set_weights`. Those that no checkpoint holds (`Program.initial`) are left out where they are what they began with."""
        if not self.has_weights:
            return []
        hosted, initial = self.where.hosted, self._initial()
        common = {name: self.read(name, hosted[0]) for name in self.weights if self._is_shared(name)}
        found = []
        for rank in hosted:
            own = {name: common[name] if name in common else self.read(name, rank) for name in self.weights}
            begun = {name: _initially(initial.get(name), rank) for name in own}
            found.append({name: t for name, t in own.items() if (first := begun[name]) is None or not same(t, first)})
        return found

    def write(self, name: str, rank: int, value: torch.Tensor) -> None:
        """Set a rank's values of a weight or state; of a weight that all ranks share, everyone's. Raises KeyError for an unknown name or another shape."""
        of = self._find(name, rank)
        if tuple(value.shape) != of.shape:
            raise KeyError(f"{of} cannot take a tensor of shape {list(value.shape)}")
        with self._lock:
            held = {r: self.where.read(self._arrays[name], r, self._is_shared(name)) for r in self.where.hosted}
            held[rank] = _to_host(value, of)
            if self._is_shared(name):
                held[self.where.hosted[0]] = held[rank]
            self._arrays[name] = self.where.put(held.__getitem__, self._is_shared(name))
            self._own_weights.clear()

    def _find(self, name: str, rank: int) -> Held:
        of = self.states.get(name) or self.weights.get(name)
        if of is None or name not in self._arrays:
            raise KeyError(f"no weight or state is named {name!r}: there are {_few([*self.weights, *self.states])}")
        if rank not in self.where.hosted:
            raise KeyError(f"rank {rank} is not among the ranks of this process, {list(self.where.hosted)}")
        return of

    def _is_shared(self, name: str) -> bool:
        return name not in self.states and self.weights[name].shared

    # -- running -------------------------------------------------------------------------------------

    def start(self, workers: int | None = None) -> None:
        """Compile what is not compiled, and let states begin. workers: compilations at the same time. Raises RuntimeError without weights."""
        missing = [n for n in self.weights if n not in self._arrays]
        if missing:
            initial = self._initial()
            if all(_initially(initial.get(n), rank) is not None for n in missing for rank in self.where.hosted):
                self.set_weights([{} for _ in self.where.hosted])
            else:
                raise RuntimeError(f"the model has no weights yet ({_few(missing)}): call set_weights(...) with a dict for each rank first")
        self.compile(workers)
        self.reset_states()
        self.started = True

    def begin(self, of_ranks: Sequence[RankWeights]) -> None:
        """`set_weights` for the ranks of this process, and `start`, if that has not happened yet. One thread does it, others wait: states begin once.

        of_ranks: the weights of all ranks.
        """
        with self._lock:
            if not self.started:
                with self.compiling():
                    self.set_weights([of_ranks[rank] for rank in self.where.hosted])
                self.start()

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """A block beside which all programs are compiled, such as one that sets weights; at its end they are."""
        _ = self.where
        with ThreadPoolExecutor(1) as pool:
            compiled = pool.submit(self.compile)
            yield
            compiled.result()

    def compile(self, workers: int | None = None) -> None:
        """Compile all programs for the devices of this process."""
        todo = [tag for tag in self.programs if tag not in self._compiled]
        with ThreadPoolExecutor(max(1, min(workers or 1, len(todo) or 1))) as pool:
            self._compiled.update(zip(todo, pool.map(self._compile, todo), strict=True))

    def _compile(self, tag: str) -> Callable[..., Any]:
        program = self.programs[tag]
        with _compat.enable_x64():
            serialized = program.forms.get(self.where.form)
            if serialized is None:
                raise RuntimeError(devices.lacks(tag, program.forms, self.where.form))
            shapes = exporting.arguments(program.facts, self.where.mesh)
            return executable_cache.exported(
                serialized,
                shapes,
                f"states {_STATES} donated, branches chosen, {xla_options.without_graph()}",
                lambda: _lowered(tag, serialized, shapes),
            )

    def run(self, tag: str, inputs: Sequence[Any], ranked: bool = False) -> list[Any]:
        """Run a program on CPU tensors: the same for all ranks, or (ranked) a list with one for each rank. Returns the arrays of its results (`results`).

        Raises IndexError for an index out of range, if it was traced with `NXD_JAX_CHECK_INDICES=1`.
        """
        of = self.programs[tag].facts
        given = [self._input(x, t, ranked) for x, t in zip(inputs, of.inputs, strict=True)]
        names = self._state_names[tag]
        with self._lock, _compat.enable_x64():
            arrays = self._arrays
            weights = self._own_weights.get(tag)
            if weights is None:
                weights = self._own_weights[tag] = [self._as_taken(t) for t in of.weights]
            draws = [self._draws(of.draws)] if of.draws else []
            found, new = self._compiled[tag](draws, weights, [arrays[name] for name in names], given)
            arrays.update(zip(names, new, strict=True))
            if names and self._readers:
                for reader in self._readers:
                    self._own_weights.pop(reader, None)
        if of.checks:
            self._check_indices(of, found[len(of.results) :])
        return list(found[: len(of.results)])

    def _check_indices(self, of: Facts, arrays: Sequence[Any]) -> None:
        """IndexError for indices that are out of range on a rank of this process. Results are lost; states have their new values already, with
        what was clamped or dropped."""
        hosted, found = self.where.hosted, []
        for check, array in zip(of.checks, arrays, strict=True):
            value = index_checks.Value(0, check.shape, check.dtype)
            allowed = index_checks.Range(value, check.low, check.end, check.of, check.ignored, check.selected)
            own = index_checks.Check(None, check.op, check.source, allowed)
            found.append((own, [self.where.read(array, rank) for rank in hosted]))
        index_checks.refuse(found, hosted)

    def _draws(self, rows: int) -> np.ndarray:
        """Seeds from torch's generator, so that `torch.manual_seed` repeats a run. Processes that share the ranks take the first one's."""
        own = torch.randint(0, 2**32, (rows, 4), dtype=torch.int64).numpy().astype(np.uint32)
        if len(self.where.hosted) == self.ranks.size:
            return own
        return np.frombuffer(processes.of_first("seeds of a traced model", own.tobytes()), np.uint32).reshape(rows, 4)

    def _as_taken(self, of: Held) -> Any:
        """A weight as a program takes it. A state that it only reads comes with the ranks as dim 0, whether it takes it so or not."""
        array = self._arrays[of.name]
        if of.name in self.states and of.shared:
            return self.where.put(lambda rank: self.where.read(array, rank), True)
        return array

    def _input(self, x: Any, of: Tensor, ranked: bool) -> Any:
        if not ranked:
            host = _to_host(x, of)
            return host if self.ranks.size == 1 else self._spread(lambda rank: host)
        held = {r: y.cpu() if isinstance(y, OnDevice) else y for r, y in zip(self.where.hosted, x, strict=True)}
        return self._spread(lambda rank: _to_host(held[rank], of))

    def _spread(self, of_rank: Callable[[int], np.ndarray]) -> Any:
        if self.ranks.size == 1:
            return of_rank(self.ranks.order[0])
        if self.where.mesh is None or len(self.where.hosted) == self.ranks.size:
            return np.stack([of_rank(r) for r in self.ranks.order])
        return self.where.put(of_rank, False)

    def results(self, tag: str, arrays: Iterable[Any], rank: int) -> list[torch.Tensor]:
        """A rank's results as CPU tensors."""
        return [_to_torch(self.where.read(array, rank)) for array in arrays]

    def on_device(self, tag: str, arrays: Iterable[Any]) -> list[list[OnDevice]]:
        """All results as [result][rank], left where they are."""
        results = self.programs[tag].facts.results
        return [[OnDevice(array, r, t, self.where) for r in self.where.hosted] for array, t in zip(arrays, results, strict=True)]


_STATES = 2
"""Which of a program's arguments are the states: they are donated."""


def _lowered(tag: str, serialized: bytes, shapes: Sequence[Any]) -> Any:
    """A serialized program for the devices that its arguments name. Raises RuntimeError if it was exported for other kinds of devices."""
    exported = export.deserialize(bytearray(serialized))
    here = exporting.platform()
    if here not in exported.platforms:
        raise RuntimeError(f"program {tag!r} was exported for {', '.join(exported.platforms)}, and this machine is {here}: trace it here")
    lowered = jax.jit(exported.call, donate_argnums=(_STATES,), compiler_options=xla_options.without_graph()).lower(*shapes)
    branches.choose(lowered.compiler_ir(dialect="stablehlo"))
    return lowered


def _check_shared(tag: str, program: Program, programs: Iterable[tuple[str, Program]]) -> None:
    """A parameter that all ranks share in one program cannot be each rank's own state in another."""
    for other, p in programs if program.facts.ranks.size > 1 else ():
        for reads, updates in ((program, p), (p, program)):
            both = {t.name for t in reads.facts.weights if t.shared} & {t.name for t in updates.facts.states}
            if both:
                raise ValueError(
                    f"{_few(sorted(both))} is a parameter that one of the programs {tag!r} and {other!r} updates, and the other takes for a weight that all "
                    "ranks share: register it as a buffer"
                )


def _holds(program: Program, name: str) -> bool:
    return any(t.name == name for t in program.facts.weights)


def _begin_alike(name: str, one: Program, other: Program) -> bool:
    return name in other.initial and _initially_same(one.initial[name], other.initial[name])


def _initially(begins: Initial | None, rank: int) -> torch.Tensor | None:
    """A rank's value; None if it is not known."""
    return begins.get(rank) if isinstance(begins, Mapping) else begins


def _initially_same(a: Initial, b: Initial) -> bool:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(t, b[rank]) for rank, t in a.items())
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and same(a, b)


def _beginning(name: str, program: Program) -> Initial | None:
    """What a state begins with as a program has it; None if it does not say."""
    of = next((t for t in program.facts.states if t.name == name), None)
    return program.initial.get(name, None if of is None else torch.zeros(of.shape, dtype=of.dtype))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two CPU tensors are the same, bit by bit."""
    return a.shape == b.shape and a.dtype == b.dtype and np.array_equal(_bits(transfer.to_numpy(a)), _bits(transfer.to_numpy(b)))


def _to_host(t: torch.Tensor, of: Tensor) -> np.ndarray:
    if t.shape != of.shape:
        raise ValueError(f"{of.name} was traced with shape {list(of.shape)}, got {list(t.shape)}")
    if t.dtype != of.dtype and not torch.can_cast(t.dtype, of.dtype):
        raise ValueError(f"{of.name} was traced as {of.dtype}, and {t.dtype} is of another kind: convert it, or trace the model for it")
    if t.device.type != "cpu":
        t = t.detach().cpu()
    return transfer.to_numpy(t if t.dtype == of.dtype else _converted(t, of))


def _converted(t: torch.Tensor, of: Tensor) -> torch.Tensor:
    """A CPU tensor in the dtype that was traced. Raises ValueError for integers that do not fit into it."""
    found = t.to(of.dtype)
    if not of.dtype.is_floating_point and not of.dtype.is_complex and not torch.equal(found.to(t.dtype), t):
        low, high = torch.iinfo(of.dtype).min, torch.iinfo(of.dtype).max
        raise ValueError(
            f"{of.name} was traced as {of.dtype}, which holds {low} to {high}, and was given {t.min()} to {t.max()}: trace the model with {t.dtype}"
        )
    return found


def _to_torch(host: np.ndarray) -> torch.Tensor:
    return transfer.from_numpy(np.array(host))


def _bits(host: np.ndarray) -> np.ndarray:
    return host.view(np.uint8) if host.ndim else host


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
