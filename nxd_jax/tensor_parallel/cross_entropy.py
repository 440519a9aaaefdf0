"""Losses of logits whose vocabulary is cut over the tensor-parallel ranks.

Half-precision logits are computed with in float32, and results are float32. No function writes to its arguments (NxD subtracts the maximum from
the logits in place).
"""

from __future__ import annotations

from typing import Any

import torch

from nxd_jax.tensor_parallel import parallel_groups
from torch_bridge.collectives import functional
from torch_bridge.recorder import expected_indices


def parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0, ignore_index: int = -100
) -> torch.Tensor:
    """Cross-entropy of every token, as `F.cross_entropy(reduction="none")` gives it on the whole vocabulary.

    vocab_parallel_logits: [..., vocabulary / tp], rank r's part of the vocabulary the r-th. target: [...], token numbers, the same on all
    tensor-parallel ranks. Returns [...], float32 (float64 for float64 logits), the same on all of them. label_smoothing: in [0, 1], spread over the
    whole vocabulary in the loss and in its gradient (NxD's gradient does not fit its loss). ignore_index: targets with loss 0 and gradient 0. NxD has
    no such argument: there -100 contributes its log-sum-exp, and scripts mask it outside; a masked mean is the same either way.

    Raises ValueError for shapes that do not fit, label_smoothing outside [0, 1], tensors on different devices, and CPU tensors in a larger group;
    RuntimeError before parallel_state is initialised.
    """
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0 and 1, got {label_smoothing}")
    _check(vocab_parallel_logits, target)
    classes = _vocabulary(vocab_parallel_logits)
    expected_indices.expect("parallel_cross_entropy", target, classes, f"the {classes} classes of the whole vocabulary", ignore_index)
    loss: torch.Tensor = _CrossEntropy.apply(vocab_parallel_logits, target, float(label_smoothing), ignore_index)
    return loss


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: torch.Tensor | None = None,
    target: torch.Tensor | None = None,
    inference: bool = True,
    *,
    logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """log p(token s + 1 | tokens up to s): [batch, length - 1], float32.

    vocab_parallel_logits (or logits, the name that some releases have): [batch, length, vocabulary / tp]; target: [batch, length], the same tokens that the
    logits were computed from (they are shifted here). A target outside the vocabulary (-100, say) gives 0. inference is accepted: the result always carries
    a gradient to logits that need one.
    """
    if (vocab_parallel_logits is None) == (logits is None) or target is None:
        raise TypeError(
            "from_parallel_logits_to_logprobs needs vocab_parallel_logits (or logits, which is the same, but not both) and target"
        )
    logits = vocab_parallel_logits if logits is None else logits
    assert logits is not None
    shifted = target.roll(-1, dims=-1)
    _check(logits, shifted)
    found: torch.Tensor = DistributedLogprob.apply(logits, shifted, inference)
    return found[..., :-1].contiguous()


class DistributedLogprob(torch.autograd.Function):
    """`DistributedLogprob.apply(logits, target, inference)`: the log-probability of every target (not shifted), [...], float32.

    A target outside the vocabulary gives 0 and no gradient.
    """

    @staticmethod
    def forward(ctx: Any, vocab_parallel_logits: torch.Tensor, target: torch.Tensor, inference: bool = False) -> torch.Tensor:
        counted = (target >= 0) & (target < _vocabulary(vocab_parallel_logits))
        loss, logsumexp = _losses(vocab_parallel_logits, target, 0.0, counted)
        ctx.save_for_backward(vocab_parallel_logits, target, counted, logsumexp)
        return -loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        logits, target, counted, logsumexp = ctx.saved_tensors
        return _gradient(-grad, logits, target, 0.0, counted, logsumexp), None, None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, smoothing: float, ignore_index: int) -> torch.Tensor:
        counted = target != ignore_index
        loss, logsumexp = _losses(logits, target, smoothing, counted)
        ctx.save_for_backward(logits, target, counted, logsumexp)
        ctx.smoothing = smoothing
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        logits, target, counted, logsumexp = ctx.saved_tensors
        return _gradient(grad, logits, target, ctx.smoothing, counted, logsumexp), None, None, None


def _losses(logits: torch.Tensor, target: torch.Tensor, smoothing: float, counted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-log p(target) where counted and 0 elsewhere, and the log-sum-exp over the whole vocabulary."""
    group = parallel_groups.group("tp")
    x = _widened(logits)
    index, mine = _places(target, x.shape[-1])
    top = functional.all_reduce("max", x.amax(-1), groups=group)
    x = x - top.unsqueeze(-1)
    picked = torch.where(mine, x.gather(-1, index.unsqueeze(-1)).squeeze(-1), 0.0)
    parts = [x.exp().sum(-1), picked] + ([x.sum(-1)] if smoothing else [])
    total, at_target, *everything = functional.all_reduce("sum", torch.stack(parts), groups=group).unbind(0)
    log_total = total.log()
    loss = log_total - (1 - smoothing) * at_target
    if everything:
        loss = loss - smoothing / _vocabulary(logits) * everything[0]
    return torch.where(counted, loss, 0.0), log_total + top


def _gradient(
    grad: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, smoothing: float, counted: torch.Tensor, logsumexp: torch.Tensor
) -> torch.Tensor:
    """(p - (1 - smoothing) * one-hot - smoothing / vocabulary) * grad, on this rank's part."""
    x = _widened(logits)
    index, mine = _places(target, x.shape[-1])
    chosen = (torch.arange(x.shape[-1], device=x.device) == index.unsqueeze(-1)) & mine.unsqueeze(-1)
    d = (x - logsumexp.unsqueeze(-1)).exp() - (1 - smoothing) * chosen.to(x.dtype)
    if smoothing:
        d = d - smoothing / _vocabulary(logits)
    return (d * torch.where(counted, grad, 0.0).unsqueeze(-1)).to(logits.dtype)


def _places(target: torch.Tensor, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where targets are in this rank's part of the vocabulary, and whether they are (0 where not)."""
    local = target - parallel_groups.rank("tp") * part
    mine = (local >= 0) & (local < part)
    return torch.where(mine, local, 0), mine


def _vocabulary(logits: torch.Tensor) -> int:
    return logits.shape[-1] * parallel_groups.size("tp")


def _widened(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def _check(logits: torch.Tensor, target: torch.Tensor) -> None:
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"logits of shape {list(logits.shape)} need targets of shape {list(logits.shape[:-1])}, got {list(target.shape)}; reshape one of them"
        )
    if logits.device != target.device:
        raise ValueError(f"logits are on {logits.device} and targets on {target.device}: move one with .to(...)")
    if target.is_floating_point():
        raise ValueError(f"targets must be token numbers, got {target.dtype}")
