"""The names of `neuronx_distributed.trainer`."""

from __future__ import annotations

import subprocess
import sys

import neuronx_distributed as nxd_api
import pytest

from nxd_jax import trainer


def test_names() -> None:
    from neuronx_distributed.trainer import checkpoint, load_checkpoint, post_partition_hooks, save_checkpoint

    for name in ("CheckpointIOState", "save_checkpoint", "load_checkpoint", "has_checkpoint", "finalize_checkpoint"):
        assert getattr(nxd_api.trainer, name) is getattr(checkpoint, name) is getattr(nxd_api, name)
    assert save_checkpoint is checkpoint.save_checkpoint and load_checkpoint is checkpoint.load_checkpoint
    assert trainer.hooks is post_partition_hooks.hooks and isinstance(trainer.hooks, trainer.PostPartitionHooks)
    assert {"save_checkpoint", "hooks", "neuronx_distributed_config"} <= set(dir(trainer))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = trainer.nothing


def test_importing_it_brings_no_checkpoints() -> None:
    code = "import sys, neuronx_distributed.trainer as t; print('orbax' in sys.modules); t.save_checkpoint; print(t.checkpoint.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "nxd_jax.trainer.checkpoint"], done.stderr
