"""The load-balancing loss against a loop over tokens, transformers' function, and its own limits."""

from __future__ import annotations

import pytest
import torch

from nxd_jax.modules.moe.loss_function import load_balancing_loss_func
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.parallel_layers.parts import own, per_rank

LAYERS, T, E = 3, 64, 8


def logits(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(LAYERS * T, E, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_hand(x: torch.Tensor, k: int) -> float:
    """The share of choices that went to each expert, times its mean probability, times the experts."""
    choices, probability = [0] * E, [0.0] * E
    for row in x.double():
        weights = row.exp() / row.exp().sum()
        for e in sorted(range(E), key=lambda e: -row[e])[:k]:
            choices[e] += 1
        for e in range(E):
            probability[e] += float(weights[e]) / len(x)
    return E * sum(c / (k * len(x)) * p for c, p in zip(choices, probability, strict=True))


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 2, 8])
def test_values(k: int, dtype: torch.dtype, device: str) -> None:
    x = logits(dtype)
    if dtype == torch.bfloat16:
        x = (torch.rand(LAYERS * T, E).argsort(-1) / 4).to(dtype)  # no two are equal, so that there is one choice
    found = load_balancing_loss_func(x.to(device), E, k)
    assert found.dtype == torch.float32 and found.shape == ()
    assert found.item() == pytest.approx(by_hand(x, k), rel=1e-5)


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_k_times_it_is_what_transformers_computes(k: int, device: str) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as theirs

    mine, their = logits().to(device).requires_grad_(), logits().requires_grad_()
    found = load_balancing_loss_func(mine, E, k)
    expected = theirs(tuple(their.split(T)), E, k)
    assert isinstance(expected, torch.Tensor) and mine.grad is None
    torch.testing.assert_close(found.detach().cpu() * k, expected.detach(), rtol=1e-5, atol=0)
    (found * k).backward()
    expected.backward()
    assert mine.grad is not None and their.grad is not None and bool(their.grad.abs().max() > 0)
    torch.testing.assert_close(mine.grad.cpu(), their.grad, rtol=1e-4, atol=1e-8)


def test_limits() -> None:
    even = torch.eye(E).repeat(4, 1) * 50  # each token sure of one expert, all experts equally often
    assert load_balancing_loss_func(even, E, 1).item() == pytest.approx(1.0)
    assert load_balancing_loss_func(torch.zeros(16, E), E, E).item() == pytest.approx(1.0)
    crowd = torch.eye(E)[0].repeat(16, 1) * 50
    assert load_balancing_loss_func(crowd, E, 1).item() == pytest.approx(E)
    assert load_balancing_loss_func(torch.full((4, E), torch.nan), E, 2).isnan()
    layers = logits().reshape(LAYERS, T, E)
    torch.testing.assert_close(load_balancing_loss_func(layers, E, 2), load_balancing_loss_func(logits(), E, 2))


def test_each_rank_its_own_tokens(nxd: Nxd) -> None:
    nxd(4, tp=2)
    values = [logits(seed=r) for r in range(4)]
    found = per_rank(load_balancing_loss_func(own(values), E, 2))
    assert [f.item() for f in found] == pytest.approx([by_hand(v, 2) for v in values], rel=1e-5)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"router_logits has shape \(192, 8\): its last dim must be num_experts=4"):
        load_balancing_loss_func(logits(), 4, 2)
    for k in (0, 9):
        with pytest.raises(ValueError, match=rf"top_k={k} must be in 1\.\.8"):
            load_balancing_loss_func(logits(), E, k)
