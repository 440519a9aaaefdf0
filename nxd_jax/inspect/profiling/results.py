"""`Profile`: where the time of some steps went, as tables."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from typing import Any

from nxd_jax.inspect import units
from nxd_jax.inspect.profiling.watching import PHASES
from nxd_jax.inspect.tables import Column, Table, plain, write

COMPILER = "(made by the compiler)"
OUTSIDE = "(outside modules)"
FOREIGN = "(other programs)"


@dataclass(frozen=True)
class HostRow:
    """A phase of a thread of the host (`watching.PHASES`). count: stretches of it; share: of the profile's time. Phases of one thread do not overlap."""

    thread: str
    phase: str
    seconds: float
    share: float
    count: int


@dataclass(frozen=True)
class DeviceRow:
    """A device. busy: seconds in which it ran at least one instruction; seconds: of all of them (more, where it runs several at a time); share: busy in all of
    the profile's time; ops: instructions run."""

    device: str
    busy: float
    seconds: float
    share: float
    ops: int


@dataclass(frozen=True)
class ExecutableRow:
    """A program. name: 8 hex digits as in `nxd-top`, or JAX's name of one that is not from recorded ops; source: 'file.py:line' of its last op; runs: how
    often; seconds: on all devices; share: of all device time; compile_seconds: on the host, if it was compiled meanwhile; ops: instructions run."""

    name: str
    source: str
    runs: int
    seconds: float
    share: float
    compile_seconds: float
    ops: int


@dataclass(frozen=True)
class ModuleRow:
    """A module, its children not counted. module: dotted path, '*' for the number of a layer in a loop. forward, backward, other: device seconds (other: what
    runs outside modules, such as the optimizer, and what the compiler added); seconds: all of them; share: of all device time."""

    module: str
    forward: float
    backward: float
    other: float
    seconds: float
    share: float


@dataclass(frozen=True)
class OpRow:
    """An aten op, or in parentheses what JAX or XLA added. seconds: on all devices; share: of all device time; count: instructions run; collective time
    includes waiting for the other devices."""

    op: str
    seconds: float
    share: float
    count: int


@dataclass(frozen=True)
class InstructionRow:
    """An HLO instruction. name: in the optimised HLO; opcode: HLO's; executable: its program's name; module, line, op, phase: of the recorded op that it came
    from (a fusion: its root's); seconds: on all devices, without the instructions that it runs; count: runs; mean: seconds of one."""

    name: str
    opcode: str
    executable: str
    module: str
    line: str
    op: str
    phase: str
    seconds: float
    share: float
    count: int
    mean: float


@dataclass(frozen=True)
class StepRow:
    """A step, from the end of the one before it to its own (`xm.mark_step`). record, prepare, compile, dispatch, wait: host seconds of the thread that marks;
    busy: device seconds meanwhile, the mean of the devices (of an earlier step's work too: devices lag behind)."""

    number: int
    start: float
    seconds: float
    record: float
    prepare: float
    compile: float
    dispatch: float
    wait: float
    busy: float


@dataclass(frozen=True)
class HostSpan:
    """A stretch of the timeline on a thread of the host, in seconds since the profile began."""

    thread: str
    phase: str
    start: float
    end: float


@dataclass(frozen=True)
class DeviceSpan:
    """A stretch of the timeline on a device, in seconds since the profile began. module, phase: of what ran; of long traces, of most of it."""

    device: str
    module: str
    phase: str
    start: float
    end: float


def _time(header: str, value: str) -> Column:
    return Column(header, value, units.seconds, number=True)


def _share(header: str = "share", value: str = "share") -> Column:
    return Column(header, value, lambda x: f"{x:.1%}", number=True)


def _number(header: str, value: str) -> Column:
    return Column(header, value, number=True)


HOST_COLUMNS = (Column("host thread", "thread"), Column("phase", "phase"), _time("time", "seconds"), _share(), _number("times", "count"))
DEVICE_COLUMNS = (
    Column("device", "device"),
    _time("busy", "busy"),
    _share("of wall", "share"),
    _time("op time", "seconds"),
    _number("ops", "ops"),
)
EXECUTABLE_COLUMNS = (
    Column("program", "name"),
    Column("last line", "source"),
    _number("runs", "runs"),
    _time("device time", "seconds"),
    _share(),
    _time("compiled in", "compile_seconds"),
    _number("ops", "ops"),
)
MODULE_COLUMNS = (
    Column("module", "module"),
    _time("forward", "forward"),
    _time("backward", "backward"),
    _time("other", "other"),
    _time("device time", "seconds"),
    _share(),
)
OP_COLUMNS = (Column("op", "op"), _time("device time", "seconds"), _share(), _number("times", "count"))
INSTRUCTION_COLUMNS = (
    Column("instruction", "name"),
    Column("module", "module"),
    Column("line", "line"),
    Column("op", "op"),
    Column("phase", "phase"),
    _time("device time", "seconds"),
    _share(),
    _number("times", "count"),
    _time("each", "mean"),
)
STEP_COLUMNS = (
    _number("step", "number"),
    _time("time", "seconds"),
    *(_time(phase, phase) for phase in PHASES),
    _time("device busy", "busy"),
)


@dataclass(eq=False)
class Profile:
    """Where the time of some steps went. Empty (`done` is False) until the `with` block of `profile` ends.

    Attributes:
        seconds: from the beginning to the end, when the devices had finished.
        device_seconds: of all instructions on all devices; the tables of modules, ops, instructions and programs each add up to it.
        host: phases by thread. devices: how busy. steps: one by one. executables: by program.
        modules, ops, instructions: the device time by module, aten op and HLO instruction, the most first.
        host_spans, device_spans: the timeline (`nxd_jax.inspect.pictures.timeline_picture` draws it), in seconds since the beginning.
        folder: what XProf and TensorBoard open; trace: the file in it; perfetto: what ui.perfetto.dev opens ('' if it could not be written).
        kept: whether these stay when the process ends: in a folder that was named.
        notes: what a reader should know: what is missing, and why.
    """

    folder: str = ""
    trace: str = ""
    perfetto: str = ""
    kept: bool = True
    done: bool = False
    seconds: float = 0.0
    device_seconds: float = 0.0
    steps: Table[StepRow] = field(default_factory=lambda: Table("Steps", (), STEP_COLUMNS))
    host: Table[HostRow] = field(default_factory=lambda: Table("Host time", (), HOST_COLUMNS))
    devices: Table[DeviceRow] = field(default_factory=lambda: Table("Devices", (), DEVICE_COLUMNS))
    executables: Table[ExecutableRow] = field(default_factory=lambda: Table("Programs", (), EXECUTABLE_COLUMNS))
    modules: Table[ModuleRow] = field(default_factory=lambda: Table("Device time by module", (), MODULE_COLUMNS))
    ops: Table[OpRow] = field(default_factory=lambda: Table("Device time by op", (), OP_COLUMNS))
    instructions: Table[InstructionRow] = field(default_factory=lambda: Table("Slowest instructions", (), INSTRUCTION_COLUMNS))
    notes: tuple[str, ...] = ()
    host_spans: tuple[HostSpan, ...] = field(default=(), repr=False)
    device_spans: tuple[DeviceSpan, ...] = field(default=(), repr=False)

    def to(self, depth: int) -> Table[ModuleRow]:
        """The device time by the first `depth` parts of the module path, children included. ValueError for a depth below 1."""
        if depth < 1:
            raise ValueError(f"depth counts parts of a module path ('layers.0.mlp' has 3) and must be at least 1, got {depth}")
        return module_table(
            (
                (r if r.module in (COMPILER, FOREIGN, OUTSIDE) else dataclasses.replace(r, module=".".join(r.module.split(".")[:depth])))
                for r in self.modules
            ),
            self.device_seconds,
        )

    @property
    def known(self) -> float:
        """The part of the device time that belongs to a recorded op, 0 to 1; the rest is what the compiler added, and other programs."""
        unknown = sum(r.seconds for r in self.modules if r.module in (COMPILER, FOREIGN))
        return 1 - unknown / self.device_seconds if self.device_seconds else 0.0

    def data(self) -> dict[str, Any]:
        """Everything as plain values: tables as lists of dictionaries."""
        found = plain(self)
        assert isinstance(found, dict)
        return found

    def to_json(self) -> str:
        """`data` as JSON text."""
        return json.dumps(self.data(), indent=1)

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write `to_json` to a file; the path. A file that is there is replaced, whole or not at all."""
        return write(path, self.to_json())

    # -- as text ---------------------------------------------------------------------------------------

    def _tables(self) -> list[Table[Any]]:
        return [t for t in (self.steps, self.host, self.devices, self.modules, self.ops, self.instructions, self.executables) if len(t)]

    def headline(self) -> str:
        """One line: how long, on how many devices, how busy they were."""
        if not self.done:
            return "profile: not there yet; it is read when the `with` block ends"
        steps = f"{len(self.steps)} step{'s' * (len(self.steps) != 1)}" if len(self.steps) else "no whole step"
        busy = sum(r.share for r in self.devices) / len(self.devices) if len(self.devices) else 0.0
        where = (
            f"{len(self.devices)} device{'s' * (len(self.devices) != 1)} busy {busy:.0%} of it"
            if len(self.devices)
            else "nothing ran on a device"
        )
        return f"profile: {units.seconds(self.seconds)}, {steps}, {where}"

    def where(self) -> list[str]:
        """How to open the files, a line each."""
        found = []
        if self.perfetto:
            found.append(f"Perfetto: open https://ui.perfetto.dev and drop {self.perfetto} on it")
        if self.trace:
            found.append(f"XProf: pip install xprof tensorboard; tensorboard --logdir {self.folder}")
        if found and not self.kept:
            found.append("These files are removed when this process ends; profile(folder=...) keeps them")
        return found

    def __str__(self) -> str:
        return "\n\n".join(["\n".join([self.headline(), *self.notes]), *map(str, self._tables()), "\n".join(self.where())]).strip()

    def __repr__(self) -> str:
        return str(self)

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(self.headline(), *self.notes, *self._tables(), *self.where())

    def _repr_html_(self) -> str:
        return self.html()

    def html(self) -> str:
        """Headline, notes and tables as one piece of HTML that needs nothing else."""
        head = f'<div style="font:600 14px system-ui,sans-serif">{escape(self.headline())}</div>'
        lines = "".join(
            f'<div style="font:12px system-ui,sans-serif;color:#57606a">{escape(x)}</div>' for x in (*self.notes, *self.where())
        )
        return f"<div>{head}{lines}{''.join(t.html() for t in self._tables())}</div>"


def module_table(rows: Iterable[ModuleRow], whole: float) -> Table[ModuleRow]:
    """Rows of equal module paths added up, the most time first."""
    sums: dict[str, list[float]] = {}
    for r in rows:
        found = sums.setdefault(r.module, [0.0, 0.0, 0.0])
        for i, seconds in enumerate((r.forward, r.backward, r.other)):
            found[i] += seconds
    made = [ModuleRow(m, f, b, o, f + b + o, (f + b + o) / whole if whole else 0.0) for m, (f, b, o) in sums.items()]
    return Table("Device time by module", sorted(made, key=lambda r: -r.seconds), MODULE_COLUMNS, most=15)
