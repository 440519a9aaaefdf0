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


def test_what_lies_alike_is_added_whole() -> None:
    """Also where the gradients of two leaves share memory, in turn, and where all lie transposed."""
    a, b, c = leaf(), leaf(), torch.nn.Parameter(torch.zeros(3, 2, device="xla").t())
    a.grad = torch.ones(2, 3, device="xla")
    b.grad = a.grad.detach()
    c.grad = torch.ones(3, 2, device="xla").t()
    rest = accumulate_grad.hand_over(
        [a, b, c], [torch.ones(2, 3, device="xla"), torch.ones(2, 3, device="xla"), torch.ones(3, 2, device="xla").t()]
    )
    assert rest[0] is None and rest[1] is not None and rest[2] is None
    assert a.grad.tolist() == c.grad.tolist() == [[2.0] * 3] * 2 and c.grad.stride() == (1, 2)


@pytest.mark.parametrize(
    "old",
    [
        lambda: torch.ones(3, 2, device="xla").t(),
        lambda: torch.ones(4, 3, device="xla")[:2],
        lambda: torch.ones(2, 1, device="xla").expand(2, 3),
        lambda: torch.ones(2, 3, device="xla", requires_grad=True),
    ],
    ids=["in another order", "a part", "expanded", "in a graph"],
)
def test_gradients_of_another_kind_are_left_to_autograd(old: Callable[[], torch.Tensor]) -> None:
    p, g = leaf(), torch.ones(2, 3, device="xla")
    p.grad = old()
    assert accumulate_grad.hand_over([p], [g]) == [g] and p.grad.tolist() == [[1.0] * 3] * 2


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
