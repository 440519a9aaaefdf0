"""Checkpoints of torch_xla's FSDP and of annotated models in an NxD model: joined, converted by `nxd-ckpt`, and loaded for any layout of ranks."""

from __future__ import annotations

import pathlib
from typing import Any

import neuronx_distributed
import pytest
import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from safetensors.torch import save_file
from torch import nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP
from torch_xla.distributed.fsdp import consolidate_sharded_model_checkpoints

from nxd_jax import ckpt
from tests.nxd_jax.conftest import Nxd
from torch_bridge.mesh import spmd, world


class Mlp(nn.Module):
    def __init__(self, up: Any, down: Any):
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(torch.relu(self.up(x)))


def plain() -> Mlp:
    torch.manual_seed(0)
    return Mlp(nn.Linear(8, 16), nn.Linear(16, 8))


def of_ranks(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """FSDP on two ranks."""
    world.configure(world.World(2))
    model = FSDP(plain())
    state = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
    xm.save(state, folder / f"a_rank-{xm.get_ordinal()}.pth", master_only=False)
    world.configure(None)
    return consolidate_sharded_model_checkpoints(str(folder / "a"), save_model=False)[0]


def annotated(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """Divided over eight devices."""
    world.configure(world.World(8))
    xr.use_spmd()
    try:
        model = plain().to("xla")
        xs.mark_sharding(model.up.weight, xs.get_1d_mesh("a"), ("a", None))
        xm.save(model.state_dict(), folder / "a.pt")
    finally:
        spmd.stop()
        world.configure(None)
    found: dict[str, torch.Tensor] = torch.load(folder / "a.pt")
    return found


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("train", [of_ranks, annotated])
def test_an_nxd_model_loads_it(train: Any, tmp_path: pathlib.Path, nxd: Nxd) -> None:
    (tmp_path / "files").mkdir()
    save_file(train(tmp_path), tmp_path / "files" / "model.safetensors")
    assert ckpt.main(["convert", str(tmp_path / "files"), str(tmp_path / "nxd"), "--to", "nxd", "--to-tag", "first"]) == 0
    nxd(4, tp=2)
    model = Mlp(ColumnParallelLinear(8, 16, gather_output=False), RowParallelLinear(16, 8, input_is_parallel=True)).to("xla")
    neuronx_distributed.load_checkpoint(str(tmp_path / "nxd"), "first", model=model)
    x = torch.randn(3, 8)
    torch.testing.assert_close(model(x.to("xla")).cpu(), plain()(x), rtol=1e-5, atol=1e-6)
