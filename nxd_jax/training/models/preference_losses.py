"""What preferences are learned by: log-probabilities of answers, DPO's and ORPO's loss."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from nxd_jax.tensor_parallel.cross_entropy import from_parallel_logits_to_logprobs
from nxd_jax.utils.batch_utils import IGNORED


def answer_logps(vocab_parallel_logits: torch.Tensor, labels: torch.Tensor, average: bool = False) -> torch.Tensor:
    """The log-probability of each row's answer, [rows]: the sum over labels that count, or their average.

    vocab_parallel_logits: [rows, length, vocabulary / tp]; labels: [rows, length], at their tokens, -100 where they do not count.
    """
    found = from_parallel_logits_to_logprobs(vocab_parallel_logits, labels).sum(-1)
    if not average:
        return found
    return found / (labels[:, 1:] != IGNORED).sum(-1).clamp(min=1).to(found.dtype)


def dpo_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, reference_chosen: torch.Tensor, reference_rejected: torch.Tensor, beta: float
) -> torch.Tensor:
    """mean(-log sigmoid(beta * ((chosen - rejected) - (reference chosen - reference rejected)))) of log-probabilities [rows]."""
    return -F.logsigmoid(beta * ((chosen - rejected) - (reference_chosen - reference_rejected))).mean()


def orpo_loss(chosen: torch.Tensor, rejected: torch.Tensor, beta: float) -> torch.Tensor:
    """-mean(chosen) - beta * mean(log sigmoid(log odds of chosen - log odds of rejected)) of average log-probabilities [rows]."""
    odds = (chosen - rejected) - (log_one_minus_exp(chosen) - log_one_minus_exp(rejected))
    return -chosen.mean() - beta * F.logsigmoid(odds).mean()


def log_one_minus_exp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - e^x) for x <= 0, without loss near 0 and for large -x; x is at most -1e-6 here, so that a probability of 1 gives a finite number and gradient
    0. (The original's is infinite or NaN.)"""
    x = x.clamp(max=-1e-6)
    near = x > -math.log(2)
    return torch.where(near, torch.log(-torch.expm1(torch.where(near, x, -1.0))), torch.log1p(-torch.exp(torch.where(near, -1.0, x))))
