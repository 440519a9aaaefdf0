"""Losses and rewards of preferences against formulas in numpy, and what the reference values belong to."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from nxd_jax.training.data.alignment import preferences
from nxd_jax.training.lightning_modules.model.base_dpo import DPOBaseModel
from nxd_jax.training.lightning_modules.model.base_orpo import ORPOBaseModel
from nxd_jax.training.models import preference_losses
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.training.data import corpus

CHOSEN, REJECTED = np.array([-0.3, -2.0, -40.0]), np.array([-0.9, -1.5, -0.01])
BEFORE = np.array([[-1.0, -1.2], [-2.0, -3.0], [-30.0, -0.1]])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def test_dpo() -> None:
    wanted = -np.log(sigmoid(0.3 * ((CHOSEN - REJECTED) - (BEFORE[:, 0] - BEFORE[:, 1])))).mean()
    found = preference_losses.dpo_loss(*map(torch.tensor, (CHOSEN, REJECTED, BEFORE[:, 0], BEFORE[:, 1])), 0.3)
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


# -- what modules make of it ---------------------------------------------------------------------------

BETA = 0.3


class Scores:
    """As a model module: logits that depend on the tokens alone."""

    def __init__(self) -> None:
        strategies = {"dpo": {"kl_beta": BETA}, "orpo": {"beta": BETA}}
        self.config = OmegaConf.create({"data": {"micro_batch_size": 2}, "model_alignment_strategy": strategies})
        self.trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")))
        self.model = nn.Linear(1, 1)
        self.table = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))

    def _size(self, name: str) -> int:
        return 1

    def _autocast(self) -> Any:
        return contextlib.nullcontext()

    def logits(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.table[ids]

    def logp(self, ids: torch.Tensor, labels: torch.Tensor) -> float:
        """Of one answer."""
        each = self.table[ids].log_softmax(-1)
        return float(sum(each[k, label] for k, label in enumerate(labels[1:]) if label >= 0))


def rows(count: int) -> preferences.PreferenceRows:
    texts = [{"prompt": f"{k} or", "chosen": f" {k + 1}" * (k + 1), "rejected": " no" * (k + 2)} for k in range(count)]
    return preferences.tokenize(texts, preferences.Rules(corpus.tokenizer(), 32), "rows")


def scored(learned: Any, chosen: np.ndarray, rejected: np.ndarray) -> Any:
    """Whatever the batch is, its answers have these log-probabilities."""
    learned.logps = lambda batch, average=False: (torch.tensor(chosen), torch.tensor(rejected))
    return learned


def test_rewards_of_dpo_are_means_over_rows() -> None:
    """(q) The original logs each row's, which fails where a micro-batch has several. Reference values are those of the row's number."""
    learned = scored(DPOBaseModel(Scores()), CHOSEN, REJECTED)
    learned._table = torch.tensor(BEFORE)
    order = [2, 0, 1]
    loss, metrics = learned.model_fwd_calc_loss({"row": torch.tensor(order)})
    chosen, rejected = CHOSEN - BEFORE[order, 0], REJECTED - BEFORE[order, 1]
    assert float(loss) == pytest.approx(-np.log(sigmoid(BETA * (chosen - rejected))).mean())
    wanted = {"chosen_rewards": chosen, "rejected_rewards": rejected, "reward_margins": chosen - rejected}
    assert metrics.keys() == {*wanted, "reward_accuracies"} and all(value.dim() == 0 for value in metrics.values())
    assert {name: float(metrics[name]) for name in wanted} == {name: pytest.approx(BETA * each.mean()) for name, each in wanted.items()}
    assert float(metrics["reward_accuracies"]) == pytest.approx((chosen > rejected).mean()) and 0 < (chosen > rejected).mean() < 1


def test_rewards_of_orpo_are_means_over_rows() -> None:
    loss, metrics = scored(ORPOBaseModel(Scores()), CHOSEN, REJECTED).model_fwd_calc_loss({})
    assert float(loss) == pytest.approx(float(preference_losses.orpo_loss(torch.tensor(CHOSEN), torch.tensor(REJECTED), BETA)))
    wanted = {"chosen_rewards": BETA * CHOSEN.mean(), "rejected_rewards": BETA * REJECTED.mean(), "reward_accuracies": 1 / 3}
    assert {name: float(metrics[name]) for name in wanted} == pytest.approx(wanted)


def test_reference_values_are_in_the_order_of_rows(nxd: Nxd) -> None:
    """(q) The original gathers them in shuffled order. The last batch is filled up, and what fills it is left out."""
    nxd(1)
    module, made = Scores(), rows(5)
    found = DPOBaseModel(module)._scored(made)
    wanted = [[module.logp(row[f"{side}_input_ids"], row[f"{side}_labels"]) for side in ("chosen", "rejected")] for row in made]
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-5, atol=1e-5)
    assert found.shape == (5, 2) and module.model.training


@pytest.mark.parametrize("kind", [DPOBaseModel, ORPOBaseModel])
def test_a_failure_of_log_probabilities_comes_out(kind: Any, nxd: Nxd, monkeypatch: pytest.MonkeyPatch) -> None:
    """(q) The original goes on with arithmetic that takes a rank's part of the vocabulary for all of it."""

    def lost(*args: Any) -> torch.Tensor:
        raise RuntimeError("a rank is lost")

    nxd(1)
    made = rows(2)
    batch = {name: torch.stack([row[name] for row in made]) for name in made[0]}
    learned = kind(Scores())
    learned._table = torch.zeros(2, 2)
    assert float(learned.model_fwd_calc_loss(batch)[0]) > 0
    monkeypatch.setattr(preference_losses, "from_parallel_logits_to_logprobs", lost)
    for call, given in ((learned.model_fwd_calc_loss, batch), (learned._scored, made)):
        with pytest.raises(RuntimeError, match="a rank is lost"):
            call(given)
