"""What pytorch/xla's own tests of annotations ask for by private names, counters and variables."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
from torch import nn
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel as FSDPv2

from tests.torch_bridge.spmd.test_annotations import placed, spec_of

_XLAC: Any = torch_xla._XLAC


def test_counters(mesh: xs.Mesh) -> None:
    met.clear_all()
    t, u = torch.ones(8, 8).to("xla"), torch.ones(8, 8).to("xla")
    for _ in range(2):
        xs.mark_sharding(t, mesh, ("data", None))
    assert met.counter_value("CreateOpSharding") == 1
    xs.mark_sharding(u, mesh, (None, "model"))
    assert met.counter_value("CreateOpSharding") == 2 and met.counter_value("VirtualDeviceUsage") == 3
    t += 1
    xm.mark_step()
    assert met.counter_value("ExecuteReplicated") == met.metric_data("ExecuteReplicatedTime")[0] == met.metric_data("ExecuteTime")[0] == 1
    assert met.metric_data("InputOutputAliasCount")[:2] == (1, 1.0) and met.counter_value("ReplicateShardedData") is None
    t.cpu(), torch.ones(3).to("xla").cpu()
    assert met.counter_value("ReplicateShardedData") == 1


def test_annotations_as_an_op(mesh: xs.Mesh) -> None:
    """Also in a compiled function; what is not on xla passes."""
    mark = torch.ops.xla.dynamo_mark_sharding

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x + 1
        mark(y, list(range(8)), [4, 1, 2], "('data', 'none', 'model')", "('data', 'model')")
        return y * 2, y

    host = torch.randn(8, 4)
    for call in (run, torch.compile(run, backend="openxla")):
        doubled, y = call(host.to("xla"))
        assert placed(y) == (2, 2) and torch.equal(doubled.cpu(), (host + 1) * 2)
    assert mark(host, [0], [1], "('a',)", "(None, None)") is host
    leaf = torch.ones(8, 4, device="xla", requires_grad=True)
    (mark(leaf, list(range(8)), [8], "('a',)", "'a', None") * 3).sum().backward()
    assert placed(leaf) == (1, 4) and torch.equal(leaf.grad.cpu(), torch.full((8, 4), 3.0))
    with pytest.raises(ValueError, match="axis_names is a tuple as text"):
        mark(leaf, list(range(8)), [8], "(data)", "(None, None)")


def test_inside_of_torch_xla(mesh: xs.Mesh) -> None:
    assert _XLAC._xla_get_auto_sharding() is False
    with pytest.raises(NotImplementedError, match=r"graphs are not built by hand here. xm.get_stablehlo\(tensors\)"):
        _XLAC.lowering.LoweringContext("name")
    xs.set_global_mesh(xs.Mesh(range(8), (2, 4), ("data", "fsdp")))
    with pytest.raises(ValueError, match="The provided ddp axis is not in the mesh."):
        FSDPv2(nn.Linear(8, 8), extra_data_axis="ddp")


def test_shardings_of_inputs_are_in_the_hlo(mesh: xs.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    t, u = torch.randn(8, 8).to("xla"), torch.randn(8, 8).to("xla")
    xs.mark_sharding(t, mesh, (None, "model"))
    assert "sharding={devices=[1,2,4]<=[4,2]T(1,0) last_tile_dim_replicate}" in _XLAC._get_xla_tensors_hlo([t])
    assert _XLAC._get_graph_hash([t + 1]) != _XLAC._get_graph_hash([u + 1])
    monkeypatch.setenv("XLA_DUMP_POST_OPTIMIZATIONS", "1")
    row, column = torch.randn(1, 128).to("xla"), torch.randn(128, 1).to("xla")
    xs.mark_sharding(row, mesh, (None, ("data", "model")))
    product = row @ column
    assert "all-reduce" in _XLAC._get_xla_tensors_hlo([product]) and torch.allclose(product.cpu(), row.cpu() @ column.cpu(), atol=1e-4)


def test_hlo_of_a_region(mesh: xs.Mesh) -> None:
    """Of blocks, which are rows of one array, and of what comes out of the region."""
    t = torch.randn(8, 8).to("xla")
    block = xs.enable_manual_sharding(t, ("data", "model"), mesh=mesh).global_tensor + 1
    assert "->f32[8,2,4]{2,1,0}" in _XLAC._get_xla_tensors_hlo([block])
    whole = xs.disable_manual_sharding(block, ("data", "model"), (8, 8), mesh=mesh).global_tensor
    assert "->f32[8,8]{1,0}" in _XLAC._get_xla_tensors_hlo([whole]) and torch.equal(whole.cpu(), t.cpu() + 1)


def test_what_a_tensor_is(mesh: xs.Mesh) -> None:
    t = torch.randn(8, 8).to("xla") + 1
    xs.mark_sharding(t, mesh, ("data", None))
    assert "IR: recorded, not run yet" in _XLAC._get_xla_tensor_debug_info(t)
    torch_xla.sync()
    told = _XLAC._get_xla_tensor_debug_info(t)
    for line in ("Device: SPMD:0", f"ShardingSpec: {spec_of(t)}", "IR: xla::device_data", "XLAShardedData", "NumShards: 8"):
        assert line in told


def test_switched_on_by_the_environment(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a call of `xr.use_spmd`."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, torch_xla.core.xla_model as xm, torch_xla.distributed.spmd as xs, torch_xla.runtime as xr\n"
        "assert xm.xla_device().type == 'xla' and xr.is_spmd()\n"
        "t = xs.mark_sharding(torch.ones(8).to('xla'), xs.get_1d_mesh('x'), ('x',))\n"
        "print(xr.global_runtime_device_count(), t.sharding_spec)\n"
    )
    monkeypatch.setenv("XLA_USE_SPMD", "1")
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "4")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout == "4 {devices=[4]0,1,2,3}\n"
