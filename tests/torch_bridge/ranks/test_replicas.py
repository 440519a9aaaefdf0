"""A shared parameter whose update differs among ranks is reported, once, by name; right scripts are left in peace."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm

from tests.torch_bridge.ranks import eager
from tests.torch_bridge.ranks.conftest import Hosted
from tests.torch_bridge.ranks.test_steps import DP, TP, Copy, Reduce
from torch_bridge.mesh import world
from torch_bridge.passes import check_replicas
from torch_bridge.recorder import sharded
from torch_bridge.runtime import executor


@pytest.fixture(autouse=True)
def four_ranks(hosted: Hosted) -> Iterator[None]:
    hosted(4, dp=2, tp=2)
    check_replicas._reported.clear()
    executor.clear_cache()
    yield
    check_replicas._reported.clear()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


def batch(*axes: str) -> torch.Tensor:
    places = [world.coordinates(a) for a in axes]
    return sharded.from_ranks(
        lambda r: torch.randn(2, 3, generator=torch.Generator().manual_seed(sum(3**k * p[r] for k, p in enumerate(places)))), axes
    )


def train(model: torch.nn.Module, x: torch.Tensor, reduce: Any = None, steps: int = 1, kind: Any = torch.optim.SGD) -> None:
    optimizer = kind(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        if reduce is not None:
            reduce(optimizer)
        optimizer.step()
        xm.mark_step()


def reports(run: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
        executor.sync()
    return [str(w.message) for w in found if w.category is UserWarning]


def test_a_missing_reduction_over_dp_names_the_parameters() -> None:
    found = reports(lambda: train(Net().to("xla"), batch("dp"), steps=3))
    assert sorted(m.split("'")[1] for m in found) == ["block.0.bias", "block.0.weight", "block.1.bias", "block.1.weight"]
    for message in found:
        assert (
            "shared by 2 dp ranks, but its update differs among them, so its copies drift apart: a gradient was not reduced over dp"
            in message
        )
        assert "xm.optimizer_step" in message and "NXD_JAX_STRICT_REPLICAS=1" in message


def test_a_missing_reduction_over_tp() -> None:
    found = reports(lambda: train(Net().to("xla"), batch("dp", "tp"), lambda o: xm.reduce_gradients(o, groups=DP)))
    assert len(found) == 4 and all("shared by 2 tp ranks" in m and "all-reduce over the tensor-parallel group" in m for m in found)


def test_a_model_of_an_earlier_layout_says_so() -> None:
    model = Net().to("xla")
    world.set_axes({"dp": 1, "tp": 4})
    try:
        found = reports(lambda: train(model, batch("tp")))
    finally:
        world.set_axes({"dp": 2, "tp": 2})
    assert len(found) == 4
    for message in found:
        assert "shared by 4 tp ranks" in message and "were laid out otherwise (dp 2 x tp 2) when it was made" in message
        assert "may drift apart" in message and "initialize_model_parallel with those sizes" in message and "was not reduced" not in message
    check_replicas._reported.clear()
    assert all("was not reduced over dp" in message for message in reports(lambda: train(model, batch("dp"))))  # back in its own


def test_a_missing_reduction_over_both() -> None:
    found = reports(lambda: train(Net().to("xla"), batch("dp", "tp")))
    assert "shared by 2 dp ranks, 2 tp ranks" in found[0] and "not reduced over dp and tp" in found[0]


def test_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_STRICT_REPLICAS", "1")
    model = Net().to("xla")
    before = [p.detach().cpu() for p in model.parameters()]
    with pytest.raises(check_replicas.ReplicaDriftError, match="parameter 'block.0.weight' is shared by 2 dp ranks"):
        train(model, batch("dp"))
    for p, value in zip(model.parameters(), before, strict=True):
        eager.same(p, value)
    train(model, batch("dp"), lambda o: xm.reduce_gradients(o))


@pytest.mark.core(keep=1)
@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    "kind",
    [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)],
    ids=["sgd", "adamw", "adagrad", "momentum"],
)
def test_right_scripts(kind: Any) -> None:
    for axes, groups in ((("dp",), None), (("dp",), DP), ((), None), (("dp", "tp"), None), (("tp",), TP)):
        assert not reports(
            lambda axes=axes, groups=groups: train(Net().to("xla"), batch(*axes), lambda o: xm.reduce_gradients(o, groups=groups), 3, kind)
        )


def test_a_sharded_layer() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Parameter(sharded.from_ranks(lambda r: torch.full((2, 3), r % 2 + 0.5), ("tp",)))
            self.declared = torch.nn.Parameter(torch.ones(2, device="xla"))
            sharded.expect(self.declared, ("tp",))
            self.bias = torch.nn.Parameter(torch.zeros(2, device="xla"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Reduce.apply(Copy.apply(x) @ self.up.t() * self.declared) + self.bias

    assert not reports(lambda: train(Layer(), batch("dp"), lambda o: xm.reduce_gradients(o, groups=DP), 3, torch.optim.AdamW))
    found = reports(lambda: train(Layer(), batch("dp"), steps=2))
    assert sorted(m.split("'")[1].split(".")[-1] for m in found) == ["bias", "declared", "up"] and all("2 dp ranks" in m for m in found)


def test_accumulated_gradients_before_the_reduction() -> None:
    def run(set_to_none: bool) -> None:
        model = Net().to("xla")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            for _ in range(2):
                model(batch("dp")).square().sum().backward()
                xm.mark_step()
            xm.optimizer_step(optimizer)
            optimizer.zero_grad(set_to_none=set_to_none)
            xm.mark_step()

    assert not reports(lambda: run(True)) and not reports(lambda: run(False))


def test_clipping_loss_scaling_and_averaging() -> None:
    def run() -> None:
        model = Net().to("xla")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = torch.optim.swa_utils.AveragedModel(model)
        for _ in range(3):
            (model(batch("dp")).square().sum() * 1024).backward()
            xm.reduce_gradients(optimizer)
            for p in model.parameters():
                assert p.grad is not None
                p.grad.div_(1024)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            xm.mark_step()

    assert not reports(run)


def test_loading_and_initialising_are_no_updates() -> None:
    def run() -> None:
        model = Net().to("xla")
        model.load_state_dict(Net().state_dict())
        with torch.no_grad():
            for p in model.parameters():
                p.normal_()
        xm.broadcast_master_param(model)
        train(model, batch("dp"), lambda o: xm.reduce_gradients(o))

    assert not reports(run)


def test_a_parameter_without_a_module_has_no_name() -> None:
    w = torch.nn.Parameter(torch.ones(3, device="xla"))

    def run() -> None:
        optimizer = torch.optim.SGD([w], lr=0.1)
        (w * batch("dp")).sum().backward()
        optimizer.step()

    assert reports(run) == []
    assert sharded.varying(w).axes == ("dp",)


def test_tied_and_frozen_parameters() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(3, 3, bias=False)
            self.second = torch.nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight
            self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.frozen(self.second(self.first(x)))

    found = reports(lambda: train(Tied().to("xla"), batch("dp")))
    assert len(found) == 1 and ".weight'" in found[0]


def test_buffers_may_differ() -> None:
    """Batch-norm statistics are each rank's own, as on real workers."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).to("xla")
    assert not reports(lambda: train(model, batch("dp"), lambda o: xm.reduce_gradients(o), 2))
