"""`torch_bridge.optimize`: modules that return views of the same elements, such as logits and their transpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.torch_bridge.replaying import Ruled, batch, compile_fast, descend, parity  # noqa: F401
from torch_bridge.replay import returned_views


def _trained(use: Callable[[Any], torch.Tensor]) -> Callable[[nn.Module, int], Any]:
    """A step with a loss of what the module returns."""

    def step(module: nn.Module, k: int) -> Any:
        x = batch(k, 2, 4, 6).requires_grad_()
        out = module(x)
        lies = [(tuple(t.shape), t.stride(), t.storage_offset(), t.requires_grad, t.is_leaf) for t in out]
        loss = use(out)
        module.zero_grad()
        loss.backward()
        descend(module)
        return [out[0].detach(), out[1].detach(), torch.tensor(hash(str(lies))), loss, x.grad]

    return step


def _write_first(out: Any) -> torch.Tensor:
    """A write into one of them changes the other, and its gradients."""
    out[0].mul_(3.0)
    return out[0].square().sum() + out[1].sin().sum()


def _write_second(out: Any) -> torch.Tensor:
    out[1].tanh_()
    return out[0].square().sum() + out[1].exp().sum()


USES: dict[str, Callable[[Any], torch.Tensor]] = {
    "both": lambda out: out[0].square().sum() + out[1].sin().sum(),
    "the first": lambda out: out[0].square().sum(),
    "the second": lambda out: out[1].square().sum(),
    "a write into the first": _write_first,
    "a write into the second": _write_second,
}
RETURNED: dict[str, Callable[[Any], Any]] = {
    "a transpose": lambda y: (z := y.sum(0), z.t()),
    "a transpose first": lambda y: (z := y.sum(0)) is not None and (z.t(), z),
    "the first token": lambda y: (y, y[:, 0]),
    "halves and their middle": lambda y: (y[:, :3], y[:, 2:]),
    "every other one, turned": lambda y: (y[:, ::2].transpose(1, 2), y[0]),
    "other shapes": lambda y: (y.view(8, 6), y.flatten()[3:20]),
    "expanded": lambda y: (y, y[:, :1].expand(2, 4, 6)),
    "itself twice under other names": lambda y: (y, y.view_as(y)),
    "with others between": lambda y: (y, y[1], y.exp(), y[0].t()),
}


@pytest.mark.core(keep=6)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("returned", RETURNED)
def test_views_of_the_same_elements(returned: str, use: str) -> None:
    if (returned, use) == ("expanded", "a write into the second"):
        pytest.skip("torch refuses it")
    parity(lambda: Ruled(lambda m, x, y: RETURNED[returned](y)), _trained(USES[use]), close=True)


def test_the_pass_of_another_kind() -> None:
    """A backward pass that no recording has computes the forward pass again, and gradients of gradients do."""

    def step(module: nn.Module, k: int) -> Any:
        out = module(batch(k, 2, 4, 6))
        loss = out[k % 2 if k > 3 else 0].square().sum()
        (grad,) = torch.autograd.grad(loss, [module.layer.weight], create_graph=k == 5)
        if k == 5:
            (grad,) = torch.autograd.grad(grad.sum(), [module.layer.weight])
        return [loss, grad]

    parity(lambda: Ruled(lambda m, x, y: (y, y[:, 0])), step, close=True)


@pytest.mark.parametrize(
    "rule",
    [
        lambda m, x, y: (y, y.detach()[:, 0]),
        lambda m, x, y: (y, y.view(torch.int32)[0]),
    ],
)
def test_views_that_autograd_does_not_follow(rule: Callable[..., Any]) -> None:
    """What shares elements otherwise is recorded op by op."""
    step = _trained(lambda out: out[0].square().sum())
    parity(lambda: Ruled(rule), step, played=False, off="views of the same elements", close=True)


def test_tensors_that_share_nothing_stay() -> None:
    x = torch.randn(4, 6, device="xla", requires_grad=True) * 2
    parts = [x[:2], x[2:], x.sin()]
    assert returned_views.arranged(parts) == (parts, None)
