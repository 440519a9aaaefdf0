"""`torch.cond` and `while_loop` of xla tensors."""

from __future__ import annotations

import pytest
import torch
import torch_xla.debug.metrics as met
from torch._higher_order_ops.while_loop import while_loop
from torch_xla.experimental.fori_loop import fori_loop

import torch_bridge

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


def test_errors() -> None:
    with pytest.raises(
        RuntimeError, match=r"body_fn must return tensors like .*float32\[2\], and returned torch.int64\[\], torch.float32\[1\]"
    ):
        while_loop(lambda k, x: k > 0, lambda k, x: (k - 1, x[:1]), (torch.tensor(3, device="xla"), torch.zeros(2, device="xla")))
    with pytest.raises(NotImplementedError, match="Write a Python loop, .*while_loop"):
        fori_loop(10, 0, lambda x: x)
