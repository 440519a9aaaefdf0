"""Experts in several processes: the numbers of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.modules.moe import torchrun_job as job
from tests.nxd_jax.pipeline.test_torchrun import launch


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(("numbers", "processes"), [((0, 3), 2), ((1, 2, 4), 4), ((0, 1, 3), 4), ((1,), 2)], ids=str)
def test_several_processes(nxd: Nxd, tmp_path: Path, numbers: tuple[int, ...], processes: int) -> None:
    """Losses, norms and every rank's weights; processes of one rank each, and of two under nxd-run."""
    done = launch(processes, tmp_path, *numbers, ranks=4 // processes, script=job.__file__)
    assert not done.returncode, done.stderr
    for number in numbers:
        layout = job.LAYOUTS[number]
        nxd(layout.ranks, tp=layout.tp, pp=layout.pp, ep=layout.ep)
        alone = job.trained(layout)
        for first in range(0, 4, 4 // processes):
            found = torch.load(tmp_path / f"{number}.{first}.pt")
            torch.testing.assert_close(found["numbers"], alone["numbers"], rtol=1e-5, atol=1e-6)
            for name, blocks in found["weights"].items():
                wanted = alone["weights"][name]
                mine = wanted if len(wanted) == len(blocks) else wanted[first : first + len(blocks)]
                for block, other in zip(blocks, mine, strict=True):
                    torch.testing.assert_close(block, other, rtol=1e-5, atol=1e-6, msg=lambda m, n=name, la=layout: f"{la} {n}: {m}")
