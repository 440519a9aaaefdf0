"""What experts must give, by loops over tokens and experts in eager torch."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from nxd_jax.modules.moe.model_utils import ACT2FN


@dataclasses.dataclass
class Weights:
    """The undivided weights of gated (or plain) experts: first [E, H, 2 I] (or [E, H, I]), second [E, I, H]; biases [E, 2 I] and [E, H]."""

    first: torch.Tensor
    second: torch.Tensor
    first_bias: torch.Tensor | None = None
    second_bias: torch.Tensor | None = None
    glu: bool = True
    act: str = "silu"

    def expert(self, e: int, x: torch.Tensor) -> torch.Tensor:
        """Rows [n, H] through expert e."""
        h = x @ self.first[e]
        h = h if self.first_bias is None else h + self.first_bias[e]
        if self.glu:
            gate, up = h.chunk(2, -1)
            h = ACT2FN[self.act](gate) * up
        else:
            h = ACT2FN[self.act](h)
        out = h @ self.second[e]
        return out if self.second_bias is None else out + self.second_bias[e]


@dataclasses.dataclass
class Rule:
    """Which tokens experts take, and how their results are weighed."""

    capacity: int | None = None
    normalize: bool = False
    early: bool = False


def taken(index: torch.Tensor, experts: int, capacity: int | None, padding: torch.Tensor | None = None) -> torch.Tensor:
    """[T, k] bool: the choices that are kept, token after token."""
    load = [0] * experts
    kept = torch.zeros(index.shape, dtype=torch.bool)
    for t, row in enumerate(index.tolist()):
        for j, e in enumerate(row):
            if padding is not None and not bool(padding.reshape(-1)[t]):
                continue
            load[e] += 1
            kept[t, j] = capacity is None or load[e] <= capacity
    return kept


def mix(
    weights: Weights, rule: Rule, x: torch.Tensor, affinities: torch.Tensor, index: torch.Tensor, padding: torch.Tensor | None = None
) -> torch.Tensor:
    """[T, H]: the sum over experts of what they give for the tokens that they take."""
    experts = affinities.shape[1]
    kept = taken(index, experts, rule.capacity, padding)
    chosen = (F.one_hot(index, experts) * kept.unsqueeze(2)).sum(1)
    share = affinities * chosen.to(affinities.dtype)
    if rule.normalize:
        share = share / share.abs().sum(1, keepdim=True).clamp(min=1e-12)
    total = torch.zeros_like(x)
    for e in range(experts):
        tokens = chosen[:, e].nonzero().reshape(-1)
        w = share[tokens, e].unsqueeze(1)
        out = weights.expert(e, x[tokens] * w) if rule.early else weights.expert(e, x[tokens]) * w
        total = total.index_add(0, tokens, out.to(x.dtype))
    return total
