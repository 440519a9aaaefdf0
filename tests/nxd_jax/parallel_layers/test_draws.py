"""Random numbers of one process and of four: the same, rank by rank."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import quick
from tests.nxd_jax.parallel_layers import draws_job

ROOT = Path(__file__).parents[3]
HERE = [sys.executable, "-m", "nxd_jax.run", "--nproc_per_node=4"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]


def run(launcher: list[str], folder: Path) -> list[dict[str, torch.Tensor]]:
    folder.mkdir()
    environment = {**os.environ, **quick.environment(), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'aliases'}"}
    done = subprocess.run([*launcher, draws_job.__file__, str(folder)], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


@pytest.mark.slow
def test_one_process_and_four_draw_the_same(tmp_path: Path) -> None:
    alone, four = run(HERE, tmp_path / "one"), run(TORCHRUN, tmp_path / "four")
    for name in alone[0]:
        for rank in range(4):
            torch.testing.assert_close(
                alone[rank][name], four[rank][name], rtol=1e-5, atol=1e-6, msg=lambda m, at=(name, rank): f"{at}: {m}"
            )
    first, *others = alone
    assert not torch.equal(first["loss"], others[1]["loss"])  # other rows along dp, the same masks
    assert not torch.equal(first["tracker"], others[0]["tracker"])  # the one state that differs along tp
    for name in ("xla qkv.weight", "cpu qkv.weight", "rand_like", "rand"):
        assert all(torch.equal(first[name], other[name]) for other in others), name
    for name in ("own first qkv.weight", "own qkv.weight", "own cpu", "own dropout", "own rand"):
        assert not any(torch.equal(a[name], b[name]) for a, b in itertools.combinations(alone, 2)), name
