"""Smaller modules of torch_xla: dlpack, the model comparator, FSDP's helpers, callbacks, accumulation of gradients, queues, saved metrics, graphs."""

from __future__ import annotations

import copy
import pathlib
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.distributed.fsdp.utils as fsdp
import torch_xla.distributed.spmd as xs
from torch import nn
from torch_xla._dynamo import dynamo_bridge
from torch_xla.debug import metrics_saver, model_comparator
from torch_xla.experimental.callback import on_ready_callback
from torch_xla.experimental.gradient_accumulation import gradient_accumulation
from torch_xla.utils.dlpack import from_dlpack, to_dlpack
from torch_xla.utils.keyd_queue import KeydQueue, Queue

from torch_bridge.mesh import world

# -- dlpack ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.uint8, torch.complex64])
def test_there_and_back(dtype: torch.dtype) -> None:
    host = torch.arange(6).reshape(2, 3).to(dtype)
    t = host.to("xla")
    for given in (t, t.T, t[1], torch.zeros(2, dtype=dtype, device="xla")):
        back = torch.utils.dlpack.from_dlpack(to_dlpack(given))
        assert back.dtype == dtype and torch.equal(back, given.cpu())
    for made in (from_dlpack(to_dlpack(t)), from_dlpack(host), from_dlpack(torch.utils.dlpack.to_dlpack(host.T)).T):
        assert made.device.type == "xla" and made.dtype == dtype and torch.equal(made.cpu(), host)


def test_values_are_copied() -> None:
    t = torch.ones(3, device="xla")
    capsule = to_dlpack(t * 2)
    t.add_(1)
    assert torch.utils.dlpack.from_dlpack(capsule).tolist() == [2.0] * 3
    array = np.ones(2, np.float32)
    made = from_dlpack(array)
    array[0] = 5
    assert made.tolist() == [1.0, 1.0]


def test_to_dlpack_says_what_it_cannot_give() -> None:
    with pytest.raises(RuntimeError, match="not an XLA tensor: cpu"):
        to_dlpack(torch.ones(1))
    world.configure(world.World(2))
    try:
        with pytest.raises(NotImplementedError, match=r"world of 2 ranks .* pass on t.cpu\(\)"):
            to_dlpack(torch.ones(2, device="xla"))
    finally:
        world.configure(None)


# -- comparing models -----------------------------------------------------------------------------


def _run(folder: pathlib.Path, scale: float) -> None:
    folder.mkdir()
    model_comparator.configure(folder)
    x = torch.arange(4.0, device="xla").reshape(2, 2)
    for step in range(2):
        assert model_comparator.save("x", x, step=step) is x
        model_comparator.save("x", x * (scale if step else 1.0), step=step)
    model_comparator.save(None, x)
    model_comparator.configure(None)


def test_compare(tmp_path: pathlib.Path) -> None:
    _run(tmp_path / "a", 1.0)
    _run(tmp_path / "b", 1.0)
    _run(tmp_path / "c", 2.0)
    here = pathlib.Path(__file__).name
    names = sorted(str(p.relative_to(tmp_path / "a")) for p in (tmp_path / "a").rglob("*.*"))
    assert len(names) == 5 and names[:4] == ["step-0/x.0", "step-0/x.1", "step-1/x.0", "step-1/x.1"]
    assert re.fullmatch(re.escape(here) + r"\.l\d+\.0", names[4])
    assert model_comparator.compare(tmp_path / "a", tmp_path / "b") == ""
    report = model_comparator.compare(tmp_path / "a", tmp_path / "c", max_diffs=2)
    lines = ["  [0, 1]: 1.0 vs. 2.0", "  [1, 0]: 2.0 vs. 4.0", "  ... and 1 more"]
    assert report.splitlines() == [f"Changes in {tmp_path / 'a' / 'step-1' / 'x.1'}", *lines]
    (tmp_path / "b" / "step-0" / "x.0").unlink()
    assert model_comparator.compare(tmp_path / "b", tmp_path / "a") == f"Mismatch: step-0/x.0 not in {tmp_path / 'b'}\n"


def test_the_variable_names_the_folder_and_shapes_are_compared(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_comparator.save("nowhere", torch.ones(1))
    monkeypatch.setenv("MODELCMP_SAVEDIR", str(tmp_path))
    model_comparator.save("y", torch.ones(1, device="xla"))
    assert (tmp_path / "y.0").exists()
    assert model_comparator.compare_tensors(torch.ones(2), torch.ones(3)) == "Tensors have different shape: [2] vs. [3]\n"
    assert model_comparator.compare_tensors(torch.ones(2), torch.full((2,), 1.1), rtol=0.2) == ""


# -- FSDP's helpers -------------------------------------------------------------------------------


@pytest.mark.core(keep=2)
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 2, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_patched_linear_layers_have_the_same_numbers(shape: tuple[int, ...], bias: bool) -> None:
    plain = nn.Sequential(nn.Linear(3, 3, bias=bias), nn.Tanh()).to("xla")
    patched, checkpointed, named = (copy.deepcopy(plain) for _ in range(3))
    assert fsdp.apply_xla_patch_to_nn_linear(patched) is patched
    fsdp.checkpoint_module(checkpointed[0])
    fsdp.apply_xla_patch_to_nn_linear(checkpointed)
    fsdp.apply_xla_patch_to_nn_linear(named, xs.xla_patched_nn_linear_forward)
    found = []
    for model in (plain, patched, checkpointed, named):
        x = torch.arange(float(np.prod(shape)), device="xla").reshape(shape).requires_grad_()
        out = model(x)
        out.square().sum().backward()
        found.append([out.detach().cpu(), x.grad.cpu(), *(p.grad.cpu() for p in model.parameters())])  # type: ignore[union-attr]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-6, atol=1e-6)
    assert patched[0].forward.__func__ is not nn.Linear.forward and patched[0]._nn_linear_forward_original.__func__ is nn.Linear.forward
    before = patched[0].forward
    fsdp.apply_xla_patch_to_nn_linear(patched)
    assert patched[0].forward is before


def test_gradients_of_a_checkpointed_module_that_gives_a_dict() -> None:
    class Both(nn.Linear):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:  # type: ignore[override]
            return {"y": super().forward(x), "more": [x * 2, None, 3]}

    found = []
    for device in ("cpu", "xla"):
        torch.manual_seed(0)
        layer = Both(3, 3).to(device)
        x = torch.arange(3.0, device=device, requires_grad=True)
        out = (fsdp.checkpoint_module(layer) if device == "xla" else layer)(x)
        assert out["more"][1:] == [None, 3]
        (out["y"].square().sum() + out["more"][0].sum()).backward()
        found.append([x.grad.cpu(), *(p.grad.cpu() for p in layer.parameters())])  # type: ignore[union-attr]
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


def test_patched_linear_layers_give_no_more_than_is_asked_for() -> None:
    layer = fsdp.apply_xla_patch_to_nn_linear(nn.Linear(2, 2).to("xla").requires_grad_(False))
    x = torch.ones(1, 2, device="xla", requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None and layer.weight.grad is None


def test_collectives_that_exchange_nothing() -> None:
    x = torch.arange(4.0, device="xla")
    assert fsdp.dummy_all_gather(x).tolist() == [0.0, 1.0, 2.0, 3.0] and fsdp.dummy_all_reduce("sum", x, 2.0).tolist() == [
        0.0,
        2.0,
        4.0,
        6.0,
    ]
    assert fsdp.dummy_all_reduce("sum", [x], 2.0)[0] is x and x.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert fsdp.dummy_reduce_scatter("sum", x, 0.5, 0, 1).tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="shard_count=2 must be the number of ranks, 1"):
        fsdp.dummy_reduce_scatter("sum", x, 1.0, 0, 2)
    world.configure(world.World(2))
    try:
        y = torch.arange(4.0, device="xla")
        assert fsdp.dummy_all_gather(y).shape == (8,) and fsdp.dummy_reduce_scatter("sum", y, 1.0, 0, 2).tolist() == [0.0, 1.0]
    finally:
        world.configure(None)


# -- callbacks and accumulation -------------------------------------------------------------------


def test_a_callback_gets_the_computed_tensor() -> None:
    seen: list[Any] = []
    called = threading.Event()

    def callback(t: torch.Tensor) -> None:
        seen.append((t, t.tolist(), threading.current_thread() is threading.main_thread()))
        called.set()

    t = torch.ones(2, device="xla") + 1
    on_ready_callback(t, callback)
    assert called.wait(20)
    assert seen[0][0] is t and seen[0][1:] == ([2.0, 2.0], False)
    with pytest.raises(RuntimeError, match="not an XLA tensor"):
        on_ready_callback(torch.ones(1), callback)


def test_gradient_accumulation() -> None:
    """The gradients of the mean loss of all slices, added to what is there."""
    torch.manual_seed(0)
    model, plain = nn.Linear(3, 1).to("xla"), nn.Linear(3, 1)
    plain.load_state_dict({k: v.cpu() for k, v in model.state_dict().items()})
    unused = nn.ModuleList([model, nn.Linear(2, 2).to("xla")])
    x, y = torch.randn(4, 5, 3), torch.randn(4, 5, 1)
    for _ in range(2):
        loss, count = gradient_accumulation(
            lambda x, y, n: (nn.functional.mse_loss(model(x), y), n + 1), (x.to("xla"), y.to("xla")), unused, (torch.tensor(10).to("xla"),)
        )
        torch_xla.sync()
        expected = nn.functional.mse_loss(plain(x), y)
        expected.backward()
    assert count.item() == 14 and not loss.requires_grad
    torch.testing.assert_close(loss.cpu(), expected.detach())
    torch.testing.assert_close(model.weight.grad.cpu(), plain.weight.grad)  # type: ignore[union-attr]
    assert unused[1].weight.grad is None
    (alone,) = gradient_accumulation(lambda x: model(x).sum(), [x.to("xla")], model)
    torch.testing.assert_close(alone.cpu(), plain(x).sum((1, 2)).mean().detach())


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ([], "iterable_tensors cannot be empty"),
        ([1], "Element 0 of iterable_tensors is not a tensor but int"),
        ([torch.ones(2), torch.ones(0)], "Element 1 of iterable_tensors is empty"),
        ([torch.ones(2), torch.ones(3)], "Element 1 of iterable_tensors has inconsistent first dimension: 3, not 2"),
    ],
)
def test_gradient_accumulation_says_what_it_cannot_take(tensors: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        gradient_accumulation(lambda *_: None, tensors, nn.Linear(1, 1))


def test_xm_is_an_attribute() -> None:
    assert torch_xla.xm is torch_xla.core.xla_model


# -- queues, saved metrics, graphs ----------------------------------------------------------------


def _waits(call: Any) -> threading.Thread:
    """A thread in `call`, which has not come back."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    return thread


def test_a_queue_that_is_closed() -> None:
    queue = Queue(maxsize=2)
    queue.put(1)
    queue.put(2)
    full = _waits(lambda: queue.put(3))
    assert queue.max_size() == 2 and queue.get() == 1
    full.join(10)
    assert not full.is_alive() and queue.get() == 2
    queue.close_write()
    assert queue.get() == 3 and queue.get() is None
    queue.close()
    queue.put(4)
    assert queue.get() is None


def test_a_queue_by_keys_takes_what_is_waited_for() -> None:
    queue, found = KeydQueue(maxsize=1), []
    queue.put("a", 1)
    waiting = _waits(lambda: found.append(queue.get("b")))
    queue.put("b", 2)  # although it is full
    waiting.join(10)
    assert found == [2]
    full = _waits(lambda: queue.put("c", 3))
    assert queue.get("a") == 1
    full.join(10)
    queue.close_write()
    assert queue.get("c") == 3 and queue.get("d") is None


def test_saved_metrics(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (torch.ones(2, device="xla") + 1).cpu()
    monkeypatch.delenv("XLA_METRICS_FILE", raising=False)
    metrics_saver.save_metrics()
    monkeypatch.setenv("XLA_METRICS_FILE", str(tmp_path / "metrics"))
    metrics_saver.save_metrics()
    metrics_saver.save_metrics()
    metrics_saver.save_metrics("STDERR")
    assert (tmp_path / "metrics").read_text().count("Metric: CompileTime") == 2
    assert "Metric: CompileTime" in capsys.readouterr().err


def test_compiled_graphs() -> None:
    from torch_xla.core import dynamo_bridge as older

    graph = torch.fx.symbolic_trace(nn.Linear(3, 2)).to("xla")
    x = torch.ones(1, 3, device="xla")
    expected = graph(x).cpu()
    compiled = dynamo_bridge.extract_compiled_graph(graph, [x])
    assert torch.equal(compiled(x).cpu(), expected) and older.extract_compiled_graph is dynamo_bridge.extract_compiled_graph


def test_a_backend_as_a_function() -> None:
    from torch_xla._dynamo import dynamo_backend2

    model = nn.Linear(3, 2).to("xla")
    x = torch.ones(1, 3, device="xla")
    expected = model(x).detach().cpu()
    compiled = torch.compile(model, backend=dynamo_backend2.dynamo_backend)
    assert torch.equal(compiled(x).detach().cpu(), expected) and compiled._orig_mod is model
    graph = dynamo_backend2.dynamo_backend(torch.fx.symbolic_trace(model), [x])
    assert torch.equal(graph(x).detach().cpu(), expected)


# -- plugins -------------------------------------------------------------------------------------------


def test_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_xla.experimental import plugins

    monkeypatch.setattr(plugins, "_plugins", {})
    monkeypatch.setattr(plugins, "_asked", False)
    monkeypatch.setenv("PJRT_DEVICE", "CUDA")
    with pytest.raises(KeyError, match="no plugin was registered for CUDA; there are none: devices are JAX's"):
        plugins.default()
    plugin = plugins.DevicePlugin()
    plugins.register_plugin("cuda", plugin)
    plugins.use_dynamic_plugins()
    assert plugins.default() is plugin and plugins.using_dynamic_plugins()
    with pytest.raises(NotImplementedError, match=r"register_plugin\('TT', ...\): devices come from JAX here"):
        plugins.register_plugin("TT", plugin)
    with pytest.raises(NotImplementedError, match=r"DevicePlugin has no library_path\(\)"):
        plugin.library_path()
    with pytest.raises(NotImplementedError, match="has no configure_single_process"):
        plugin.configure_single_process()
    plugins.register_installed_plugins()
