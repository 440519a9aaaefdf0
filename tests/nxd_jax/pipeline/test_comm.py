"""`pipeline.comm`: what arrives in other processes, and where a call cannot be meant for one rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import neuronx_distributed.pipeline.comm as comm
import pytest
import torch

from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.pipeline import comm_job as job
from tests.nxd_jax.pipeline.test_torchrun import launch

CALLS: dict[str, Callable[[], Any]] = {
    "send": lambda: comm.send(torch.ones(2, device="xla")),
    "recv_from": lambda: comm.recv_from(job.meta(2)),
    "send_python_object": lambda: comm.send_python_object(1),
    "recv_python_object": lambda: comm.recv_python_object(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_process_with_several_pipeline_ranks(nxd: Nxd, name: str) -> None:
    nxd(4, pp=4)
    with pytest.raises(
        NotImplementedError, match=rf"comm.{name} cannot .* hosts pipeline ranks 0 to 3, .* Let NxDPPModel.run_train move values .*torchrun"
    ):
        CALLS[name]()


@pytest.mark.parametrize("name", CALLS)
def test_no_other_rank(nxd: Nxd, name: str) -> None:
    nxd(2, tp=2)
    with pytest.raises(
        RuntimeError, match=rf"comm.{name} needs another pipeline rank, and there is one: call initialize_model_parallel\(pipeline"
    ):
        CALLS[name]()


def test_before_ranks_are_laid_out() -> None:
    with pytest.raises(RuntimeError, match="model parallel groups are not initialized"):
        comm.send_python_object(1)


def test_methods(nxd: Nxd) -> None:
    nxd(2, pp=2)
    with pytest.raises(ValueError, match=r"comm.send_python_object\(method='nccl'\): the method is 'tcp' or 'gloo'"):
        comm.send_python_object(1, method="nccl")


def check(seen: list[dict[str, Any]], pp: int, ranks: int, share: int) -> None:
    """What each process saw is what its neighbours in the ring sent. ranks: of the world; share: of each process."""
    size = ranks // pp
    for process, found in enumerate(seen):
        got, rank = found["tensors"], process * share // size
        mine = [process * share + k for k in range(share)]
        before, after = ([(r + step * size) % ranks for r in mine] for step in (-1, 1))
        group = [[k * size + r % size for k in range(pp)] for r in mine]

        def made(r: int, factor: int = 1) -> list[float]:
            return [factor * (k + 10.0 * r) for k in range(6)]

        assert got["given"] == [made(r, 2) for r in mine]
        assert got["found"] == [[made(r, k + 1) for r in before] for k in range(job.MESSAGES)]
        assert got["behind"] == [[-sum(made(r)[:3])] for r in after]
        assert got["gradient"] == [made(r, 3) for r in before]
        assert got["total"] == [[sum(parts) for parts in zip(*map(made, members), strict=True)] for members in group]
        assert got["history"] == [True, True, True, True]
        assert got["integers"] == [[1 << 40, -3]] * share
        previous, following = (rank - 1) % pp, (rank + 1) % pp
        assert found["objects"] == [{"from": previous, "shape": [2]}, [following, 1], "second"]


def test_processes_of_one_rank(tmp_path: Path) -> None:
    """A ring of four, then two pipeline ranks of two processes each."""
    done = launch(4, tmp_path, "4x1", "2x2", script=job.__file__, limit=200)
    assert not done.returncode, done.stderr
    first, second = zip(*(json.loads((tmp_path / f"{k}.json").read_text()) for k in range(4)), strict=True)
    check(first, 4, 4, 1)
    check(second, 2, 4, 1)
    assert [found["some"] for found in first] == [56.0, 56.0, None, None]
    assert first[1]["mistakes"] == {
        "shape": "RuntimeError: pipeline rank 0 sent torch.float32 [2, 2], and pipeline rank 1 calls recv_from for torch.bfloat16 [3]: messages arrive in the "
        "order in which they were sent; give recv_from a TensorMeta of this one",
        "cpu": "ValueError: comm.send takes a tensor on xla, got one on cpu: move it with .to('xla'), or use send_python_object",
        "number": "ValueError: comm.send takes a tensor on xla, got a float: move it with .to('xla'), or use send_python_object",
        "large": "AssertionError: an object of 1048585 bytes is too large for method='gloo', which takes less than 1048576: use method='tcp'",
        "method": "ValueError: comm.recv_python_object(method='nccl'): the method is 'tcp' or 'gloo'",
    }


def test_processes_of_two_ranks(tmp_path: Path) -> None:
    """nxd-run under torchrun: a process with a whole pipeline rank, and one with two of them."""
    done = launch(2, tmp_path, "2x2", "4x1", ranks=2, script=job.__file__, limit=200)
    assert not done.returncode, done.stderr
    seen, refused = zip(*(json.loads((tmp_path / f"{k}.json").read_text()) for k in range(2)), strict=True)
    check(seen, 2, 4, 2)
    assert "NotImplementedError" in refused[1]["refused"] and "hosts pipeline ranks 2 to 3" in refused[1]["refused"]
