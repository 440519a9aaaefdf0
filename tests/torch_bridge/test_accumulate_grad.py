"""Gradients that are added to `.grad` without autograd: only where autograd would do nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from torch_bridge.replay import accumulate_grad


def leaf() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(2, 3, device="xla"))


def test_first_gradients_are_taken_and_later_ones_added() -> None:
    a, b = leaf(), leaf()
    b.grad = before = torch.ones(2, 3, device="xla")
    assert accumulate_grad.add([a, b], [torch.full((2, 3), 2.0, device="xla"), torch.full((2, 3), 3.0, device="xla")])
    assert a.grad is not None and a.grad.tolist() == [[2.0] * 3] * 2
    assert b.grad is before and before.tolist() == [[4.0] * 3] * 2


def hook(p: torch.nn.Parameter) -> None:
    p.register_hook(lambda grad: grad * 2)


def hook_after(p: torch.nn.Parameter) -> None:
    p.register_post_accumulate_grad_hook(lambda p: None)


@pytest.mark.parametrize("prepare", [hook, hook_after])
def test_hooks_need_autograd(prepare: Callable[[torch.nn.Parameter], None]) -> None:
    p = leaf()
    prepare(p)
    assert not accumulate_grad.add([p], [torch.ones(2, 3, device="xla")]) and p.grad is None


def test_gradients_that_share_memory_need_autograd() -> None:
    a, b, g = leaf(), leaf(), torch.ones(2, 3, device="xla")
    assert not accumulate_grad.add([a, b], [g, g.detach()]) and a.grad is None
    a.grad = g
    assert not accumulate_grad.add([a], [g]) and g.tolist() == [[1.0] * 3] * 2


def test_gradients_in_another_order_need_autograd() -> None:
    p = leaf()
    assert not accumulate_grad.add([p], [torch.ones(3, 2, device="xla").t()]) and p.grad is None
