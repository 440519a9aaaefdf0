"""A checkpoint saved in one layout of ranks loads in any other, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd
import pytest
import torch

from nxd_jax.checkpoint import reading
from tests.nxd_jax.checkpoint import job

# (world, tp, options of job.build)
SAVED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "tp2-dp2-zero1": (4, 2, {"zero1": True}),
    "tp4-kv2": (4, 4, {"kv": 2}),
    "dp3-zero1-unfused": (3, 1, {"zero1": True, "fuse": False}),
}
LOADED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "alone": (1, 1, {}),
    "tp2-dp2-zero1": (4, 2, {"zero1": True}),
    "tp4-kv2-unfused": (4, 4, {"kv": 2, "fuse": False}),
    "dp4-zero1": (4, 1, {"zero1": True}),
    "tp2-cp2-zero1": (4, 2, {"zero1": True, "cp": 2}),
}


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"root": tmp_path_factory.mktemp("layouts")}


def _saved(nxd_world: Any, states: dict[str, Any], name: str) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A checkpoint written after two steps, and what it must hold."""
    if name not in states:
        size, tp, options = SAVED[name]
        nxd_world(size, tp=tp)
        made = job.build(tp, **options)
        job.train(made, 0, 2)
        nxd.save_checkpoint(states["root"] / name, "two", *made, user_content={"steps": 2})
        states[name] = states["root"] / name, job.weights(made[0]), job.moments(*made[:2])
    return states[name]


@pytest.mark.thorough(keep=3)
@pytest.mark.filterwarnings("ignore:the query heads of")
@pytest.mark.parametrize("loaded", LOADED)
@pytest.mark.parametrize("saved", SAVED)
def test_model_and_optimizer(nxd_world: Any, states: dict[str, Any], saved: str, loaded: str) -> None:
    path, weights, moments = _saved(nxd_world, states, saved)
    size, tp, options = LOADED[loaded]
    nxd_world(size, tp=tp, cp=options.get("cp", 1))
    made = job.build(tp, **options, seed=1)
    assert nxd.load_checkpoint(path, None, *made) == {"steps": 2}
    assert job.differing(job.weights(made[0]), weights) == []
    assert job.differing(job.moments(*made[:2]), moments) == []
    assert torch.equal(made[0].table.cpu(), torch.arange(5.0))
    assert made[2].last_epoch == 2


@pytest.fixture
def nxd_world(nxd: Any) -> Any:
    return nxd


FACTORED: dict[str, tuple[int, int, bool]] = {
    "alone": (1, 1, False),
    "tp2": (2, 2, False),
    "tp2-dp2-zero1": (4, 2, True),
    "dp12-zero1": (12, 1, True),
}
"""(world, tp, ZeRO-1). With 12 ranks each has one row of the head, whose means have the shape of that row."""


def _factored(nxd_world: Any, name: str, seed: int = 0, fuse: bool = True) -> Any:
    size, tp, zero1 = FACTORED[name]
    nxd_world(size, tp=tp)
    return job.build(tp, zero1, fuse=fuse, seed=seed, optimizer_class=torch.optim.Adafactor)


def _arrays(path: Path) -> dict[str, torch.Tensor]:
    folder = reading.Folder(path / "optim")
    return {name: folder.full(name) for name in sorted(folder.names()) if not name.startswith("master/")}


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("loaded", FACTORED)
@pytest.mark.parametrize("saved", FACTORED)
def test_state_that_is_means_of_rows_and_columns(nxd_world: Any, tmp_path: Path, saved: str, loaded: str) -> None:
    """Adafactor's: ranks hold means of whole matrices, each its part of those along a dim that they do not share out."""
    made = _factored(nxd_world, saved)
    made[0].eval()  # no dropout: every layout computes the same
    job.train(made, 0, 2)
    nxd.save_checkpoint(tmp_path, "two", *made)
    job.train(made, 2, 3)
    expected = job.weights(made[0])

    made = _factored(nxd_world, loaded, seed=1)
    made[0].eval()
    nxd.load_checkpoint(tmp_path, "two", *made)
    nxd.save_checkpoint(tmp_path, "again", *made)
    first, second = _arrays(tmp_path / "two"), _arrays(tmp_path / "again")
    assert first["row_var/head.weight"].shape == (7, 1) and first["col_var/head.weight"].shape == (1, 16)
    assert first["row_var/down.weight"].shape == (16, 1) and first["col_var/down.weight"].shape == (1, 32)
    assert job.differing(first, second) == []
    job.train(made, 2, 3)
    for name, weight in job.weights(made[0]).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_means_of_fused_and_of_separate_projections(nxd_world: Any, tmp_path: Path, fused: bool) -> None:
    made = _factored(nxd_world, "alone", fuse=fused)
    job.train(made, 0, 1)
    nxd.save_checkpoint(tmp_path, "one", *made)
    made = _factored(nxd_world, "alone", fuse=not fused)
    with pytest.raises(ValueError, match=r"it has col_var of qkv.weight_q.*: make the layer with fuse_qkv as it was"):
        nxd.load_checkpoint(tmp_path, "one", *made)


@pytest.mark.filterwarnings("ignore:the query heads of")
@pytest.mark.slow
def test_real_processes(nxd_world: Any, states: dict[str, Any]) -> None:
    """Two processes load what one wrote, and the other way round."""
    path, weights, moments = _saved(nxd_world, states, "tp2-dp2-zero1")
    script = Path(__file__).with_name("two_processes.py")
    out = states["root"] / "processes"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
    env.pop("JAX_NUM_CPU_DEVICES", None)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", str(script), str(path), str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    nxd_world(4, tp=4)
    made = job.build(4, kv=2, seed=1)
    nxd.load_checkpoint(out, None, *made)
    assert job.differing(job.weights(made[0]), weights) == []
    assert job.differing(job.moments(*made[:2]), moments) == []
