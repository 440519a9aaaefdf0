"""The next token from logits of which every rank has a part."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from nxd_jax.operators import argmax
from nxd_jax.operators.topk import topk
from nxd_jax.tensor_parallel import layer_groups, regions
from nxd_jax.utils.sampling import Sampler


class TokenChoice(nn.Module):
    """From a rank's logits [..., V / tp], the vocabulary padded at the end: all logits [..., V] float32 if top_k is None, else tokens [...] int64.

    top_k: 1 takes the likeliest token, more draws one among so many by their probability.
    """

    def __init__(self, vocabulary: int, top_k: int | None):
        super().__init__()
        self.vocabulary = vocabulary
        self.top_k = None if top_k is None else min(top_k, vocabulary)
        self.sampler = Sampler(SimpleNamespace(do_sample=True, top_k=self.top_k or 1))

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        group = layer_groups.tensor_parallel()
        if self.top_k is None:
            return regions.gather(logits, -1, group).float().narrow(-1, 0, self.vocabulary)
        part = logits.shape[-1]
        logits = logits.float()
        if part * layer_groups.size(group) > self.vocabulary:
            places = torch.arange(part, device=logits.device) + layer_groups.rank(group) * part
            logits = logits.masked_fill(places >= self.vocabulary, -torch.inf)
        if self.top_k == 1:
            return argmax(logits, -1, -1)
        values, tokens = topk(logits.flatten(0, -2), self.top_k, 1, 1)
        chosen = self.sampler.sample(values)
        return tokens.gather(1, chosen.unsqueeze(1)).reshape(logits.shape[:-1])
