"""What stands between attention layers: the norm, and the gated MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from nxd_jax.tensor_parallel.casting import wide_dtype
from nxd_jax.tensor_parallel.keeps_marks import KeepsMarks
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from nxd_jax.training.models.hf_models.options import Options, per_rank


class LlamaRMSNorm(KeepsMarks):
    """x / sqrt(mean(x^2) + eps), computed in float32, then in x's dtype times the weight.

    sequence_parallel_enabled: x is a part of the sequence, so that the weight's gradients of all tensor-parallel ranks have to be added up.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, sequence_parallel_enabled: bool = False, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.variance_epsilon = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.weight.sequence_parallel_enabled = sequence_parallel_enabled  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        """Ones."""
        nn.init.ones_(self.weight)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.to(wide_dtype())
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class ActivationMultiplyMLP(nn.Module):
    """activation(gate) * up, of both side by side. It has no weights: it is a module so that it can be computed again in the backward pass."""

    def __init__(self, config: Any):
        super().__init__()
        self.act_fn = ACT2FN[config.hidden_act]
        self.split_size = per_rank(config, "intermediate_size")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.split(self.split_size, dim=-1)
        activated: torch.Tensor = self.act_fn(gate) * up
        return activated


class LlamaMLP(nn.Module):
    """down(activation(gate(x)) * up(x)). gate and up are one weight, each shared out by itself (stride 2). `mlp_bias`: all have biases."""

    def __init__(self, config: Any):
        super().__init__()
        options, bias = Options.of(config), bool(getattr(config, "mlp_bias", False))
        self.activation_multiply = ActivationMultiplyMLP(config)
        self.gate_up_proj = ColumnParallelLinear(
            config.hidden_size, 2 * config.intermediate_size, bias=bias, stride=2, gather_output=False, **options.linear(config)
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, bias=bias, input_is_parallel=True, **options.linear(config)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down_proj(self.activation_multiply(self.gate_up_proj(x)))
        return found
