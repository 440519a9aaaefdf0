"""Losses of preferences against formulas in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nxd_jax.training.models import preference_losses

CHOSEN, REJECTED = np.array([-0.3, -2.0, -40.0]), np.array([-0.9, -1.5, -0.01])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def test_dpo() -> None:
    before = np.array([[-1.0, -1.2], [-2.0, -3.0], [-30.0, -0.1]])
    wanted = -np.log(sigmoid(0.3 * ((CHOSEN - REJECTED) - (before[:, 0] - before[:, 1])))).mean()
    found = preference_losses.dpo_loss(*map(torch.tensor, (CHOSEN, REJECTED, before[:, 0], before[:, 1])), 0.3)
    assert float(found) == pytest.approx(wanted, rel=1e-12)


def test_orpo() -> None:
    odds = (CHOSEN - REJECTED) - (np.log(1 - np.exp(CHOSEN)) - np.log(1 - np.exp(REJECTED)))
    wanted = -CHOSEN.mean() - 0.2 * np.log(sigmoid(odds)).mean()
    found = preference_losses.orpo_loss(torch.tensor(CHOSEN), torch.tensor(REJECTED), 0.2)
    assert float(found) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("chosen", [0.0, -1e-9, -1e-3, -math.log(2), -50.0, -1e4])
def test_orpo_is_finite_at_the_ends(chosen: float) -> None:
    x = torch.tensor([chosen], requires_grad=True)
    loss = preference_losses.orpo_loss(x, torch.tensor([0.0]), 0.1)
    loss.backward()
    assert loss.isfinite() and x.grad is not None and x.grad.isfinite().all()


def test_log_one_minus_exp() -> None:
    x = -np.logspace(-5, 3, 200)
    found = preference_losses.log_one_minus_exp(torch.tensor(x)).numpy()
    assert np.allclose(found, np.log(-np.expm1(x)), rtol=1e-12, atol=1e-15)
