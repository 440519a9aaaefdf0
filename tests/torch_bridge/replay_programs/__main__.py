"""Runs programs on `xla` with replay and prints which differ from eager torch: `python -m tests.torch_bridge.replay_programs [NAME or CATEGORY ...]`.

`generated` and `generated_SEED` are a category and names too; without arguments all but those run.
"""

from __future__ import annotations

import os
import sys
import time

os.environ.setdefault("NXD_JAX_REPLAY", "all")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "1")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import torch_bridge
from tests.torch_bridge.replay_programs import PLAYED, PROGRAMS, Program, difference, outcome
from tests.torch_bridge.replay_programs.generated import SEEDS, generated

torch_bridge.register()


def main(chosen: list[str]) -> int:
    """Print a line for each program that differs or should have been played, and how many there are; returns how many failed."""
    made = [Program(f"generated_{seed}", "generated", generated(seed), ("function",)) for seed in SEEDS] if chosen else []
    programs = [p for p in [*PROGRAMS.values(), *PLAYED.values(), *made] if not chosen or p.name in chosen or p.category in chosen]
    failed = count = played = 0
    start = time.time()
    for program in programs:
        for form in program.forms:
            found = outcome(program.body, "xla", form)
            said = difference(outcome(program.body, "cpu", form).notes, found.notes)
            if not said and program.name in PLAYED and not found.played:
                said = "not played"
            count, failed, played = count + 1, failed + bool(said), played + (found.played > 0)
            if said:
                sys.stdout.write(f"{program.name} [{form}] ({program.category}; played {found.played}): {said}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{count} runs of {len(programs)} programs in {time.time() - start:.0f} s: {failed} failed, {played} played\n")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 100))
