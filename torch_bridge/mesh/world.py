"""The job's ranks: how many there are, which of them this process hosts, and the mesh axes they are laid out on.

A plain `python script.py` (or the emulator) hosts every rank; under `torchrun` a process hosts its own. Every rank query and every group of
the facades goes through here. In a process that hosts several ranks a rank query returns a `rank_numbers.RankInt`: each rank's own number.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch_bridge import _compat
from torch_bridge.config.variables import VARIABLES
from torch_bridge.mesh import rank_numbers

KNOB = "set NEURON_RT_NUM_CORES=<n>, start the script with `nxd-run --nproc_per_node=<n>`, or start real processes with `torchrun`"


class World:
    """The ranks of a job.

    size: how many. hosted: those that this process computes for, ascending. local_size: ranks on a host. axes: names and sizes of the mesh
    axes, outermost first; their product is `size`. order: the ranks in row-major order over the axes (0, 1, 2, ... unless the machine wants another).
    epoch: another number for every layout. fixed: the size was asked for, so `require` must not change it. process: (number, how many) if all processes run one
    annotated program, whose world has one rank (`mesh.spmd`). within, at: for the ranks of one place alone
    (`narrowed`): the whole world, and where the place is along the axes that it has one index of.
    """

    within: World | None = None
    at: Mapping[str, int] = MappingProxyType({})

    def __init__(self, size: int, hosted: Sequence[int] | None = None, local_size: int | None = None, fixed: bool = True):
        self.size = size
        self.hosted = tuple(range(size)) if hosted is None else tuple(hosted)
        self.local_size = local_size or size
        self.fixed = fixed
        self.process = (0, 1)
        self.axes: dict[str, int] = {"dp": size}
        self.order = tuple(range(size))
        self.epoch = next(_epochs)

    @property
    def processes(self) -> int:
        """Python processes in the job."""
        return self.process[1] * (self.size // len(self.hosted))

    @property
    def first_here(self) -> bool:
        """Whether this process hosts rank 0, and is the first that does."""
        return self.hosted[0] == self.process[0] == 0

    def table(self, of: Callable[[int], Any]) -> Any:
        """`of(rank)` for the ranks of this process: a plain value if they agree, else one that knows them all."""
        return rank_numbers.ranked(tuple(of(r) for r in range(self.size)), self.hosted)


class _Narrowed(threading.local):
    """world: what this thread takes for the world, None for all of it."""

    world: World | None = None


LAUNCHER = "nxd-run"
"""What our launcher sets TORCHELASTIC_RUN_ID to, where it hosts all ranks in one process."""
_epochs = itertools.count()
_NARROWED = _Narrowed()
_world: World | None = None
_changing: list[Callable[[], None]] = []


def before_change(hook: Callable[[], None]) -> None:
    """Call `hook` before the axes change (to run what is recorded under the old ones)."""
    _changing.append(hook)


def current() -> World:
    """The world, decided from the environment at the first question."""
    global _world
    if _NARROWED.world is not None:
        return _NARROWED.world
    if _world is None:
        _world = from_environment()
    return _world


def expected() -> World:
    """The world if it is decided, else what the environment says now: nothing is decided by asking."""
    return _NARROWED.world or _world or from_environment()


def from_environment() -> World:
    """NXD_JAX_WORLD_SIZE (our launcher, which under torchrun also says which of how many processes this is), else torchrun's WORLD_SIZE and RANK, else the
    variables of a plain script (`_plain`)."""
    env = os.environ
    emulated = env.get("NXD_JAX_WORLD_SIZE")
    if emulated:
        count = _number("NXD_JAX_WORLD_SIZE", emulated)
        if (
            env.get("TORCHELASTIC_RUN_ID", LAUNCHER) != LAUNCHER
            and not env.get("NXD_JAX_PROCESSES")
            and int(env.get("WORLD_SIZE") or 1) > 1
        ):
            raise RuntimeError(
                f"NXD_JAX_WORLD_SIZE={count} is set under torchrun: each of its {env['WORLD_SIZE']} processes would host all {count} ranks and train alone. "
                "Unset it (one rank in each process), or start nxd-run under torchrun (several in each)"
            )
        share = count // _number("NXD_JAX_PROCESSES", env.get("NXD_JAX_PROCESSES") or "1")
        first = int(env.get("NXD_JAX_PROCESS") or 0) * share
        return World(count, range(first, first + share), _number("LOCAL_WORLD_SIZE", env.get("LOCAL_WORLD_SIZE") or str(count)))
    if env.get("WORLD_SIZE"):
        count = _number("WORLD_SIZE", env["WORLD_SIZE"])
        if count > 1 and not env.get("RANK"):
            raise RuntimeError(f"WORLD_SIZE={count} is set but RANK is not: {KNOB}")
        rank = int(env.get("RANK") or 0)
        if not 0 <= rank < count:
            raise RuntimeError(f"RANK={rank} must be below WORLD_SIZE={count}")
        return World(count, (rank,), _number("LOCAL_WORLD_SIZE", env.get("LOCAL_WORLD_SIZE") or str(count)))
    return _plain()


def _plain() -> World:
    """NEURON_RT_VISIBLE_CORES, else NEURON_RT_NUM_CORES, else NEURON_PJRT_PROCESSES_NUM_DEVICES, else one rank."""
    visible = _value("NEURON_RT_VISIBLE_CORES")
    if visible:
        return World(len(visible))
    cores = _value("NEURON_RT_NUM_CORES")
    if cores:
        return World(cores)
    devices = _value("NEURON_PJRT_PROCESSES_NUM_DEVICES")
    if not devices:
        return World(1, fixed=False)
    index = _value("NEURON_PJRT_PROCESS_INDEX") or 0
    if index >= len(devices):
        raise ValueError(
            f"NEURON_PJRT_PROCESS_INDEX={index}: NEURON_PJRT_PROCESSES_NUM_DEVICES names {len(devices)} process(es), counted from 0"
        )
    if len(devices) > 1:
        raise RuntimeError(
            f"NEURON_PJRT_PROCESSES_NUM_DEVICES={os.environ['NEURON_PJRT_PROCESSES_NUM_DEVICES']} names {len(devices)} processes, but nothing joins them: "
            f"unset it and start {sum(devices)} processes with `torchrun`, or all ranks in this one with `nxd-run --nproc_per_node={sum(devices)}`"
        )
    return World(devices[0])


def _value(name: str) -> Any:
    """A variable of the table, parsed."""
    return VARIABLES[name].now()


def _number(name: str, text: str) -> int:
    if not text.isdigit() or not int(text):
        raise ValueError(f"{name}={text!r} must be a positive number")
    return int(text)


def may_have_several_ranks() -> bool:
    """Whether there are several ranks, or it is not known yet how many there will be."""
    return _world is None or _world.size > 1


def configure(world: World | None) -> None:
    """Replace the world (for launchers and tests). None: decide anew from the environment."""
    global _world
    for hook in _changing:
        hook()
    _world = world
    if world is not None and len(world.hosted) > 1:
        rank_numbers.prepare()


def expect_ranks() -> None:
    """Prepare for numbers that differ by rank, if the environment says that this process hosts several ranks. Mistakes in it are reported by `current`."""
    with contextlib.suppress(ValueError, RuntimeError):
        if len(from_environment().hosted) > 1:
            rank_numbers.prepare()


def require(count: int) -> None:
    """Make a world of at least `count` ranks if nobody said how large it is (`initialize_model_parallel` in a plain script)."""
    world = current()
    if not world.fixed and world.size < count:
        configure(World(count, fixed=False))


def provision(count: int) -> None:
    """Have virtual CPU devices ready for a world that may grow to `count` ranks after the first tensor is on xla. Does nothing once JAX has started."""
    if current().fixed:
        return
    if "jax" not in sys.modules:
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(count))
        return
    _compat.provision_cpu_devices(count)


def set_axes(axes: dict[str, int], order: Sequence[int] | None = None) -> None:
    """Lay the ranks out on named axes, outermost first, in row-major order: as they are numbered, or in the `order` given."""
    world = current()
    if math.prod(axes.values()) != world.size:
        raise ValueError(f"axes {axes} hold {math.prod(axes.values())} ranks, the world has {world.size}")
    ranks_in_order = tuple(range(world.size)) if order is None else tuple(int(r) for r in order)
    if sorted(ranks_in_order) != list(range(world.size)):
        raise ValueError(f"order must name each of the {world.size} ranks once, got {list(ranks_in_order)}")
    if axes != world.axes or ranks_in_order != world.order:
        for hook in _changing:
            hook()
        world.axes, world.order, world.epoch = dict(axes), ranks_in_order, next(_epochs)  # one line: a mesh is kept by its epoch


def narrowed(axis: str, index: int) -> World:
    """The ranks with this index along an axis, as a world in which the axis has size 1. They keep their numbers."""
    whole, along = current(), coordinates(axis)
    found = World(whole.size // whole.axes[axis], tuple(r for r in whole.hosted if along[r] == index), whole.local_size)
    found.axes = {**whole.axes, axis: 1}
    found.order = tuple(r for r in whole.order if along[r] == index)
    found.within, found.at = whole, MappingProxyType({axis: index})
    return found


@contextlib.contextmanager
def taken_for(narrow: World) -> Iterator[None]:
    """A block in which this thread takes some ranks for the world (programs for them are made there)."""
    before, _NARROWED.world = _NARROWED.world, narrow
    try:
        yield
    finally:
        _NARROWED.world = before


def positions() -> tuple[int, ...]:
    """Each rank's place in row-major order over the axes (0 for ranks that are not there, `narrowed`)."""
    order = current().order
    found = [0] * (max(order) + 1)
    for place, r in enumerate(order):
        found[r] = place
    return tuple(found)


def coordinates(axis: str) -> tuple[int, ...]:
    """Each rank's index along an axis."""
    axes = current().axes
    inner = math.prod(list(axes.values())[list(axes).index(axis) + 1 :])
    return tuple(p // inner % axes[axis] for p in positions())


def axes_of_table(values: Sequence[Any]) -> tuple[str, ...]:
    """The axes along which a value given for each rank differs, outermost first."""
    placed = [values[r] for r in current().order]
    found = []
    inner = 1
    for axis, count in reversed(current().axes.items()):
        if count > 1 and any(v != placed[p - p // inner % count * inner] for p, v in enumerate(placed)):
            found.append(axis)
        inner *= count
    return tuple(reversed(found))


def size() -> int:
    """Ranks in the job."""
    return current().size


def is_local() -> bool:
    """True if this process hosts the whole world, alone."""
    return len(current().hosted) == current().size and current().process[1] == 1


def rank() -> Any:
    """This rank's number among all ranks; each rank's own if the process hosts several."""
    return current().table(lambda r: r)


def ordinal() -> Any:
    """This worker's number for scripts: its rank, or the number of its process if all processes run one annotated program."""
    return current().process[0] if current().process[1] > 1 else rank()


def local_ordinal() -> Any:
    """The same on its host."""
    found = _local_process()
    return local_rank() if found is None else found


def first_of_machine() -> bool:
    """Whether this process is the first one on its machine."""
    found = _local_process()
    return (first() % local_size() if found is None else found) == 0


def _local_process() -> int | None:
    """This process's number on its host, if all processes run one annotated program."""
    index, count = current().process
    return int(os.environ.get("LOCAL_RANK") or index) if count > 1 else None


def first() -> int:
    """The first rank that this process hosts, as a plain number."""
    return current().hosted[0]


def local_size() -> int:
    """Ranks on this host."""
    return current().local_size


def local_rank() -> Any:
    """This rank's number on its host."""
    local = local_size()
    return current().table(lambda r: r % local)


def process_count() -> int:
    """Python processes in the job."""
    return _whole().processes


def process_index() -> int:
    """This process's number in the job."""
    return _whole().process[0] or process_of(_whole().hosted[0])


def process_of(rank: int) -> int:
    """The number of the process that hosts a rank."""
    return rank // len(_whole().hosted)


def layout() -> Mapping[str, int]:
    """The axes of the world itself, also where the thread takes a part of it for the world. Those of a later layout are another object."""
    return _whole().axes


def _whole() -> World:
    """The world itself, where the thread takes a part of it for the world."""
    now = current()
    return now if now.within is None else now.within
