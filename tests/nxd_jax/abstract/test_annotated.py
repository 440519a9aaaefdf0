"""Abstract runs of annotated programs (`xr.use_spmd`): what a real run needs, on more devices than there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

import nxd_jax
from nxd_jax import inspect
from nxd_jax.abstract import AbstractValueError
from nxd_jax.inspect.pictures import slices
from torch_bridge.mesh import spmd, world


@pytest.fixture(autouse=True)
def ranks_afterwards() -> Iterator[None]:
    yield
    spmd.stop()
    xs.meshes.forget_global_mesh()


def train(rows: int = 32, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """Some steps of an MLP over (all devices / 2) x 2: both weights are divided along both axes, the batch along the first."""
    xr.use_spmd()
    count = xr.global_runtime_device_count()
    mesh = xs.Mesh(np.arange(count), (count // 2, 2), ("fsdp", "model"))
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).to("xla")
    xs.mark_sharding(model[0].weight, mesh, ("model", "fsdp"))
    xs.mark_sharding(model[2].weight, mesh, ("fsdp", "model"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        x = torch.randn(rows, 128).to("xla")
        xs.mark_sharding(x, mesh, ("fsdp", None))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
    return model, optimizer, loss


def lying(tensors: Any) -> list[str]:
    return [str(t._storage.held.sharding.spec) for t in tensors]


def found(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What inspection says of a step, and how tensors lie."""
    look = inspect.look()
    return {
        "parameters": lying(model.parameters()),
        "moments": lying(state["exp_avg"] for state in optimizer.state.values()),
        "memory": (look.memory.peak, look.memory.kinds()),
        "collectives": look.collectives.rows,
        "axes": look.axes,
        "block": slices(model[0].weight).blocks[1],  # type: ignore[index]
    }


def test_needs_what_a_real_run_needs() -> None:
    """The same places, bytes and collectives, though nothing ran."""
    world.configure(world.World(8))
    model, optimizer, loss = train()
    assert loss.item() > 0
    real = found(model, optimizer)
    assert real["moments"][0] == "P('model', 'fsdp')" and real["block"].stop == (128, 64) and real["block"].ranks == (2,)
    spmd.stop()
    with nxd_jax.abstract_run(cores=8) as run:
        model, optimizer, loss = train()
        with pytest.raises(AbstractValueError, match=r"asked for at .*test_annotated.py:\d+"):
            loss.item()
        assert found(model, optimizer) == real
        report = run.report()
        program = report.programs[0]
        assert (report.cores, report.axes) == (8, {"fsdp": 4, "model": 2})
        assert report.kinds["parameter"] == 2 * 128 * 256 * 4 // 8 + (128 + 256) * 4 == report.kinds["optimizer state"] // 2
        assert report.kinds["gradient"] == report.kinds["parameter"]
        assert program.peak == real["memory"][0]
        assert sum(c.bytes for c in program.collectives) == sum(c.bytes for c in real["collectives"]) > 0
        assert "8 cores (fsdp 4 x model 2)" in str(report)


def test_more_devices_than_there_are() -> None:
    """128 cores; afterwards everything is as it was."""
    before = world.current()
    with nxd_jax.abstract_run(instance="trn1.32xlarge", nodes=4) as run:
        model, _, _ = train(rows=128, steps=1)
        assert len(spmd.devices()) == 128 and xr.is_spmd()
        assert slices(model[0].weight).blocks[0].stop == (128, 2)  # type: ignore[index]
        report = run.report()
        assert report.cores == 128 and report.fits and report.kinds["parameter"] == 2 * 128 * 256 * 4 // 128 + (128 + 256) * 4
    assert not xr.is_spmd() and spmd.devices() == () and world.current().size == before.size
    assert (torch.ones(2).to("xla") + 1).tolist() == [2.0, 2.0]


def test_fully_sharded() -> None:
    """FSDPv2 with a global mesh that the block alone knows."""
    with nxd_jax.abstract_run(cores=64) as run:
        xr.use_spmd()
        xs.set_global_mesh(xs.Mesh(np.arange(64), (64, 1), ("fsdp", "model")))
        model = SpmdFullyShardedDataParallel(nn.Linear(256, 512, bias=False).to("xla"))
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(64, 256).to("xla")
        xs.mark_sharding(x, xs.get_global_mesh(), ("fsdp", None))
        model(x).square().mean().backward()
        optimizer.step()
        torch_xla.sync()
        report = run.report()
        assert report.kinds["parameter"] == 256 * 512 * 4 // 64 and report.kinds["optimizer state"] == 2 * report.kinds["parameter"]
        assert {c.kind for c in report.programs[0].collectives} & {"all-gather", "reduce-scatter", "all-reduce"}
    assert xs.get_global_mesh() is None


def test_after_use_spmd() -> None:
    """On the devices that annotations have, and no others."""
    world.configure(world.World(8))
    xr.use_spmd()
    with (
        pytest.raises(
            RuntimeError, match=r"abstract_run with 4 cores after xr.use_spmd\(\), which took 8 devices: call xr.use_spmd\(\) in"
        ),
        nxd_jax.abstract_run(cores=4),
    ):
        pass
    with nxd_jax.abstract_run() as run:
        train(steps=1)
        assert run.report().axes == {"fsdp": 4, "model": 2}
    assert xr.is_spmd() and train(steps=1)[2].item() > 0
