"""Looking at annotated programs: memory of a core, and the collectives that XLA put in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn

from nxd_jax import inspect
from nxd_jax.inspect import partitioned
from torch_bridge.mesh import spmd, world


@pytest.fixture
def looked() -> Iterator[inspect.Inspection]:
    """At the third step of an MLP: its hidden layer over "model", its batch over "data"."""
    world.configure(world.World(8))
    xr.use_spmd()
    mesh = xs.Mesh(range(8), (4, 2), ("data", "model"))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)).to("xla")
    xs.mark_sharding(model[0].weight, mesh, ("model", None))
    xs.mark_sharding(model[2].weight, mesh, (None, "model"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        x = torch.randn(32, 16).to("xla")
        xs.mark_sharding(x, mesh, ("data", None))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        torch_xla.sync()
    yield inspect.look()
    spmd.stop()


def test_a_training_step(looked: inspect.Inspection) -> None:
    assert looked.axes == {"data": 4, "model": 2} and looked.runs == 3
    held = {h.name: h for h in looked.memory.held if h.kind == "parameter"}
    assert (held["0.weight"].shape, held["0.weight"].axes) == ((32, 16), ("model",))
    assert (held["2.weight"].shape, held["2.weight"].axes, held["2.bias"].shape) == ((8, 32), ("model",), (8,))
    moments = [h for h in looked.memory.held if h.kind == "optimizer state" and h.shape == (32, 16)]
    assert len(moments) == 2 and all(h.role == "updated" for h in moments)
    rows = {(c.kind, c.axes, c.phase) for c in looked.collectives.rows}
    assert ("all-reduce", ("model",), "forward") in rows, "partial products of the second layer"
    assert ("all-reduce", ("data",), "backward") in rows, "gradients"
    forward = next(c for c in looked.collectives.rows if c.phase == "forward")
    assert (forward.module, forward.ranks, forward.bytes, forward.dtype) == ("2", 2, 8 * 8 * 4, "float32")
    assert looked.groups(("model",)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert "link 0-1" in str(looked.traffic)
    assert looked.topology.core_count >= 8
    with pytest.raises(NotImplementedError, match="the costs of an annotated program are those of whole tensors"):
        looked.estimate()
    assert "on all cores together" in str(looked) and "data 4 x model 2" in str(looked) and "of XLA's" in str(looked)


HLO = """
%body.1 (arg: f32[4]) -> f32[4] {
  %ag = bf16[8,4]{1,0} all-gather(%x), replica_groups=[4,2]<=[8], dimensions={0}, metadata={op_name="jit(f)/layers.*/model.py:7/aten.mm/dot_general"}
}

ENTRY %main.2 (p: f32[4]) -> f32[4] {
  %rs = f32[2]{0} reduce-scatter(%p), replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}
  %cp = f32[4]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
  %all = (s32[], f32[4]{0}) all-reduce(%p, %q), replica_groups=mesh['a'=2,'b'=2,'c'=2], device_ids=([2,2,2]T(2,1,0)) {'a'}
  %odd = f32[4]{0} all-reduce(%p), replica_groups={{0,3},{1,2},{4,7},{5,6}}
  %alone = f32[4]{0} all-reduce(%p), replica_groups={{0},{1}}
  ROOT %loop = f32[4]{0} while(%p), condition=%cond.3, body=%body.1, backend_config={"known_trip_count":{"n":"5"}}
}
"""


def test_forms_of_hlo() -> None:
    """Listed groups, iotas, meshes; pairs; loops of known length; groups that are no lines of the mesh."""
    rows = {(c.kind, c.dtype): c for c in partitioned.table(HLO, {"data": 4, "model": 2}).rows if c.axes or c.kind == "permute"}
    gathered = rows["all-gather", "bfloat16"]
    assert (gathered.axes, gathered.ranks, gathered.count, gathered.bytes) == (("model",), 2, 5, 5 * 8 * 4 * 2 // 2)
    assert (gathered.module, gathered.line, gathered.op) == ("layers.*", "model.py:7", "aten.mm")
    scattered = rows["reduce-scatter", "float32"]
    assert (scattered.axes, scattered.ranks, scattered.bytes) == (("data",), 4, 32)
    assert (rows["permute", "float32"].ranks, rows["permute", "float32"].bytes) == (2, 16)
    assert (rows["all-reduce", "int32"].axes, rows["all-reduce", "int32"].bytes) == (("model",), 20)
    odd = [c for c in partitioned.table(HLO, {"data": 4, "model": 2}).rows if c.kind == "all-reduce" and not c.axes]
    assert [(c.ranks, c.bytes) for c in odd] == [(2, 16)]
    assert "no core communicates" in str(partitioned.table("ENTRY %main (p: f32[]) -> f32[] {\n}\n", {"data": 8}))


def test_costs_of_a_region_are_those_of_all_cores() -> None:
    """As those of the whole product are."""
    world.configure(world.World(8))
    try:
        xr.use_spmd()
        mesh = xs.Mesh(range(8), (8,), ("data",))
        x, weight = torch.randn(32, 16).to("xla"), torch.randn(16, 64).to("xla")
        rows = xs.enable_manual_sharding(x, ("data", None), mesh=mesh)
        whole = xs.enable_manual_sharding(weight, (None, None), mesh=mesh)
        out = xs.disable_manual_sharding(rows @ whole, ("data", None), (32, 64), mesh=mesh)
        torch_xla.sync()
        assert inspect.look().costs.flops == 2 * 32 * 16 * 64 and out.shape == (32, 64)
    finally:
        spmd.stop()
