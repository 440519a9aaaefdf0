"""Which faults there are, and which of them each seed stands for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

STEPS = 12
EVERY = 2
"""Steps between two checkpoints."""
SEEDS = 50
TOGETHER = 4
KINDS = ("nxd", "fsdp")
LAUNCHERS = ("forked", "torchrun")
WHAT = {
    "forked": ("kill", "stop", "slow", "full", "lost", "term", "hold"),
    "torchrun": ("kill", "stop", "launcher", "slow", "full", "term", "lost"),
}
"""lost: the first process, at which the others meet, is killed; launcher: the torchrun of a machine is."""


class Group(NamedTuple):
    """Faults of one kind of job."""

    kind: str
    launcher: str
    faults: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}-{self.launcher}-{'-'.join(fault.partition(':')[0] for fault in self.faults)}"


def fault(seed: int, launcher: str) -> str:
    """What, which rank, at which step, how many seconds after its beginning, and how long it is slow."""
    source = random.Random(seed)
    what = WHAT[launcher][seed // 4 % len(WHAT[launcher])]
    rank = 0 if what == "lost" else source.randrange(4)
    step, delay, seconds = source.randint(2, STEPS - 1), source.uniform(0, 0.3), source.uniform(15, 45)
    return f"{'kill' if what == 'lost' else what}:{rank}:{step}:{delay:.3f}:{seconds:.1f}"


def groups() -> Iterator[Group]:
    """All seeds, those of the same kind of job together."""
    for k in range(4):
        kind, launcher = KINDS[k % 2], LAUNCHERS[k // 2]
        faults = [fault(seed, launcher) for seed in range(k, SEEDS, 4)]
        for first in range(0, len(faults), TOGETHER):
            yield Group(kind, launcher, tuple(faults[first : first + TOGETHER]))
