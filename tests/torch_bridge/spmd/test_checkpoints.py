"""`torch_xla.experimental.distributed_checkpoint`: annotated models to files and back, on meshes of any shape."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.experimental.distributed_checkpoint as xc
from torch import nn
from torch_xla.experimental.distributed_checkpoint import _helpers
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel as FSDPv2

from tests.torch_bridge.spmd.test_annotations import placed
from tests.torch_bridge.spmd.test_modules import losses, net

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}


def trained(shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[FSDPv2, torch.optim.Optimizer]:
    model = FSDPv2(net(), mesh=xs.Mesh(range(8), shape, names))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def test_another_mesh(mesh: xs.Mesh, tmp_path: pathlib.Path) -> None:
    """Weights, moments, counters and what is no tensor; each tensor stays divided as it is."""
    model, optimizer = trained((8,), ("fsdp",))
    x = torch.randn(16, 8).to("xla")
    model(x).square().mean().backward()
    optimizer.step()
    manager = xc.CheckpointManager(tmp_path / "run", save_interval=10)
    assert not manager.save(3, {}) and manager.all_steps() == []
    assert manager.save(10, state_of(model, optimizer, 7))
    expected = losses(model, x, 1)

    other, another = trained((2, 4), ("fsdp", "model"))
    state = state_of(other, xc.prime_optimizer(another), 0)
    manager.restore(10, state)
    restored = {name: t.clone() for name, t in state["model"].items()}
    another.load_state_dict(state["optimizer"])
    assert state["epoch"] == 7 and int(another.state[other[0].weight]["step"]) == 1
    assert placed(other[1].up.weight) == (32, 16)
    other(x).square().mean().backward()
    another.step()
    assert placed(other[1].up.weight) == placed(another.state[other[1].up.weight]["exp_avg"]) == (32, 16)
    again = net().to("xla")
    again.load_state_dict({name.removeprefix("_orig_module."): t.cpu() for name, t in restored.items()})
    assert again(x).square().mean().item() == pytest.approx(expected[0], rel=1e-6)

    plain = net()
    whole = {"model": {f"_orig_module.{name}": t for name, t in plain.state_dict().items()}}
    dcp.load(whole, checkpoint_id=tmp_path / "run" / "10", no_dist=True)
    assert torch.equal(whole["model"]["_orig_module.0.weight"], plain[0].weight) and not torch.equal(plain[0].weight, net()[0].weight)


def test_planners(mesh: xs.Mesh, tmp_path: pathlib.Path) -> None:
    saved = xs.mark_sharding(torch.arange(64.0).view(8, 8).to("xla"), mesh, ("data", None))
    dcp.save({"t": saved, "n": [1, 2]}, checkpoint_id=tmp_path, planner=xc.SPMDSavePlanner(), no_dist=True)
    there = torch.zeros(8, 8).to("xla")
    xs.mark_sharding(there, mesh, (None, "model"))
    state = {"t": there, "n": [0, 0]}
    dcp.load(state, checkpoint_id=tmp_path, planner=xc.SPMDLoadPlanner(), no_dist=True)
    assert torch.equal(there.cpu(), torch.arange(64.0).view(8, 8)) and placed(there) == (8, 4) and state["n"] == [1, 2]


def test_the_last_ones_are_kept(mesh: xs.Mesh, tmp_path: pathlib.Path) -> None:
    """In the background: values are those of the call."""
    t = torch.zeros(8).to("xla")
    manager = xc.CheckpointManager(tmp_path, save_interval=2, max_to_keep=2)
    for step in range(7):
        t += 1
        assert manager.save_async(step, {"t": t}) is (step % 2 == 0)
    manager.join()
    assert manager.all_steps() == [4, 6] and sorted(p.name for p in tmp_path.iterdir()) == ["4", "6"]
    state = {"t": torch.zeros(8)}
    manager.restore(4, state)
    assert torch.equal(state["t"], torch.full((8,), 5.0))
    assert manager.save(6, {"t": t}, force=True) and manager.all_steps() == [4, 6]


def test_the_last_ones_are_those_written_last(mesh: xs.Mesh, tmp_path: pathlib.Path) -> None:
    """A run that goes on from an earlier step keeps what it writes, not what lies ahead of it; also in a new process, and where a file system has no clock."""
    state = {"t": torch.zeros(8).to("xla")}
    manager = xc.CheckpointManager(tmp_path, save_interval=10, max_to_keep=2, num_of_threads=2, chkpt_on_preemption=False)
    for step, kept in ((10, [10]), (20, [10, 20]), (30, [20, 30]), (10, [10, 30])):
        assert manager.save(step, state) and manager.all_steps() == kept
        for path in tmp_path.glob("*/.metadata"):
            os.utime(path, ns=(path.stat().st_mtime_ns + 10**12,) * 2)
    again = xc.CheckpointManager(tmp_path, save_interval=10, max_to_keep=2, chkpt_on_preemption=False)
    assert again.save(20, state) and again.all_steps() == [10, 20]


def test_shards_on_the_cpu(mesh: xs.Mesh, tmp_path: pathlib.Path) -> None:
    """`_sharded_cpu_state_dict` is what the planner takes, and what it says is divided."""
    layer = nn.Linear(8, 16).to("xla")
    xs.mark_sharding(layer.weight, mesh, ("data", "model"))
    xs.mark_sharding(layer.bias, mesh, (None,))
    state = {"layer": layer.state_dict(), "step": 3}
    kept = _helpers._sharded_cpu_state_dict(state)
    assert (
        isinstance(kept["layer"]["weight"], _helpers._CpuShards) and kept["layer"]["weight"].global_shape == (16, 8) and kept["step"] == 3
    )
    assert kept["layer"]["bias"].device.type == "cpu"
    for given in (state, kept):
        planner = xc.SPMDSavePlanner()
        planner.set_up_planner(given, True)
        assert list(planner.sharded_state_dict) == ["layer.weight"] and list(planner.unsharded_state_dict) == ["layer.bias", "step"]
    assert _helpers._is_sharded_tensor(xs.wrap_if_sharded(layer.weight)) and not _helpers._is_sharded_tensor(xs.wrap_if_sharded(layer.bias))
    with torch.no_grad():
        expected = layer.weight.cpu()
        layer.weight.zero_()
    dcp.save(kept, checkpoint_id=tmp_path, planner=xc.SPMDSavePlanner(), no_dist=True)
    planner = xc.SPMDLoadPlanner()
    dcp.load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert (
        list(planner.sharded_state_dict) == ["layer.weight"]
        and torch.equal(layer.weight.cpu(), expected)
        and placed(layer.weight) == (4, 4)
    )
    kept["layer"]["weight"].shards.pop()
    with pytest.raises(ValueError, match=r"a tensor of shape \[16, 8\] is divided among processes, and this one has 7 of its shards"):
        xc.SPMDSavePlanner().set_up_planner(kept)


def test_the_signal_that_a_job_ends() -> None:
    """`_XLAC`'s functions, which torch_xla's manager calls."""
    _XLAC: Any = torch_xla._XLAC
    with pytest.raises(RuntimeError, match=r"call torch_xla._XLAC._activate_preemption_sync_manager\(\) first"):
        _XLAC._sync_point_reached(0)
    before = signal.signal(signal.SIGTERM, lambda *args: None)
    try:
        _XLAC._ensure_xla_coordinator_initialized(global_rank=0, world_size=1, master_addr="localhost")
        _XLAC._activate_preemption_sync_manager()
        _XLAC._activate_preemption_sync_manager()
        assert not _XLAC._sync_point_reached(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert _XLAC._sync_point_reached(2) and _XLAC._sync_point_reached(3)
    finally:
        _XLAC._deactivate_preemption_sync_manager()
        signal.signal(signal.SIGTERM, before)
    failed: list[str] = []

    def elsewhere() -> None:
        try:
            _XLAC._activate_preemption_sync_manager()
        except RuntimeError as error:
            failed.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "call it in the main thread" in failed[0]


def test_a_failed_save_leaves_what_was_there(mesh: xs.Mesh, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = xc.CheckpointManager(tmp_path, save_interval=1)
    manager.save(0, {"t": torch.ones(2).to("xla")})

    def full(*args: Any, **kwargs: Any) -> None:
        (kwargs["checkpoint_id"]).mkdir()
        raise OSError("No space left on device")

    monkeypatch.setattr(dcp, "save", full)
    with pytest.raises(OSError, match="No space left"):
        manager.save(0, {"t": torch.zeros(2).to("xla")})
    manager.save_async(1, {"t": torch.zeros(2).to("xla")})
    with pytest.raises(OSError, match="No space left"):
        manager.join()
    assert [p.name for p in tmp_path.iterdir()] == ["0"] and manager.all_steps() == [0]


def test_preemption(mesh: xs.Mesh, tmp_path: pathlib.Path) -> None:
    before = signal.signal(signal.SIGTERM, lambda *args: None)
    try:
        manager = xc.CheckpointManager(tmp_path, save_interval=100)
        assert not manager.should_save(5) and not manager.reached_preemption(5)
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.reached_preemption(5) and manager.save(5, {"t": torch.ones(2).to("xla")})
        assert not manager.should_save(6) and manager.all_steps() == [5]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_mistakes(mesh: xs.Mesh, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="save_interval must be a number of steps, 1 or more, got 0"):
        xc.CheckpointManager(tmp_path, save_interval=0)
    with pytest.raises(ValueError, match=r"gs://bucket/run: checkpoints go to a local folder"):
        xc.CheckpointManager("gs://bucket/run", save_interval=1)
    with pytest.raises(ValueError, match=r"has no checkpoint of step 3; there are none"):
        xc.CheckpointManager(tmp_path, save_interval=1).restore(3, {})
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="parameters have gradients already"):
        xc.prime_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1))


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.Adagrad, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1)]
)
def test_priming_keeps_parameters(kind: Any) -> None:
    layer = nn.Linear(4, 4).to("xla")
    before = layer.weight.detach().cpu()
    optimizer = xc.prime_optimizer(kind(layer.parameters()))
    assert torch.equal(layer.weight.cpu(), before) and layer.weight.grad is None and optimizer.state[layer.weight]
    assert optimizer.param_groups[0]["lr"] > 0


def test_checkpoints_without_annotations(tmp_path: pathlib.Path) -> None:
    """`torch.distributed.checkpoint` as it is, in a process that has the xla device."""
    dcp.save({"t": torch.arange(4.0)}, checkpoint_id=tmp_path, no_dist=True)
    state = {"t": torch.zeros(4)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(state["t"], torch.arange(4.0))
    stream = torch.xla.current_stream()
    stream.wait_stream(stream)
    with torch.xla.stream(stream):
        stream.synchronize()
