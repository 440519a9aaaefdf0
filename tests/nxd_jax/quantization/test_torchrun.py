"""Quantized layers in two processes: the numbers of one."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.pipeline.test_torchrun import launch
from tests.nxd_jax.quantization import torchrun_job as job


def test_two_processes(nxd: Nxd, tmp_path: Path) -> None:
    done = launch(2, tmp_path, script=job.__file__)
    assert not done.returncode, done.stderr
    nxd(2, tp=2)
    expected = job.results()
    for rank in range(2):
        for name, found in torch.load(tmp_path / f"{rank}.pt").items():
            torch.testing.assert_close(found, expected[name], rtol=1e-6, atol=1e-7, msg=lambda m, n=name, r=rank: f"{n}, rank {r}: {m}")
