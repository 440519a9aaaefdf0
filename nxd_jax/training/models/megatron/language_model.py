"""`neuronx_distributed_training.models.megatron.language_model`: from token ids to logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nxd_jax.tensor_parallel import regions
from nxd_jax.tensor_parallel.casting import wide_dtype
from nxd_jax.tensor_parallel.embedding import ParallelEmbedding
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear
from nxd_jax.training.models.megatron.module import MegatronModule, RankDropout
from nxd_jax.training.models.megatron.options import GPTOptions
from nxd_jax.training.models.megatron.transformer import ParallelTransformer

__all__ = ["Embedding", "PositionEmbedding", "TransformerLanguageModel"]


class PositionEmbedding(nn.Embedding):
    """Learned positions: every rank has the whole table [positions, hidden]. init_method: fills it. (In a pipeline the original's begins with N(0, 1).)"""

    def __init__(self, count: int, hidden_size: int, init_method: Any):
        self.init_method = init_method
        super().__init__(count, hidden_size)

    def reset_parameters(self) -> None:
        """By `init_method`."""
        self.init_method(self.weight)


class Embedding(MegatronModule):
    """Words, and learned positions if there are some, with dropout.

    forward(input_ids [batch, length], position_ids [batch, length]) returns [length, batch, hidden], with sequence parallelism this rank's part of the length.
    """

    def __init__(self, options: GPTOptions):
        super().__init__()
        self.options = options
        self.word_embeddings = ParallelEmbedding(
            options.vocab_size,
            options.hidden_size,
            init_method=options.init_method,
            sequence_parallel_enabled=options.sequence_parallel,
        )
        self.position_embeddings: nn.Module | None = None
        if options.position_embedding_type == "learned_absolute":
            self.position_embeddings = PositionEmbedding(options.max_position_embeddings, options.hidden_size, options.init_method)
        self.embedding_dropout = RankDropout(options.hidden_dropout, by_rank=options.sequence_parallel)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        parallel = self.options.sequence_parallel
        # ids are turned, not hidden states: a first layer that reads a view is not folded into one loop with the others
        x = self.word_embeddings(input_ids if parallel else input_ids.t())
        if self.position_embeddings is not None:
            places = self.position_embeddings(position_ids.t())
            x = x + (regions.scatter_to_sequence_parallel_region(places) if parallel else places)
        if self.options.fp32_residual_connection:
            x = x.to(wide_dtype())
        found: torch.Tensor = self.embedding_dropout(x)
        return found


class TransformerLanguageModel(MegatronModule):
    """forward(input_ids, position_ids, attention_mask) returns logits [length, batch, vocabulary / tp], and the list of the routers' logits."""

    def __init__(self, options: GPTOptions):
        super().__init__(options.share_embeddings_and_output_weights)
        self.options = options
        self.embedding = Embedding(options)
        self.encoder = ParallelTransformer(options)
        self.output_layer = ColumnParallelLinear(
            options.hidden_size, options.vocab_size, gather_output=False, **{**options.linear(), "bias": False}
        )

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        hidden_states, routed = self.encoder(self.embedding(input_ids, position_ids), attention_mask)
        if self.options.fp32_residual_connection:
            hidden_states = hidden_states.to(self.output_layer.weight.dtype)
        return self.output_layer(hidden_states), routed
