"""`amp`, `utils.checkpoint` and `debug.profiler` of the facade."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
import torch_xla
import torch_xla.debug.profiler as xp
from torch import nn
from torch_xla.amp import GradScaler, autocast, syncfree
from torch_xla.distributed.parallel_loader import MpDeviceLoader
from torch_xla.utils.checkpoint import checkpoint

from torch_bridge import metrics

pytestmark = pytest.mark.usefixtures("clean_step")


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


OPTIMIZERS = [
    (syncfree.Adam, torch.optim.Adam, {"lr": 0.01}),
    (syncfree.AdamW, torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    (syncfree.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (syncfree.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.5, "dampening": 0.5, "weight_decay": 0.1}),
]


@pytest.mark.core(keep=1)
@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(("ours", "torchs", "options"), OPTIMIZERS)
def test_syncfree_optimizers(ours: Any, torchs: Any, options: dict[str, Any]) -> None:
    """Steps that found_inf calls off leave no trace: as if they had not been taken."""
    reference, model = small_model(), small_model().to("xla")
    a, b = torchs(reference.parameters(), **options), ours(model.parameters(), **options)
    inputs = torch.randn(3, 4)
    device_inputs = inputs.to("xla")
    for skip in (True, False, False, True, False):
        b.zero_grad()
        model(device_inputs).pow(2).mean().backward()
        if skip:
            for p in model.parameters():
                p.grad.fill_(float("inf"))
        else:
            a.zero_grad()
            reference(inputs).pow(2).mean().backward()
            a.step()
        b.step(found_inf=torch.tensor(float(skip), device="xla"))
        torch_xla.sync()
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.detach().cpu(), p.detach(), rtol=1e-5, atol=1e-6)


def test_syncfree_without_found_inf_is_torchs() -> None:
    reference, model = small_model(), small_model().to("xla")
    a, b = torch.optim.AdamW(reference.parameters()), syncfree.AdamW(model.parameters())
    inputs = torch.ones(2, 4)
    reference(inputs).sum().backward()
    model(inputs.to("xla")).sum().backward()
    a.step()
    assert b.step(lambda: 3) == 3
    torch.testing.assert_close(model[0].weight.detach().cpu(), reference[0].weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [torch.optim.SGD, syncfree.AdamW])
def test_grad_scaler_never_cuts_the_graph(make: Any) -> None:
    model = small_model().to("xla")
    optimizer = make(model.parameters(), lr=0.01)
    scaler = GradScaler(init_scale=4.0, growth_interval=2)
    inputs = torch.ones(2, 4, device="xla")
    torch_xla.sync()
    scales, weights = [], []
    for overflow in (False, False, True, False):
        optimizer.zero_grad()
        factor = float("inf") if overflow else 1.0
        executions = metrics.EXECUTE_TIME.count
        scaler.scale(model(inputs).pow(2).mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert metrics.EXECUTE_TIME.count == executions
        torch_xla.sync()
        scales.append(scaler.get_scale())
        weights.append(model[0].weight.detach().cpu())
    assert scales == [4.0, 8.0, 4.0, 4.0]
    assert torch.equal(weights[1], weights[2]) and not torch.equal(weights[0], weights[1]) and weights[3].isfinite().all()


def test_autocast_picks_the_device() -> None:
    x = torch.ones(2, 2, device="xla")
    with autocast(torch.device("xla"), dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("xla")
        assert torch.get_autocast_dtype("xla") == torch.bfloat16
    with autocast("xla", enabled=False):
        assert (x @ x).dtype == torch.float32


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.GELU(), nn.Linear(16, 4))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.body(x)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_gives_the_same_gradients(use_reentrant: bool) -> None:
    torch.manual_seed(1)
    plain = Dropped().to("xla")
    ours = copy.deepcopy(plain)
    x = torch.randn(8, 4).to("xla")
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.manual_seed(7)
    plain(a).pow(2).sum().backward()
    torch.manual_seed(7)
    y = checkpoint(ours, b, use_reentrant=use_reentrant)
    y.pow(2).sum().backward()
    assert (plain.calls, ours.calls) == (1, 2)
    torch.testing.assert_close(b.grad.cpu(), a.grad.cpu())
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad.cpu(), p.grad.cpu())


def test_checkpoint_recomputes_in_the_compiled_graph_too() -> None:
    """Without the barrier XLA merges the two forwards, and nothing is saved."""
    import torch_bridge

    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4)).to("xla")
    torch_xla.sync()

    def tanhs(run: Any) -> int:
        x = torch.ones(8, 4, device="xla", requires_grad=True)
        run(x).pow(2).sum().backward()
        text = torch_bridge.hlo([x.grad, *(p.grad for p in model.parameters())])
        model.zero_grad()
        assert ("optimization_barrier" in text) == (run is not model)
        return text.count("stablehlo.tanh")

    assert tanhs(model) == 1
    assert tanhs(lambda x: checkpoint(model, x)) == 2


def test_checkpoint_may_replace_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", checkpoint)
    layer = nn.Linear(2, 2).to("xla")
    x = torch.ones(1, 2, device="xla", requires_grad=True)
    for reentrant in (True, False):
        torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert layer.weight.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_checkpoint_errors() -> None:
    with pytest.raises(ValueError, match="Unexpected keyword arguments: mask"):
        checkpoint(lambda x: x, torch.ones(1), mask=None)


def test_checkpoint_passes_other_arguments() -> None:
    x = torch.ones(2, device="xla", requires_grad=True)
    out, label = checkpoint(lambda a, k, none: (a * k, "label"), x, 3, None, preserve_rng_state=False)
    out.sum().backward()
    assert label == "label" and x.grad.tolist() == [3.0, 3.0]


def test_profiler_traces(tmp_path: pathlib.Path) -> None:
    xp.start_trace(tmp_path)
    with xp.StepTrace("train", step_num=1), xp.Trace("inner"):
        x = torch.ones(2, device="xla") * 2
    assert not x._storage.pending
    xp.stop_trace()
    assert list(tmp_path.rglob("*.xplane.pb"))

    @xp.trace_me("named")
    def f(a: int) -> int:
        return a + 1

    assert f(1) == 2
    with pytest.raises(NotImplementedError, match=r"jax.collect_profile"):
        xp.trace("otherhost:9012", str(tmp_path))


def test_step_trace_and_loader_end_a_step_once() -> None:
    xp.set_tracer_marked_step(False)
    before = metrics.COUNTERS.get("MarkStep", 0)
    for i, _ in enumerate(MpDeviceLoader([torch.ones(1)] * 3, "xla")):
        with xp.StepTrace("step", step_num=i):
            pass
    assert metrics.COUNTERS["MarkStep"] - before == 4
    assert not xp.get_tracer_marked_step()
