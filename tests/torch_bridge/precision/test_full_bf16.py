"""The guide's "BF16 in GPU-compatible mode": a bfloat16 model with float32 copies of its weights in the optimizer, rounded to nearest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_bridge.runtime import executor


class SGDWithFP32Copies(torch.optim.SGD):
    """SGD that updates float32 copies of the weights and writes them back in bfloat16."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, lr)
        # keep a copy of weights in highprec
        self.param_groups_highprec = []
        for group in self.param_groups:
            params = group["params"]
            param_groups_highprec = [p.data.float() for p in params]
            self.param_groups_highprec.append({"params": param_groups_highprec})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, copies in zip(self.param_groups, self.param_groups_highprec, strict=True):
            for p, copy in zip(group["params"], copies["params"], strict=True):
                assert p.grad is not None
                grad = p.grad.data.float()
                copy.add_(grad, alpha=-group["lr"])
                p.data.copy_(copy)


def train(make: Callable[..., torch.optim.Optimizer], steps: int = 300) -> tuple[float, float, torch.optim.Optimizer]:
    """First and last loss of a bfloat16 model with steps too small for bfloat16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(64, 8)
    y = (x[:, :1] * x[:, 1:2]).to("xla")
    model.to(torch.bfloat16).to("xla")
    x = x.to("xla", torch.bfloat16)
    optimizer = make(model.parameters(), lr=2e-4)
    losses = []
    for _ in range(steps):
        loss = (model(x).float() - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        executor.sync()
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    return losses[0].item(), losses[-1].item(), optimizer


def test_float32_copies_keep_what_bfloat16_weights_lose() -> None:
    start, plain, _ = train(torch.optim.SGD)
    _, kept, optimizer = train(SGDWithFP32Copies)
    assert start - plain < 0.35 * (start - kept)
    copies = optimizer.param_groups_highprec[0]["params"]  # type: ignore[attr-defined]
    for p, copy in zip(optimizer.param_groups[0]["params"], copies, strict=True):
        assert copy.dtype == torch.float32
        assert torch.equal(copy.bfloat16().cpu(), p.detach().cpu())
        assert not torch.equal(copy.cpu(), p.detach().float().cpu())
