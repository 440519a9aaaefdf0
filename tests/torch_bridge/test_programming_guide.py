"""The snippets of Neuron's *Developer Guide for Training with PyTorch NeuronX*, one test each, in the guide's order.

`GUIDE[...]` holds each snippet as the guide prints it, but for spaces at line ends (`exec` runs it); around it stands only what the guide takes for
granted: a model, a loader, an optimizer. Each test asserts what the snippet is for, with eager torch's numbers where there are any.
"""

from __future__ import annotations

import copy
import os
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.utils.serialization as xser
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from torch_bridge import metrics
from torch_bridge.export import hlo_text
from torch_bridge.mesh import rank_numbers, world
from torch_bridge.precision import precision_mode, stochastic_rounding
from torch_bridge.recorder import sharded
from torch_bridge.runtime import executor

pytestmark = pytest.mark.usefixtures("clean_step", "environment")

GUIDE = {
    "device": """
        import torch_xla.core.xla_model as xm
        device = xm.xla_device()
        # or
        device = 'xla'
    """,
    "to the device": """
        model.to(device)
        tensor.to(device)
    """,
    "end of step": """
        xm.mark_step()
    """,
    "disable": """
        device = 'cpu'
        if not os.environ.get("DISABLE_XLA", None):
            device = 'xla'
    """,
    "disable, end of step": """
        # end of training step
        if not os.environ.get("DISABLE_XLA", None):
            xm.mark_step()
    """,
    "imports": """
        import torch_xla.distributed.parallel_loader as pl
        import torch_xla.distributed.xla_backend
        torch.distributed.init_process_group('xla')
    """,
    "loader": """
        parallel_loader = pl.MpDeviceLoader(dataloader, device)
    """,
    "optimizer step": """
        xm.optimizer_step(optimizer)
    """,
    "stochastic rounding": """
        os.environ["NEURON_RT_STOCHASTIC_ROUNDING_EN"] = "1"

        # model is created
        model.to(torch.bfloat16)
    """,
    "float32 loss": """
        running_loss = torch.zeros(1, dtype=torch.float).to(device)
    """,
    "float32 gradient": """
        grad = p.grad.data.float()
    """,
    "bfloat16 model": """
        # model is created
        model.to(torch.bfloat16)
    """,
    "copies of the weights": """
        # keep a copy of weights in highprec
        self.param_groups_highprec = []
        for group in self.param_groups:
            params = group['params']
            param_groups_highprec = [p.data.float() for p in params]
            self.param_groups_highprec.append({'params': param_groups_highprec})
    """,
    "no auto-cast": """
        os.environ["NEURON_CC_FLAGS"] = "--auto-cast=none"
    """,
    "training": """
        def train_loop_fn(train_loader):
            for i, data in enumerate(train_loader):
                inputs = data[0]
                labels = data[3]
                outputs = model(inputs, labels=labels)
                loss = outputs.loss/ flags.grad_acc_steps
                loss.backward()
                optimizer.step()
                xm.mark_step()
    """,
    "training with autocast": """
        os.environ["NEURON_CC_FLAGS"] = "--auto-cast=none"

        def train_loop_fn(train_loader):
            for i, data in enumerate(train_loader):
                torch.cuda.is_bf16_supported = lambda: True
                with torch.autocast(dtype=torch.bfloat16, device_type='xla'):
                    inputs = data[0]
                    labels = data[3]
                    outputs = model(inputs, labels=labels)
                loss = outputs.loss/ flags.grad_acc_steps
                loss.backward()
                optimizer.step()
                xm.mark_step()
    """,
}  # fmt: skip


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No precision variables before the test; what snippets do to `os.environ` and `torch.cuda` is undone after it."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", torch.cuda.is_bf16_supported)
    saved = dict(os.environ)
    for name in ("DISABLE_XLA", *precision_mode.VARIABLE_NAMES):
        os.environ.pop(name, None)
    stochastic_rounding.restart()
    yield
    executor.sync()
    os.environ.clear()
    os.environ.update(saved)


def run(snippet: str, **given: Any) -> dict[str, Any]:
    """Execute a snippet of the guide with these names; the names there are afterwards."""
    names: dict[str, Any] = {"torch": torch, "os": os, "xm": xm, "pl": pl, **given}
    exec(compile(textwrap.dedent(GUIDE[snippet]), f"<guide: {snippet}>", "exec"), names)
    return names


class Classifier(nn.Module):
    """A model as the guide's loops call it: it takes labels and gives an object with a loss. Notes the dtypes that it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 3)
        self.dtypes: list[torch.dtype] = []

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> types.SimpleNamespace:
        hidden = torch.tanh(self.up(inputs))
        logits = self.down(hidden)
        loss = nn.functional.cross_entropy(logits, labels)
        self.dtypes = [hidden.dtype, logits.dtype, loss.dtype]
        return types.SimpleNamespace(loss=loss, logits=logits)


def batches(count: int = 4) -> list[list[torch.Tensor]]:
    """Batches of the guide's shape: the inputs are entry 0, the labels entry 3."""
    rng = torch.Generator().manual_seed(1)
    inputs = [torch.randn(8, 6, generator=rng) for _ in range(count)]
    return [[x, torch.ones(8), torch.zeros(8), x[:, :3].argmax(1)] for x in inputs]


FLAGS = types.SimpleNamespace(grad_acc_steps=2)


def trained(train_loop: Callable[[Any], None], model: nn.Module) -> list[torch.Tensor]:
    """The weights after a guide's loop over the batches, loaded as the guide loads them."""
    train_loop(pl.MpDeviceLoader(batches(), "xla"))
    return [p.detach().cpu() for p in model.parameters()]


def expected_weights(model: nn.Module, cast: Callable[[], Any]) -> list[torch.Tensor]:
    """The same loop in eager torch, its forward pass inside `cast()`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for data in batches():
        with cast():
            loss = model(data[0], labels=data[3]).loss / FLAGS.grad_acc_steps
        loss.backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


# -- the device ------------------------------------------------------------------------------------


def test_neuron_xla_device() -> None:
    model, tensor = nn.Linear(2, 2), torch.arange(4.0).reshape(2, 2)
    names = run("device")
    assert names["device"] == "xla" and names["xm"].xla_device() == torch.device("xla:0")
    run("to the device", model=model, tensor=tensor, device=names["device"])
    assert model.weight.device.type == "xla" and tensor.device.type == "cpu"
    for back in (tensor.to("xla").cpu(), tensor.to("xla").to("cpu")):
        assert back.device.type == "cpu" and torch.equal(back, tensor)


def test_mark_step_compiles_and_runs_the_step() -> None:
    x = torch.ones(3).to("xla") * 2
    assert x._storage.pending  # type: ignore[attr-defined]
    run("end of step")
    assert not x._storage.pending and x.tolist() == [2, 2, 2]  # type: ignore[attr-defined]


@pytest.mark.parametrize("disabled", [False, True])
def test_disable_xla_runs_the_script_in_plain_torch(disabled: bool) -> None:
    if disabled:
        os.environ["DISABLE_XLA"] = "1"
    device = run("disable")["device"]
    assert device == ("cpu" if disabled else "xla")
    torch.manual_seed(0)
    model, reference = Classifier().to(device), Classifier()
    reference.load_state_dict({name: t.cpu() for name, t in model.state_dict().items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = metrics.EXECUTE_TIME.count
    for data in batches():
        loss = model(data[0].to(device), labels=data[3].to(device)).loss / FLAGS.grad_acc_steps
        loss.backward()
        optimizer.step()
        run("disable, end of step")
    assert (metrics.EXECUTE_TIME.count == before) == disabled
    for got, want in zip(model.parameters(), expected_weights(reference, torch.enable_grad), strict=True):
        torch.testing.assert_close(got.detach().cpu(), want, rtol=0 if disabled else 1e-5, atol=0 if disabled else 1e-6)


# -- several workers -------------------------------------------------------------------------------


def test_data_parallel_training() -> None:
    """Four workers, each with its part of the data: the weights of one worker with all of it, and the same on every rank."""
    x, y = torch.randn(32, 6), torch.randint(0, 3, (32,))
    model = Classifier()
    reference = copy.deepcopy(model)
    world.configure(world.World(4))
    try:
        names = run("imports", torch=torch)
        device = run("device")["device"]
        assert xm.xrt_world_size() == 4 and rank_numbers.per_rank(xm.get_ordinal()) == [0, 1, 2, 3]
        data = TensorDataset(x, y)
        sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=xm.xrt_world_size(), rank=xm.get_ordinal(), shuffle=False)
        dataloader = DataLoader(data, batch_size=4, sampler=sampler)
        parallel_loader = run("loader", dataloader=dataloader, device=device, pl=names["pl"])["parallel_loader"]
        model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, labels in parallel_loader:
            optimizer.zero_grad()
            model(inputs, labels=labels).loss.backward()
            run("optimizer step", optimizer=optimizer)
        got = [p.detach().cpu() for p in model.parameters()]
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        world.configure(None)
    own = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(2):  # DistributedSampler gives rank r the rows r, r + 4, ...: a step takes 16 rows in order
        own.zero_grad()
        rows = slice(16 * step, 16 * step + 16)
        reference(x[rows], labels=y[rows]).loss.backward()
        own.step()
    for mine, want in zip(got, reference.parameters(), strict=True):
        torch.testing.assert_close(mine, want.detach(), rtol=1e-5, atol=1e-6)


# -- bfloat16 --------------------------------------------------------------------------------------


class Sgd(torch.optim.Optimizer):
    """SGD that converts the gradients to float32 before it uses them, as the guide says."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                grad = run("float32 gradient", p=p)["grad"]
                assert grad.dtype == torch.float32
                p.data.copy_(p.data.float() - group["lr"] * grad)


def follow(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 120) -> tuple[float, float]:
    """First and last running loss of a regression whose updates are small; the loss is kept in float32 as the guide says."""
    device = "xla"
    torch.manual_seed(3)
    x = torch.randn(64, 8)
    y = (x[:, :1] * 2).to(device)
    x = x.to(device, next(model.parameters()).dtype)
    found = []
    for _ in range(steps):
        running_loss = run("float32 loss", device=device)["running_loss"]
        loss = (model(x).float() - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        running_loss += loss.detach()
        assert running_loss.dtype == torch.float
        xm.mark_step()
        found.append(running_loss)
    return found[0].item(), found[-1].item()


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def test_full_bf16_with_stochastic_rounding() -> None:
    """Without it most updates are lost; with it, the loss falls as float32's does."""
    full = small_model().to("xla")
    start, float32 = follow(full, Sgd(full.parameters(), lr=5e-4))
    nearest = small_model()
    run("bfloat16 model", model=nearest)
    nearest.to("xla")
    _, stalled = follow(nearest, Sgd(nearest.parameters(), lr=5e-4))
    model = small_model()
    run("stochastic rounding", model=model)
    model.to("xla")
    _, stochastic = follow(model, Sgd(model.parameters(), lr=5e-4))
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert start - stalled < 0.5 * (start - float32)
    assert abs(stochastic - float32) < 0.2 * (start - float32)


class AdamW_FP32ParamsCopy(torch.optim.AdamW):
    """AdamW on float32 copies of bfloat16 weights: the guide's snippet in its initializer, and the step that uses the copies."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, lr)
        run("copies of the weights", self=self)
        self.inner = torch.optim.AdamW([p for group in self.param_groups_highprec for p in group["params"]], lr)  # type: ignore[attr-defined]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, copies in zip(self.param_groups, self.param_groups_highprec, strict=True):  # type: ignore[attr-defined]
            for p, high in zip(group["params"], copies["params"], strict=True):
                high.grad = p.grad.data.float()
        self.inner.step()
        for group, copies in zip(self.param_groups, self.param_groups_highprec, strict=True):  # type: ignore[attr-defined]
            for p, high in zip(group["params"], copies["params"], strict=True):
                p.data.copy_(high)


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_bf16_with_float32_copies_of_the_weights(device: str) -> None:
    """The copies are float32 and exactly torch's AdamW of the bfloat16 gradients; the weights are their roundings to nearest."""
    model = small_model()
    run("bfloat16 model", model=model)
    model.to(device)
    optimizer = AdamW_FP32ParamsCopy(model.parameters(), lr=1e-4)
    shadow = [p.detach().cpu().float().requires_grad_() for p in model.parameters()]
    expected = torch.optim.AdamW(shadow, lr=1e-4)
    x = torch.randn(16, 8).bfloat16().to(device)
    for _ in range(5):
        model(x).float().square().mean().backward()
        for mine, p in zip(shadow, model.parameters(), strict=True):
            assert p.grad is not None and p.grad.dtype == torch.bfloat16
            mine.grad = p.grad.cpu().float()
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
    (group,) = optimizer.param_groups_highprec  # type: ignore[attr-defined]
    for p, high, want in zip(model.parameters(), group["params"], shadow, strict=True):
        assert (p.dtype, high.dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(high.detach().cpu(), want.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(p.detach().cpu(), high.detach().cpu().bfloat16())


# -- autocast --------------------------------------------------------------------------------------


def test_the_compiler_s_casts_are_switched_off() -> None:
    os.environ["NEURON_CC_FLAGS"] = "--auto-cast=matmult"
    assert precision_mode.current() != precision_mode.PLAIN
    run("no auto-cast")
    assert precision_mode.current() == precision_mode.PLAIN
    x = torch.rand(8, 8)
    torch.testing.assert_close((x.to("xla") @ x.to("xla")).cpu(), x @ x, rtol=1e-6, atol=1e-6)


def test_the_training_loop() -> None:
    model = Classifier()
    reference = copy.deepcopy(model)
    model.to("xla")
    names = run("training", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), flags=FLAGS)
    for got, want in zip(trained(names["train_loop_fn"], model), expected_weights(reference, torch.enable_grad), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert set(model.dtypes) == {torch.float32}


def test_the_training_loop_with_autocast() -> None:
    """Products in bfloat16, weights, their gradients and the loss in float32, as CPU autocast has them on this model."""
    model = Classifier()
    reference, exact = copy.deepcopy(model), copy.deepcopy(model)
    model.to("xla")
    names = run("training with autocast", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), flags=FLAGS)
    got = trained(names["train_loop_fn"], model)
    assert os.environ["NEURON_CC_FLAGS"] == "--auto-cast=none" and torch.cuda.is_bf16_supported()
    assert model.dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
    expected = expected_weights(reference, lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    assert reference.dtypes == model.dtypes
    full = expected_weights(exact, torch.enable_grad)
    for mine, want, other in zip(got, expected, full, strict=True):
        torch.testing.assert_close(mine, want, rtol=2e-2, atol=2e-3)
        torch.testing.assert_close(mine, other, rtol=5e-2, atol=5e-3)
        assert not torch.equal(mine, other)


# -- tips ------------------------------------------------------------------------------------------


def test_one_graph_for_each_iteration_and_a_closure_for_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    """`MpDeviceLoader` ends the step; printing through `add_step_closure` adds no execution, printing in the middle of a step one for each step."""

    def executions(show: Callable[[torch.Tensor], None]) -> tuple[int, int]:
        executor.clear_cache()
        model = Classifier().to("xla")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        xm.mark_step()
        before = metrics.EXECUTE_TIME.count, metrics.COUNTERS.get("UncachedCompile", 0)
        for data in pl.MpDeviceLoader(batches(6), "xla"):
            optimizer.zero_grad()
            loss = model(data[0], labels=data[3]).loss
            show(loss.detach())
            loss.backward()
            optimizer.step()
        return metrics.EXECUTE_TIME.count - before[0], metrics.COUNTERS["UncachedCompile"] - before[1]

    count, compiled = executions(lambda loss: xm.add_step_closure(lambda value: print(f"loss {value.item():.3f}"), args=(loss,)))  # noqa: T201
    assert capsys.readouterr().out.count("loss ") == 6
    assert count == 6 and compiled <= 2
    many, _ = executions(lambda loss: print(loss))  # noqa: T201
    assert capsys.readouterr().out.count("tensor(") == 6
    assert many == 2 * count


def test_batches_per_execution_delays_the_end_of_the_step() -> None:
    before = metrics.EXECUTE_TIME.count
    total = torch.zeros((), device="xla")
    for data in pl.MpDeviceLoader(batches(6), "xla", batches_per_execution=3):
        total = total + data[0].sum()
    assert metrics.EXECUTE_TIME.count - before == 2
    torch.testing.assert_close(total.item(), sum(b[0].sum().item() for b in batches(6)), rtol=1e-5, atol=1e-5)


def test_the_same_seed_gives_the_same_weights_on_every_worker() -> None:
    from transformers import set_seed

    world.configure(world.World(2))
    try:
        set_seed(5)
        model = nn.Linear(3, 3).to("xla")
        drawn = torch.rand(3, device="xla")
        for of_each_rank in (sharded.shards(model.weight.detach()), sharded.shards(drawn)):
            assert len(of_each_rank) == 2 and torch.equal(*of_each_rank)
        weight = sharded.shards(model.weight.detach())[0]
    finally:
        world.configure(None)
    set_seed(5)
    again = nn.Linear(3, 3)
    assert torch.equal(weight, again.weight.detach())


def test_checkpoints(tmp_path: Path) -> None:
    """`xm.save` writes CPU tensors that plain torch loads; `serialization.save` writes a file for each tensor and `serialization.load` reads them."""
    model = Classifier().to("xla")
    state = {name: t.cpu() for name, t in model.state_dict().items()}
    xm.save(model.state_dict(), str(tmp_path / "model.pt"))
    xser.save(model.state_dict(), str(tmp_path / "serial.pt"))
    for loaded in (torch.load(tmp_path / "model.pt", weights_only=True), xser.load(str(tmp_path / "serial.pt"))):
        assert all(t.device.type == "cpu" and torch.equal(t, state[name]) for name, t in loaded.items())
        Classifier().load_state_dict(loaded)


def test_the_autocast_region_alone() -> None:
    """`with torch.autocast(dtype=torch.bfloat16, device_type='xla')`: only what is inside is cast, and the product runs in bfloat16."""
    x, w = torch.rand(4, 4).to("xla"), torch.rand(4, 4).to("xla")
    with torch.autocast(dtype=torch.bfloat16, device_type="xla"):
        inside = x @ w
    outside = x @ w
    assert (inside.dtype, outside.dtype) == (torch.bfloat16, torch.float32)
    assert "bf16" in hlo_text.hlo(inside)
    torch.testing.assert_close(inside.cpu(), x.cpu().bfloat16() @ w.cpu().bfloat16())
