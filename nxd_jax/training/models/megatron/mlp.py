"""What follows attention in a layer: an MLP, or experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from nxd_jax.modules.moe import ExpertMLPs, MoE, RouterSinkhorn, RouterTopK
from nxd_jax.tensor_parallel import parallel_groups
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from nxd_jax.training.models.megatron.fused_layer_norm import norm
from nxd_jax.training.models.megatron.module import MegatronModule, RankDropout
from nxd_jax.training.models.megatron.options import GPTOptions


class ParallelMLP(MegatronModule):
    """dense_4h_to_h(activation(dense_h_to_4h(x))); with a gated activation activation(first half) * second half, each half shared out by itself.

    With normformer a norm over the whole width before the second projection (`normalization`). x: [length, batch, hidden], with sequence parallelism this
    rank's part of the length.
    """

    def __init__(self, options: GPTOptions):
        super().__init__()
        self.gated = options.gated
        self.activation_func = _activation(options)
        self.dense_h_to_4h = ColumnParallelLinear(
            options.hidden_size,
            (2 if options.gated else 1) * options.ffn_hidden_size,
            stride=2 if options.gated else 1,
            gather_output=False,
            **options.linear(),
        )
        self.dropout = RankDropout(options.ffn_dropout, by_rank=True)
        self.normalization: nn.Module | None = None
        if options.transformer_block_type == "normformer":
            width = options.ffn_hidden_size // parallel_groups.size("tp")
            self.normalization = norm(options.normalization, width, options.layernorm_epsilon, False)
        self.dense_4h_to_h = RowParallelLinear(
            options.ffn_hidden_size, options.hidden_size, input_is_parallel=True, **options.linear(output=True)
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.dense_h_to_4h(hidden_states)
        if self.gated:
            gate, up = x.chunk(2, dim=-1)
            x = self.activation_func(gate) * up
        else:
            x = self.activation_func(x)
        x = self.dropout(x)
        found: torch.Tensor = self.dense_4h_to_h(x if self.normalization is None else self.normalization(x))
        return found


class NeuronSwitchMLP(MegatronModule):
    """Experts in place of an MLP, with their router (`moe`). Both compute in float32.

    x: [length, batch, hidden], with sequence parallelism this rank's part of the length. Returns (output,), with output_router_logits
    (output, the router's logits [tokens, experts]). Where experts take a part of the tokens only, those early in the sequence come first.
    """

    def __init__(self, options: GPTOptions):
        super().__init__()
        size = options.num_moe_experts, options.moe_top_k, options.hidden_size
        self.moe = MoE(
            _router(options, size),
            ExpertMLPs(
                *size,
                options.ffn_hidden_size,
                "silu",
                glu_mlp=True,
                capacity_factor=options.moe_capacity_factor,
                normalize_top_k_affinities=options.normalize_top_k_affinities,
                init_method=options.init_method,
                output_layer_init_method=options.output_layer_init_method,
                dtype=torch.float32,
                sequence_parallel_enabled=options.sequence_parallel,
            ),
            sequence_parallel_enabled=options.sequence_parallel,
            sequence_dimension=0,
            return_router_logits=options.output_router_logits,
            token_shuffle_group_size=options.token_shuffle_group_size,
        )

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = self.moe(hidden_states)
        return found


def _router(options: GPTOptions, size: tuple[int, int, int]) -> nn.Module:
    if options.moe_routing_algorithm == "top_k":
        return RouterTopK(*size, dtype=torch.float32)
    return RouterSinkhorn(
        *size,
        act_fn=options.moe_router_activation,
        dtype=torch.float32,
        sinkhorn_iterations=options.moe_sinkhorn_iterations,
        sinkhorn_tol=options.moe_sinkhorn_tol,
    )


def _activation(options: GPTOptions) -> Callable[[torch.Tensor], torch.Tensor]:
    if options.activation in ("gelu", "geglu"):
        return nn.GELU(approximate="tanh" if options.openai_gelu else "none")
    return F.relu if options.activation == "reglu" else F.silu
