"""What XLA makes of annotated programs."""

from __future__ import annotations

import re

import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from torch import nn

from torch_bridge.runtime.session import STATE


def hlo() -> str:
    """The program that ran last, as XLA compiled it."""
    return str(STATE.session.recent[-1].compiled.as_text())


def test_a_weight_is_gathered_once(mesh: xs.Mesh) -> None:
    """By the products of forward and backward pass together, with a bias (addmm) and without (mm); a transpose that has a use of its own is still there."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8, bias=False), nn.Linear(8, 4))
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8, bias=False), nn.Linear(8, 4))
    model.load_state_dict(reference.state_dict())
    model.to("xla")
    for layer in model:
        xs.mark_sharding(layer.weight, mesh, (("data", "model"), None) if layer.weight.shape[0] > 4 else (None, ("data", "model")))  # type: ignore[arg-type, union-attr]
    torch_xla.sync()
    x = torch.randn(64, 16)
    there = x.to("xla").requires_grad_()
    xs.mark_sharding(there, mesh, (("data", "model"), None))
    results = []
    for m, given in ((reference, x.requires_grad_()), (model, there)):
        out = m(given)
        turned = m[0].weight.t()  # type: ignore[operator]
        (out.square().sum() + (turned * 2).sum() + (turned @ m[0].weight).sum()).backward()
        results.append([given.grad, *(p.grad for p in m.parameters())])
    torch_xla.sync()
    gathered = re.findall(r"= (\S+?)\{\S* all-gather\(", hlo())
    assert sorted(gathered)[:3] == ["f32[32,16]", "f32[4,8]", "f32[8,32]"] and len(gathered) == 3
    for here, value in zip(*results, strict=True):
        assert here is not None and value is not None
        assert torch.allclose(value.cpu(), here, rtol=1e-4, atol=1e-4)


def test_gradients_of_weights_transpose_first(mesh: xs.Mesh) -> None:
    """On CPUs no product reads its first operand down its columns."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8, bias=False))
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8, bias=False))
    model.load_state_dict(reference.state_dict())
    model.to("xla")
    for layer in (model[0], model[2]):
        xs.mark_sharding(layer.weight, mesh, (("data", "model"), None))  # type: ignore[arg-type]
    x = torch.randn(64, 16)
    reference(x).square().sum().backward()
    model(x.to("xla")).square().sum().backward()
    torch_xla.sync()
    products = re.findall(r" dot\(.*?lhs_contracting_dims=\{(\d)\}", hlo())
    assert products and "0" not in products
    for here, value in zip(reference.parameters(), model.parameters(), strict=True):
        assert here.grad is not None and value.grad is not None
        assert torch.allclose(value.grad.cpu(), here.grad, rtol=1e-4, atol=1e-4)
