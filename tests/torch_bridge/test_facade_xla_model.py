"""`torch_xla.core.xla_model` and the top level of `torch_xla`."""

from __future__ import annotations

import io
import threading
import warnings

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import nn

from torch_bridge.mesh import world
from torch_bridge.runtime import executor, steps
from torch_bridge.torch_xla import _deprecation

pytestmark = pytest.mark.usefixtures("clean_step")


def test_devices_and_ranks() -> None:
    assert torch_xla.device() == torch.device("xla:0") == xm.xla_device() == xm.xla_device(0)
    assert torch_xla.devices() == [torch.device("xla:0")]
    assert torch_xla.device_count() == 1
    assert xm.get_xla_supported_devices() == ["xla:0"]
    assert torch_xla.real_devices() == xm.xla_real_devices() == xm.xla_real_devices(["xla:0"]) == ["NEURON:0"]
    assert xm.xla_device_hw("xla:0") == xm.xla_device_hw(torch.device("xla")) == "NEURON"
    assert xm.xla_device_kind()
    assert xm.parse_xla_device("NEURON:3") == ("NEURON", 3)
    assert xm.parse_xla_device("xla") is None
    assert (xm.get_ordinal(), xm.get_local_ordinal(), xm.xrt_world_size()) == (0, 0, 1)
    assert xm.is_master_ordinal() and xm.is_master_ordinal(local=False)
    with pytest.raises(ValueError, match=r"one xla device.*got 3"):
        xm.xla_device(3)
    with pytest.raises(RuntimeError, match="Invalid device format: cpu"):
        xm.xla_device_hw("cpu")


def test_world_size_of_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("RANK", raising=False)
    world.configure(None)
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE=8 is set but RANK is not.*torchrun"):
        xm.xrt_world_size()
    monkeypatch.setenv("WORLD_SIZE", "1")
    world.configure(None)
    assert xm.xrt_world_size() == 1


def test_deprecated_names_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_deprecation, "_WARNED", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            xm.xla_device()
            xm.mark_step()
    assert [(w.category, str(w.message)) for w in caught] == [
        (DeprecationWarning, "Use torch_xla.device instead"),
        (DeprecationWarning, "Use torch_xla.sync instead"),
    ]
    assert {w.filename for w in caught} == {__file__}


def test_mark_step_runs_what_was_recorded() -> None:
    x = torch.ones(3, device="xla") * 2
    assert x._storage.pending
    xm.mark_step()
    assert not x._storage.pending
    xm.mark_step(wait=True, reset_scope=True)
    xm.wait_device_ops()
    y = x + 1
    xm.unlazy([y])
    assert not y._storage.pending


def test_step_closures_run_in_order_with_values() -> None:
    seen: list[object] = []
    x = torch.ones(2, device="xla")
    y = x + 1
    xm.add_step_closure(lambda t, tag: seen.append((tag, t._storage.pending, t.tolist())), args=(y, "first"))
    xm.add_step_closure(lambda: (seen.append("second"), xm.add_step_closure(seen.append, ("later",))))
    x.add_(10)
    assert seen == []
    executions = executor.metrics.EXECUTE_TIME.count
    torch_xla.sync()
    assert executor.metrics.EXECUTE_TIME.count == executions + 1
    assert seen == [("first", False, [2.0, 2.0]), "second"]
    torch_xla.sync()
    assert seen[2:] == ["later"]


def test_asynchronous_closures_see_the_value_of_their_step() -> None:
    release, seen = threading.Event(), []
    x = torch.zeros(2, device="xla")
    x += 1

    def closure(t: torch.Tensor) -> None:
        assert release.wait(20)
        seen.append(t.tolist())

    xm.add_step_closure(closure, (x,), run_async=True)
    xm.mark_step()
    x += 1
    xm.mark_step()
    release.set()
    steps.wait_closures()
    assert seen == [[1.0, 1.0]]


def test_error_in_an_asynchronous_closure_arrives() -> None:
    def closure() -> None:
        raise KeyError("lost")

    xm.add_step_closure(closure, run_async=True)
    xm.mark_step()
    with pytest.raises(KeyError, match="lost"):
        steps.wait_closures()


def test_compile_as_function_decorator_and_context() -> None:
    def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Adds."""
        return a + b

    x = torch.ones(2, device="xla")
    pending = x * 3
    compiled = torch_xla.compile(add)
    y = compiled(x, b=x)
    assert compiled.__name__ == "add" and compiled.__doc__ == "Adds."
    assert not pending._storage.pending and not y._storage.pending
    assert y.tolist() == [2.0, 2.0]

    @torch_xla.compile(full_graph=True)
    def double(a: torch.Tensor) -> torch.Tensor:
        return a * 2

    assert double(x).tolist() == [2.0, 2.0]
    with torch_xla.step():
        z = x + 5
    assert not z._storage.pending
    layer = nn.Linear(2, 1).to("xla")
    assert torch_xla.compile(layer)(x).shape == (1,)


def test_compile_full_graph_refuses_an_early_run() -> None:
    x = torch.ones(2, device="xla")

    def branchy(a: torch.Tensor) -> torch.Tensor:
        total = (a * 2).sum()  # the culprit
        return a if total.item() > 0 else -a

    assert torch_xla.compile(branchy)(x).tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError, match=r"Unexpected execution.*'branchy'.*test_facade_xla_model.py:\d+.*without full_graph=True"):
        torch_xla.compile(branchy, full_graph=True)(x)


@pytest.mark.parametrize("limit", ["max_different_graphs", "num_different_graphs_allowed"])
def test_compile_counts_graphs(limit: str) -> None:
    f = torch_xla.compile(lambda a: a + 1, name="plus", **{limit: 1})
    for _ in range(3):
        f(torch.ones(2, device="xla"))
        torch_xla.sync(wait=True, reset_scope=False)
    with pytest.raises(RuntimeError, match="'plus' has given 2 different graphs"):
        f(torch.ones(3, device="xla"))


def test_compile_syncs_when_the_function_raises() -> None:
    x = torch.ones(2, device="xla")
    with pytest.raises(ZeroDivisionError), torch_xla.compile():
        y = x + 1
        _ = 1 / 0
    assert not y._storage.pending


def test_optimizer_step_returns_what_step_returns() -> None:
    model = nn.Linear(2, 1).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = (model.weight - 0.5).tolist()
    model(torch.ones(1, 2, device="xla")).sum().backward()
    assert xm.optimizer_step(optimizer, barrier=True, optimizer_args={"closure": lambda: 7}, groups=[[0]], pin_layout=False) == 7
    assert not model.weight._storage.pending
    torch.testing.assert_close(model.weight.tolist(), expected)
    assert len(xm._fetch_gradients(optimizer)) == 2
    with pytest.raises(ValueError, match="rank 1 does not exist"):
        xm.optimizer_step(optimizer, groups=[[0, 1]])


def test_all_reduce() -> None:
    x = torch.tensor([1.0, 2.0], device="xla")
    y = xm.all_reduce(xm.REDUCE_SUM, x, scale=0.5)
    assert y is not x and y.tolist() == [0.5, 1.0]
    same = xm.all_reduce("sum", x)
    same.add_(1)
    assert x.tolist() == [1.0, 2.0]
    tensors = [x, torch.tensor([4], device="xla")]
    assert xm.all_reduce(xm.REDUCE_SUM, tensors, scale=2.0, groups=[[0]]) is tensors
    assert x.tolist() == [2.0, 4.0] and tensors[1].tolist() == [8] and tensors[1].dtype == torch.int64
    w = torch.ones(2, device="xla", requires_grad=True)
    xm.all_reduce("sum", w, scale=3.0).sum().backward()
    assert w.grad.tolist() == [3.0, 3.0]
    assert xm.all_reduce("sum", [w.grad.data]) is not None


GROUP_ERRORS = [
    ([0], TypeError, "list of lists"),
    ("0", TypeError, "list of lists"),
    ([[0.0]], TypeError, "list of lists"),
    ([["0"]], TypeError, "list of lists"),
    ([[True]], TypeError, "list of lists"),
    ([[0, 1]], ValueError, "rank 1 does not exist in a world of 1"),
    ([[0], [0]], ValueError, "appears more than once"),
    ([[0], []], ValueError, "empty group"),
]


@pytest.mark.parametrize(("groups", "error", "text"), GROUP_ERRORS)
def test_group_errors(groups: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        xm.all_reduce("sum", torch.ones(1, device="xla"), groups=groups)


def test_collectives_of_one_rank() -> None:
    x = torch.arange(6.0).reshape(3, 2).to("xla")
    want = x.tolist()
    assert xm.all_gather(x, dim=-1, groups=[[0]]).tolist() == want
    out = torch.zeros(3, 2, device="xla")
    assert xm.all_gather(x, output=out) is out and out.tolist() == want
    assert [t.tolist() for t in xm.all_gather_bucketized([x, x], bucket_cap_mb=1)] == [want, want]
    out = torch.zeros(3, 2, device="xla")
    assert xm.reduce_scatter(xm.REDUCE_SUM, x, 1.0, 0, 1, groups=[[0]], output=out) is out and out.tolist() == want
    assert xm.reduce_scatter("sum", x, 0.5, 1, 1).tolist() == (x / 2).tolist()
    assert [t.tolist() for t in xm.reduce_scatter_bucketized("sum", [x], 1.0, 0, 1)] == [want]
    assert xm.all_to_all(x, 0, 1, 1).tolist() == want
    assert xm.collective_permute(x, [[0, 0]]).tolist() == want
    assert xm.collective_permute(x, []).tolist() == torch.zeros(3, 2).tolist()
    xm.collective_broadcast([x], root_ordinal=0, groups=[0])
    xm.broadcast_master_param(nn.Linear(2, 1).to("xla"))
    xm.set_replication(torch.device("xla:0"), xm.get_xla_supported_devices())


COLLECTIVE_ERRORS = [
    (lambda x: xm.all_reduce("avg", x), ValueError, "reduce_type must be one of sum"),
    (lambda x: xm.all_reduce("and", x), ValueError, "needs integer or bool"),
    (lambda x: xm.all_reduce("sum", 3), TypeError, "a tensor or a list of tensors, got int"),
    (lambda x: xm.all_reduce("sum", [x, 2]), TypeError, "list of Tensor|list of XLATensor, int|list of int"),
    (lambda x: xm.all_gather(x, dim=2), IndexError, "dim=2 is out of range"),
    (lambda x: xm.all_gather(x.sum()), IndexError, "reshape"),
    (lambda x: xm.all_gather(x, output=torch.zeros(1, device="xla")), ValueError, "output must be torch.float32 of shape"),
    (lambda x: xm.all_gather([x], output=[x, x]), ValueError, "1 inputs but 2 outputs"),
    (lambda x: xm.reduce_scatter("sum", x, 1.0, 0, 2), ValueError, "shard_count=2 must be the number of ranks in the group, 1"),
    (lambda x: xm.reduce_scatter("sum", x, 1.0, 5, 1), IndexError, "scatter_dim=5"),
    (lambda x: xm.all_to_all(x, 0, 0, 4), ValueError, "split_count=4"),
    (lambda x: xm.all_to_all(x, 0, 9, 1), IndexError, "concat_dimension=9"),
    (lambda x: xm.collective_permute(x, [[0, 1]]), ValueError, r"\[source, target\] ranks below 1"),
    (lambda x: xm.collective_permute(x, [[0, 0], [0, 0]]), ValueError, "twice"),
    (lambda x: xm.collective_broadcast([x], root_ordinal=1), ValueError, "root_ordinal=1 is not in"),
    (lambda x: xm.send(x, 0), ValueError, "no other rank"),
    (lambda x: xm.all_gather_bucketized([x], bucket_cap_mb=0), ValueError, "bucket_cap_mb"),
]


@pytest.mark.parametrize(("call", "error", "text"), COLLECTIVE_ERRORS)
def test_collective_errors(call, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(torch.ones(3, 2, device="xla"))


def test_host_collectives() -> None:
    assert xm.rendezvous("here") == [b""]
    assert xm.rendezvous("here", payload=b"abc", replicas=[0]) == [b"abc"]
    with pytest.raises(TypeError, match="must be bytes"):
        xm.rendezvous("here", payload="abc")
    with pytest.raises(ValueError, match="replicas"):
        xm.rendezvous("here", replicas=[1])
    loss = torch.tensor(2.5, device="xla")
    assert xm.mesh_reduce("loss", loss, lambda parts: [p.device.type for p in parts]) == ["cpu"]
    assert xm.mesh_reduce("accuracy", 3, max) == 3
    assert xm.do_on_ordinals(lambda t: (t.device.type, float(t)), (loss,)) == ("cpu", 2.5)
    assert xm.do_on_ordinals(lambda: 1, ordinals={5}) is None


def test_save_keeps_ties_and_moves_to_the_cpu() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    model.to("xla")
    buffer = io.BytesIO()
    xm.save({"model": model.state_dict(), "step": 3, "parameter": model[0].weight, "nested": [(model[0].weight.sum(),)]}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert loaded["step"] == 3
    first, second = loaded["model"].values()
    assert first.device.type == "cpu" and first.data_ptr() == second.data_ptr()
    assert isinstance(loaded["parameter"], nn.Parameter)
    torch.testing.assert_close(loaded["nested"][0][0], model[0].weight.detach().cpu().sum())
    assert model[0].weight.device.type == "xla"
    converted = xm._maybe_convert_to_cpu({"a": model[0].weight}, convert=False)
    assert converted["a"] is model[0].weight


def test_send_cpu_data_to_device() -> None:
    x = torch.ones(2)
    (only,) = xm.send_cpu_data_to_device(x, "xla")
    assert only.device.type == "xla"
    moved = xm.send_cpu_data_to_device({"x": x, "n": 1, "on": only}, torch.device("xla:0"))
    assert moved["x"].device.type == "xla" and moved["n"] == 1 and moved["on"] is only
    with pytest.raises(RuntimeError, match="Call torch_xla.runtime.use_spmd"):
        xm.send_cpu_data_to_device(x, "xla", input_sharding=object())


def test_sent_data_is_a_copy() -> None:
    x = torch.ones(2)
    (moved,) = xm.send_cpu_data_to_device(x, "xla")
    x.fill_(5)
    assert moved.tolist() == [1.0, 1.0]


def test_rng_state_is_an_int() -> None:
    xm.set_rng_state(42)
    assert xm.get_rng_state() == 42
    first = torch.rand(4, device="xla")
    state = xm.get_rng_state()
    assert state != 42 and 0 <= state < 2**63
    second = torch.rand(4, device="xla")
    xm.set_rng_state(state)
    assert torch.rand(4, device="xla").tolist() == second.tolist() != first.tolist()
    torch.manual_seed(42)
    assert xm.get_rng_state() == 42
    assert torch.rand(4, device="xla").tolist() == first.tolist()
    torch_xla.manual_seed(42)
    with xm.fork_rng():
        torch.rand(4, device="xla")
    assert xm.get_rng_state() == 42
    for seed in (2**40, 2**63 - 1):
        xm.set_rng_state(seed)
        assert xm.get_rng_state() == seed
    torch.manual_seed(2**50 + 1)
    state = xm.get_rng_state()
    drawn = torch.rand(4, device="xla").tolist()
    xm.set_rng_state(state)
    assert torch.rand(4, device="xla").tolist() == drawn


def test_arena_converts_all_at_once() -> None:
    x, y = torch.ones(1, device="xla"), torch.ones(2, device="xla")
    calls: list[int] = []

    def convert(tensors: list[torch.Tensor]) -> list[str]:
        calls.append(len(tensors))
        return [f"t{i}" for i in range(len(tensors))]

    arena = xm.ToXlaTensorArena(convert, lambda v: isinstance(v, torch.Tensor))
    assert arena.transform({"a": [x, (y, 3)], "b": x}) == {"a": ["t0", ("t1", 3)], "b": "t0"}
    assert calls == [2]


def test_check_view_sharing() -> None:
    x = torch.ones(4, device="xla")
    xm.check_view_sharing({"a": x, "b": [x.clone()], "again": x})
    with pytest.raises(RuntimeError, match="sharing a view"):
        xm.check_view_sharing([x, x[:2]])


def test_memory_info() -> None:
    keep = torch.ones(1000, device="xla") * 2
    torch_xla.sync(wait=True)
    info = xm.get_memory_info(torch_xla.device())
    assert keep.numel() * 4 <= info["bytes_used"] <= info["bytes_limit"]
    assert info["kb_total"] == info["bytes_limit"] // 1024 and 0 < info["kb_free"] <= info["kb_total"]


def test_master_print(capsys: pytest.CaptureFixture[str]) -> None:
    xm.master_print("loss", 1, flush=True)
    assert capsys.readouterr().out == "loss 1\n"
    target = io.StringIO()
    xm.master_print("x", fd=target)
    assert target.getvalue() == "x\n"


def test_optimization_barrier_keeps_values() -> None:
    x = torch.ones(2, device="xla", requires_grad=True)
    y = x * 2
    xm.optimization_barrier_([x, y])
    y.sum().backward()
    assert x.grad.tolist() == [2.0, 2.0] and y.tolist() == [2.0, 2.0] and x.tolist() == [1.0, 1.0]


def test_functions_have_gradients() -> None:
    import torch_xla.core.functions as xf

    x = torch.ones(2, 3, device="xla", requires_grad=True)
    (xf.all_reduce("sum", x, scale=2.0).sum() + xf.all_gather(x, dim=1).sum() + xf.all_reduce(xm.REDUCE_MAX, x).sum()).backward()
    assert x.grad.tolist() == torch.full((2, 3), 4.0).tolist()
    (grad,) = torch.autograd.grad(xf.all_reduce("mul", x, scale=2.0).sum(), x)
    assert grad.tolist() == torch.full((2, 3), 2.0).tolist()


def test_rate_tracker() -> None:
    tracker = xm.RateTracker()
    tracker.add(10)
    assert tracker.rate() > 0 and tracker.global_rate() > 0
