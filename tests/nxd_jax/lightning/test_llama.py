"""The Llama example: TP 8 x DP 4, sequence parallel, ZeRO-1, two batches in a step; killed and resumed; and the same without Lightning."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
SIZES = ["--tp", "8", "--hidden", "64", "--seq", "32", "--layers", "1", "--steps", "7", "--checkpoint-every", "2", "--keep", "2"]
CHILD = """
import os, signal, sys
import lightning_llama
from pytorch_lightning import Callback

class Kill(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

lightning_llama.train(lightning_llama.parse_args(sys.argv[1:]), (Kill(),))
"""


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The example and its benchmark as modules, in a world of 32 ranks."""
    import torch.distributed as dist
    import torch_xla.distributed.xla_backend  # noqa: F401

    from nxd_jax.parallel_layers import parallel_state
    from torch_bridge.mesh import world

    folders = [str(ROOT / "examples"), str(ROOT / "benchmarks")]
    sys.path[:0] = folders
    parallel_state.destroy_model_parallel()
    world.configure(world.World(32))
    try:
        import lightning_step

        yield lightning_step
    finally:
        for folder in folders:
            sys.path.remove(folder)
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
        world.configure(None)


def arguments(folder: Path, *more: str) -> argparse.Namespace:
    import lightning_llama

    return lightning_llama.parse_args([*SIZES, "--out", str(folder), *more])


def scalars(folder: Path) -> dict[int, float]:
    """The losses that TensorBoard shows, by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[int, float] = {}
    for version in sorted((folder / "logs").rglob("version_*")):
        events = EventAccumulator(str(version))
        events.Reload()
        if "loss" in events.Tags()["scalars"]:
            found |= {e.step: e.value for e in events.Scalars("loss")}
    return found


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_killed_and_resumed_or_without_lightning_the_losses_are_the_same(example: Any, tmp_path: Path) -> None:
    whole, _ = example.with_lightning(arguments(tmp_path / "whole"))
    assert len(whole) == 7 and whole[-1] < whole[0]
    kept = sorted(p.name for p in (tmp_path / "whole" / "checkpoints").iterdir())
    assert kept == ["epoch=0-step=4.ckpt", "epoch=0-step=6.ckpt"]
    logged = scalars(tmp_path / "whole")
    assert list(logged) == list(range(1, 8))
    assert list(logged.values()) == pytest.approx(whole)

    killed = tmp_path / "killed"
    environment = os.environ | {"NXD_JAX_WORLD_SIZE": "32", "PYTHONPATH": os.pathsep.join([*sys.path[:2], *sys.path])}
    command = [sys.executable, "-W", "ignore", "-c", CHILD, *SIZES, "--out", str(killed)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    resumed, _ = example.with_lightning(arguments(killed, "--resume"))
    assert resumed == whole[4:]

    loop, _ = example.with_loop(arguments(tmp_path / "loop"))
    assert loop == whole


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_pipeline(example: Any, tmp_path: Path) -> None:
    """The losses of a model that is not cut; resumed, bit for bit."""
    common = ["--layers", "4", "--steps", "5"]
    whole, _ = example.with_lightning(arguments(tmp_path / "whole", *common))
    cut = ["--tp", "4", "--pp", "2", "--schedule", "zbv", *common]
    losses, _ = example.with_lightning(arguments(tmp_path / "cut", *cut))
    assert losses == pytest.approx(whole, rel=1e-4)
    shutil.rmtree(tmp_path / "cut/checkpoints/epoch=0-step=4.ckpt")
    resumed, _ = example.with_lightning(arguments(tmp_path / "cut", *cut, "--resume"))
    assert resumed == losses[2:]
