"""A run that is killed at any moment goes on, by the same command, as if it had never been."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]


def moments(count: int) -> list[str]:
    source = random.Random(5)
    return [f"{source.uniform(0.2, 3):.2f}s" if k % 2 else str(source.randrange(5, 160)) for k in range(count)]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("kills", [["1.7s", "60"], moments(20)], ids=["two", "twenty"])
def test_goes_on_bit_for_bit(tmp_path: Path, kills: list[str]) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.nxd_jax.training.utils.kills", str(tmp_path), *kills]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120 + 60 * len(kills))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    *losses, weights = found["whole"]
    assert len(losses) == max(8, 2 * len(kills)) and found["lives"][-1][-1] == weights
    wanted = dict(losses)
    for told in found["lives"]:
        steps = [entry for entry in told if isinstance(entry, list)]
        assert all(wanted[step] == loss for step, loss in steps), (kills, steps, losses)
        assert [step for step, _ in steps] == [steps[0][0] + k for k in range(len(steps))] if steps else True
    begun = [told[0][0] for told in found["lives"] if told and isinstance(told[0], list)]
    assert begun == sorted(begun) and begun[-1] > 0, begun  # no life lost what the one before had saved
