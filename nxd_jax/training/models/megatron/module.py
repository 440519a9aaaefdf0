"""`neuronx_distributed_training.models.megatron.module`: the base of Megatron's modules, and dropout that knows of ranks."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from nxd_jax.tensor_parallel.random import get_xla_rng_tracker


def param_is_not_shared(param: torch.Tensor) -> bool:
    """Whether a parameter is not marked as another's copy (`param.shared`), so that it counts in norms."""
    return not getattr(param, "shared", False)


class MegatronModule(nn.Module):
    """A module of a Megatron model. share_token_embeddings: the output layer's weight is that of the word embeddings."""

    def __init__(self, share_token_embeddings: bool = True):
        super().__init__()
        self.share_token_embeddings = share_token_embeddings

    def word_embeddings_weight(self) -> nn.Parameter:
        """The table of a model with a `language_model`. Raises AttributeError for other modules."""
        return self.get_parameter("language_model.embedding.word_embeddings.weight")

    def position_embeddings_weight(self) -> nn.Parameter:
        """The table of learned positions. Raises AttributeError if there is none."""
        return self.get_parameter("language_model.embedding.position_embeddings.weight")


class RankDropout(nn.Module):
    """Dropout. by_rank: tensor-parallel ranks hold different values and draw from "model-parallel-rng", each its own numbers; else all draw alike."""

    def __init__(self, p: float, by_rank: bool):
        super().__init__()
        self.p, self.by_rank = p, by_rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        with get_xla_rng_tracker().fork() if self.by_rank else contextlib.nullcontext():
            return F.dropout(x, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, by_rank={self.by_rank}"
