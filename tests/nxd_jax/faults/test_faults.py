"""Jobs of four processes in which one is killed, stopped, slow or has no room, at any moment: the others say what they know and end or go on, and the next job
goes on from the last complete checkpoint as if nothing had been."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import quick
from tests.nxd_jax.faults import plan, room

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 60.0
"""Seconds in which every process ends after a fault, or goes on."""
NAMED = r"PeerEndedError: .*rank {rank} of 4 \(process {pid} on \S+\)"
WORDS = {
    "kill": NAMED,
    "term": NAMED,
    "stop": r"rank {rank} of 4 \(process {pid} on \S+\).*has said nothing for 10 s: it is stopped",
    "launcher": r"PeerEndedError: .*the torchrun of the first machine, which keeps it, has ended",
    "full": r"No space left on device",
}
"""What the other processes say. Or they have been told to end, or lost one that ended before; and with the first process JAX's runtime ends them."""
OTHERWISE = r"ended by SIGTERM|PeerEndedError: rank|the job's store at \S+ is gone|JAX distributed service detected fatal errors"


def jobs(folder: Path, kind: str, launcher: str, faults: list[str]) -> list[Any]:
    """What `jobs` tells: a job without a fault, and a life for each fault."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", "")])
    env = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "NEURON_RT_NUM_CORES", "JAX_NUM_CPU_DEVICES")}
    env |= quick.environment() | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.nxd_jax.faults.jobs", str(folder / "jobs"), kind, launcher, *faults]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300 + 400 * len(faults))
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def losses(did: list[dict[str, Any]]) -> dict[int, list[str]]:
    return {note["done"]: note["loss"] for note in did if "done" in note}


def check(whole: list[Any], life: list[Any]) -> None:
    """What holds after every fault."""
    (what, rank, *_), processes, _, complete, after = life
    wanted = [losses(did) for *_, did in whole]
    assert all(len(w) == plan.STEPS for w in wanted)
    pid = processes[rank][3][0]["pid"]
    for r, (status, seconds, said, did) in enumerate(processes):
        assert losses(did).items() <= wanted[r].items()
        if what in ("slow", "hold"):
            assert did[-1].get("ended") and status == 0, (r, said)
            continue
        if r == rank and what in ("kill", "stop", "term", "launcher"):
            continue
        assert status is not None and seconds < PATIENCE, (life[0], r, seconds, said[-3000:])
        if what == "launcher" and did[-1].get("ended"):  # the second machine's: its processes need it no more
            continue
        assert re.search(WORDS[what].format(rank=rank, pid=pid), said) or re.search(OTHERWISE, said), (life[0], r, said[-3000:])
    saved = {note["saved"] for *_, did in processes for note in did if "saved" in note}
    in_background = {s for s in saved if s // plan.EVERY % 2}
    assert saved - in_background <= set(complete), (saved, complete)
    for r, (status, _, said, did) in enumerate(after):
        begun = next(note["begun"] for note in did if "begun" in note)
        assert status == 0 and begun == max(complete, default=0), (life[0], begun, complete, said[-3000:])
        assert losses(did) == {step: loss for step, loss in wanted[r].items() if step > begun}, (life[0], r)


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    whole, life = jobs(tmp_path, "fsdp", "forked", ["kill:2:7:0.02"])
    check(whole, life)
    said = [text for k, (_, _, text, _) in enumerate(life[1]) if k != 2]
    assert all("PeerEndedError: rank 2 of 4" in text and "whose last word was" in text for text in said), said


@pytest.mark.thorough
@pytest.mark.parametrize("group", list(plan.groups()), ids=str)
def test_any_fault(tmp_path: Path, group: plan.Group) -> None:
    """Fifty in all."""
    if any(fault.startswith("full") for fault in group.faults) and not room.may_mount():
        pytest.skip("no small file system can be mounted here")
    whole, *lives = jobs(tmp_path, group.kind, group.launcher, list(group.faults))
    assert len(lives) == len(group.faults)
    for life in lives:
        check(whole, life)


def test_there_are_fifty() -> None:
    found = [fault for group in plan.groups() for fault in group.faults]
    assert len(found) == plan.SEEDS == len(set(found))
    assert {fault.partition(":")[0] for fault in found} == {*WORDS, "slow", "hold"}
