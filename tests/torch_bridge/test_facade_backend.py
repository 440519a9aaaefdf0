"""torch.distributed with backend "xla", and `xla_multiprocessing`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.distributed.xla_backend as xbn
import torch_xla.distributed.xla_multiprocessing as xmp
from torch import nn
from torch_xla.utils.utils import get_free_tcp_ports

from tests.torch_bridge.devices import python
from torch_bridge.mesh import rank_numbers, world

DEVICES = ["xla", "cpu"]


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("xla")
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_world_of_one_without_a_launcher(group: dist.ProcessGroup) -> None:
    assert isinstance(group, xbn.ProcessGroupXla)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "xla")
    assert (group.rank(), group.size(), group._mesh) == (0, 1, [])
    store = dist.distributed_c10d._get_default_store()
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert "WORLD_SIZE" not in os.environ


@pytest.mark.parametrize("method", ["xla://", "pjrt://"])
def test_init_methods(method: str) -> None:
    dist.init_process_group("xla", init_method=method)
    assert dist.get_world_size() == 1
    dist.destroy_process_group()


def test_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_tcp_ports()[0])}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("xla")
    dist.barrier()
    assert dist.get_rank() == 0
    dist.destroy_process_group()


def test_a_group_that_transformers_made_at_its_import() -> None:
    """Scripts written for older releases of transformers make it behind that import, as they had to."""
    exec("import torch.distributed as dist; dist.init_process_group('xla')", {"__name__": "transformers.training_args"})
    first = dist.group.WORLD
    dist.init_process_group("xla")
    assert dist.group.WORLD is first
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group("xla")
    dist.destroy_process_group()


def test_larger_worlds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"world_size=2.*the world has 1 rank.*torchrun"):
        dist.init_process_group("xla", rank=0, world_size=2, store=dist.HashStore())
    assert not dist.is_initialized()


@pytest.mark.parametrize("device", DEVICES)
def test_collectives_keep_values(group: dist.ProcessGroup, device: str) -> None:
    t = torch.tensor([1.0, 2.0], device=device)
    want = [1.0, 2.0]
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        dist.all_reduce(t, op=op)
    dist.broadcast(t, src=0)
    dist.reduce(t, dst=0)
    assert t.tolist() == want

    def fresh() -> torch.Tensor:
        return torch.zeros(2, device=device)

    outs = [fresh()]
    dist.all_gather(outs, t)
    assert outs[0].tolist() == want
    outs = [fresh()]
    dist.gather(t, outs, dst=0)
    assert outs[0].tolist() == want
    for collective in (
        lambda out: dist.scatter(out, [t], src=0),
        lambda out: dist.reduce_scatter(out, [t]),
        lambda out: dist.reduce_scatter_tensor(out, t),
        lambda out: dist.all_gather_into_tensor(out, t),
        lambda out: dist.all_to_all_single(out, t),
        lambda out: dist.all_to_all([out], [t]),
    ):
        out = fresh()
        collective(out)
        assert out.tolist() == want
    dist.barrier()
    scalar = [torch.zeros((), device=device)]
    dist.all_gather(scalar, torch.tensor(3.0, device=device))
    assert scalar[0].item() == 3.0


def test_async_op_gives_a_handle(group: dist.ProcessGroup) -> None:
    t = torch.ones(2, device="xla")
    work = dist.all_reduce(t, async_op=True)
    assert work.wait() and work.is_completed()
    assert work.get_future().wait()[0] is t


def test_object_collectives(group: dist.ProcessGroup) -> None:
    outs = [None]
    dist.all_gather_object(outs, {"a": [1, "b"]})
    assert outs == [{"a": [1, "b"]}]
    objects = ["x", 3]
    dist.broadcast_object_list(objects, src=0)
    assert objects == ["x", 3]
    outs = [None]
    dist.gather_object((1, 2), outs, dst=0)
    assert outs == [(1, 2)]


def test_new_group(group: dist.ProcessGroup) -> None:
    new = dist.new_group([0], pg_options={"xla_pg_options": {"mesh": [[0]]}})
    assert isinstance(new, xbn.ProcessGroupXla) and new._mesh == [[0]] and dist.get_rank(new) == 0
    t = torch.ones(2, device="xla")
    dist.all_reduce(t, group=new)
    assert torch_xla.core.xla_model.all_reduce("sum", t, groups=new).tolist() == [1.0, 1.0]
    gloo = dist.new_group([0], backend="gloo")
    assert not isinstance(gloo, xbn.ProcessGroupXla)
    with pytest.raises(ValueError, match="rank 1 does not exist"):
        dist.new_group([0], pg_options={"xla_pg_options": {"mesh": [[0, 1]]}})


def test_without_a_backend_scripts_for_the_cpu_have_gloo() -> None:
    """Also once the package is installed, which makes xla the accelerator: it raised that nobody knows which backend xla has."""
    code = """
import torch, torch.distributed as dist
assert torch.accelerator.current_accelerator().type == "xla"
dist.init_process_group(rank=0, world_size=1, init_method="tcp://127.0.0.1:PORT")
t = torch.ones(2)
dist.all_reduce(t)
dist.barrier()
dist.all_reduce(t, group=dist.new_group([0]))
found = [None]
dist.all_gather_object(found, "x")
print(t.tolist(), found, dist.group.WORLD._get_backend(torch.device("cpu")).name())
"""
    out = python(code.replace("PORT", str(get_free_tcp_ports(1)[0])))
    assert out.splitlines()[-1] == "[1.0, 1.0] ['x'] gloo"


def test_without_a_backend_scripts_that_asked_for_xla_have_xla() -> None:
    config = dist.distributed_c10d.BackendConfig(dist.Backend.UNDEFINED)  # type: ignore[arg-type]
    assert config.get_device_backend_map() == {"xla": "xla"}


def test_a_barrier_of_a_cpu_group_that_names_devices(group: dist.ProcessGroup) -> None:
    """As accelerate's `wait_for_everyone`; torch makes a tensor on the accelerator for it, which is xla. It raised that c10d.Work has no `__eq__`."""
    gloo = dist.new_group([0], backend="gloo")
    dist.barrier(gloo, device_ids=[0])
    assert dist.barrier(gloo, device_ids=[0], async_op=True).wait()


def test_xla_tensors_in_a_cpu_group(group: dist.ProcessGroup) -> None:
    gloo = dist.new_group([0], backend="gloo")
    t = torch.ones(2, device="xla")
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(t, group=gloo),
        lambda: dist.broadcast(t, 0, group=gloo),
        lambda: dist.all_gather([t.clone()], t, group=gloo),
        lambda: dist.all_gather_into_tensor(t.clone(), t, group=gloo),
        lambda: dist.scatter(t, [t.clone()], group=gloo),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r'a group of backend "xla", got one of "gloo".*or give this group CPU tensors'):
            call()
    on_cpu = torch.ones(2)
    dist.all_reduce(on_cpu, group=gloo)
    assert t.tolist() == on_cpu.tolist() == [1.0, 1.0]


def test_errors(group: dist.ProcessGroup) -> None:
    t = torch.ones(2, device="xla")
    with pytest.raises(ValueError, match=r"no reduction.*BXOR.*use SUM"):
        dist.all_reduce(t, op=dist.ReduceOp.BXOR)
    with pytest.raises(ValueError, match="no other rank"):
        group.send([t], 0)
    with pytest.raises(ValueError, match="no other rank"):
        group.recv_anysource([t], 0)
    with pytest.raises(NotImplementedError, match="uneven input_split_sizes"):
        group.all_to_all_single(t, t, [], [1, 2])


def test_distributed_data_parallel(group: dist.ProcessGroup) -> None:
    model = nn.Linear(2, 1).to("xla")
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped(torch.ones(1, 2, device="xla")).sum().backward()
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


def test_other_backends_are_untouched() -> None:
    with pytest.raises(ValueError, match="RANK expected"):
        dist.init_process_group("gloo")


def test_spawn_calls_the_function_here() -> None:
    calls: list[tuple[int, str]] = []
    xmp.spawn(lambda index, word: calls.append((index, word)), args=("a",))
    xmp.spawn(lambda index, word: calls.append((index, word)), args=("b",), nprocs=1, start_method="fork")
    torch_xla.launch(lambda index, word: calls.append((index, word)), args=("c",))
    assert calls == [(0, "a"), (0, "b"), (0, "c")]


def test_spawn_makes_a_world_of_the_size_asked_for() -> None:
    seen: list[tuple[int, list[int]]] = []
    try:
        xmp.spawn(lambda index: seen.append((world.size(), rank_numbers.per_rank(index))), nprocs=8)
        assert seen == [(8, list(range(8)))]
        with pytest.raises(ValueError, match=r"nprocs=4.*this host has 8 ranks"):
            xmp.spawn(print, nprocs=4)
    finally:
        world.configure(None)
    with pytest.raises(ValueError, match=r"nprocs must be a positive number, got 0"):
        xmp.spawn(print, nprocs=0)


def test_launch_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("LOCAL_RANK", "0")
    calls: list[int] = []
    torch_xla.launch(calls.append)
    assert calls == [0]


def test_model_wrapper_and_serial_executor() -> None:
    wrapper = xmp.MpModelWrapper(nn.Linear(1, 1))
    assert wrapper.to("xla").weight.device.type == "xla"
    assert wrapper.to("xla") is wrapper.to("xla")
    assert xmp.MpSerialExecutor().run(lambda: 3) == 3


def test_each_spawn_of_several_workers_begins_with_the_wrapped_model_as_it_was() -> None:
    """The folds of a cross-validation: processes of their own would leave the model of this one as it is."""
    wrapper = xmp.MpModelWrapper(nn.Linear(1, 1, bias=False))
    seen: list[list[float]] = []

    def train(index: int) -> None:
        model: Any = wrapper.to("xla")
        assert wrapper.to("xla") is model
        seen.append([model.weight.item()])
        with torch.no_grad():
            model.weight += 1
        seen[-1].append(model.weight.item())

    try:
        for _ in range(2):
            xmp.spawn(train, nprocs=2)
    finally:
        world.configure(None)
    start = wrapper._model.weight.item()
    assert wrapper._model.weight.device.type == "cpu"
    assert seen == [[start, start + 1]] * 2
    for _ in range(2):  # one worker is this process, there too
        xmp.spawn(train, nprocs=1)
    assert [found[0] for found in seen[2:]] == [start, start + 1]
