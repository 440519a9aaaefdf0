"""`torch.cond`, `while_loop`, `scan` and `map` of xla tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_xla.debug.metrics as met
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch_xla.experimental.fori_loop import fori_loop

import torch_bridge
from tests.torch_bridge.devices import same

torch_bridge.register()


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_loops(device: str) -> None:
    start = (torch.tensor(3, device=device), {"x": torch.ones(2, device=device)})
    found = while_loop(lambda k, of: k > 0, lambda k, of: (k - 1, {"x": of["x"] * 2}), start)
    assert found[0].item() == 0 and found[1]["x"].tolist() == [8.0, 8.0] and found[1]["x"].device.type == device


def test_a_counter_is_not_read() -> None:
    """The host knows it: the loop is part of one program. A value of the device is read in every pass."""
    met.clear_all()
    start = (torch.tensor(3, device="xla"), torch.zeros(2, device="xla"))
    counted = while_loop(lambda k, x: k > 0, lambda k, x: (k - 1, x + 1), start)
    assert counted[1].tolist() == [3.0, 3.0] and met.metric_data("ExecuteTime")[0] == 1
    grown = while_loop(lambda k, x: x.sum() < 5, lambda k, x: (k - 1, x + 1), start)
    assert grown[1].tolist() == [3.0, 3.0] and met.metric_data("ExecuteTime")[0] > 3


def test_branches_with_gradients() -> None:
    x = torch.ones(2, device="xla", requires_grad=True)
    y = torch.cond(x.sum() > 1, lambda x: x * 3, lambda x: x - 1, (x,))
    y.sum().backward()
    assert y.tolist() == [3.0, 3.0] and x.grad is not None and x.grad.tolist() == [3.0, 3.0]
    assert torch.cond(x.sum() > 9, lambda x: x * 3, lambda x: x - 1, (x,)).tolist() == [0.0, 0.0]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf", "ignore:.*torch.jit.script.* is deprecated")
def test_scans_with_gradients() -> None:
    """Also of what the function only names, along another dim and backwards, nested."""

    def run(device: str) -> Any:
        start, w = torch.ones(3, device=device, requires_grad=True), torch.full((3,), 0.5, device=device, requires_grad=True)
        xs = torch.arange(15.0, device=device).reshape(3, 5).requires_grad_()

        def step(carry: Any, x: Any) -> Any:
            carry = {"sum": carry["sum"] * w + x[0]}
            return carry, (carry["sum"] * x[0], x[0] - 1)

        last, ys = scan(step, {"sum": start}, (xs,), dim=1, reverse=True)
        (last["sum"].sum() + ys[0].square().sum()).backward()
        return last, ys, start.grad, xs.grad, w.grad

    same(run)


def test_maps() -> None:
    x = torch.arange(1.0, 13.0, device="xla").reshape(4, 3).requires_grad_()
    mapped = map_rows(
        lambda row, by, more: {"y": row[0] * by["b"] + more}, (x,), {"b": torch.tensor(2.0, device="xla")}, torch.ones(3, device="xla")
    )
    mapped["y"].sum().backward()
    assert torch.equal(mapped["y"].cpu(), x.detach().cpu() * 2 + 1) and x.grad is not None and x.grad.unique().tolist() == [2.0]


def test_a_scan_of_another_carry() -> None:
    with pytest.raises(RuntimeError, match=r"combine_fn must return a carry like .*float32\[2\], and returned torch.float32\[1\]"):
        scan(lambda carry, x: (carry[:1] * 2, x + 1), torch.ones(2, device="xla"), torch.ones(3, 2, device="xla"))


def test_errors() -> None:
    with pytest.raises(
        RuntimeError, match=r"body_fn must return tensors like .*float32\[2\], and returned torch.int64\[\], torch.float32\[1\]"
    ):
        while_loop(lambda k, x: k > 0, lambda k, x: (k - 1, x[:1]), (torch.tensor(3, device="xla"), torch.zeros(2, device="xla")))
    with pytest.raises(NotImplementedError, match="Write a Python loop, .*while_loop"):
        fori_loop(10, 0, lambda x: x)
