"""`neuronx_distributed.modules.moe.experts`: the MLPs of all experts that a rank holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nxd_jax.modules.moe.grouped_mlp import ACTIVATIONS, grouped_mlp
from nxd_jax.modules.moe.model_utils import GLUType, activation
from nxd_jax.modules.moe.moe_parallel_layers import Distribution, ExpertFusedColumnParallelLinear, ExpertFusedRowParallelLinear
from nxd_jax.tensor_parallel.casting import cast_if_autocast_enabled
from nxd_jax.tensor_parallel.matmul import without_autocast
from nxd_jax.tensor_parallel.sharded_weights import Init


class Experts(nn.Module):
    """An MLP for each expert: down(act(up(x))), or with a gated linear unit down(act(s * gate) * (up + b)) for `GLUType.GLU` and
    down(gate * act(s * gate) * (up + b)) for `GLUType.SWIGLU`.

    num_experts, hidden_size, intermediate_size: of the whole layer; a rank holds num_experts / ep experts, and intermediate_size / tp of each.
    hidden_act: a key of `ACT2FN`. glu_mlp: gate and up projection in one `gate_up_proj` (gate first), else `up_proj` alone. glu_type: a `GLUType` or its name.
    bias: of both projections. hidden_act_scaling_factor: s. hidden_act_bias: b, added here (NxD adds it to the bias of a checkpoint that it loads, and not at
    all without one). gate_clamp_*, up_clamp_*: limits of gate and up before s and b; None: none.
    init_method, output_layer_init_method: of the first and the second projection, called with one expert's float32 weight after the other.
    dtype, device, keep_master_weight, tensor_model_parallel_group, expert_model_parallel_group, expert_distribution, is_prefill: of the two layers.

    Both ways to call it return the tensor parallel ranks' partial sums, to be reduced when tokens are back where they came from.

    Raises ValueError for an unknown activation, and for a factor, bias or limit of a gated unit without `glu_mlp`.
    """

    gate_up_proj: ExpertFusedColumnParallelLinear
    up_proj: ExpertFusedColumnParallelLinear

    def __init__(
        self,
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        glu_mlp: bool,
        glu_type: GLUType | str = GLUType.GLU,
        bias: bool = False,
        hidden_act_scaling_factor: float = 1.0,
        hidden_act_bias: float = 0.0,
        gate_clamp_upper_limit: float | None = None,
        gate_clamp_lower_limit: float | None = None,
        up_clamp_upper_limit: float | None = None,
        up_clamp_lower_limit: float | None = None,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        keep_master_weight: bool = False,
        tensor_model_parallel_group: Any = None,
        expert_model_parallel_group: Any = None,
        expert_distribution: Distribution | None = None,
        is_prefill: bool = True,
    ):
        super().__init__()
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.act_fn = activation(hidden_act)
        self.glu_mlp = glu_mlp
        self.glu_type = GLUType.validate(glu_type)
        self.hidden_act_scaling_factor = hidden_act_scaling_factor
        self.hidden_act_bias = hidden_act_bias
        self.gate_limits = gate_clamp_lower_limit, gate_clamp_upper_limit
        self.up_limits = up_clamp_lower_limit, up_clamp_upper_limit
        if not glu_mlp:
            self._check_plain()
        layer: dict[str, Any] = dict(
            bias=bias,
            dtype=dtype,
            device=device,
            keep_master_weight=keep_master_weight,
            tensor_model_parallel_group=tensor_model_parallel_group,
            expert_model_parallel_group=expert_model_parallel_group,
            expert_distribution=expert_distribution,
            is_prefill=is_prefill,
        )
        size, stride = (2 * intermediate_size, 2) if glu_mlp else (intermediate_size, 1)
        up = ExpertFusedColumnParallelLinear(num_experts, hidden_size, size, stride=stride, init_method=init_method, **layer)
        self.add_module("gate_up_proj" if glu_mlp else "up_proj", up)
        self.down_proj = ExpertFusedRowParallelLinear(
            num_experts, intermediate_size, hidden_size, reduce_output=False, init_method=output_layer_init_method, **layer
        )

    def forward(self, x: torch.Tensor, expert_indices: torch.Tensor | None = None, sum_gradient: bool = True) -> torch.Tensor:
        """[e, ..., hidden_size] -> [e, ..., hidden_size], partial sums; an x of [1, ..., hidden_size] goes to all experts.

        e: the experts of this rank. expert_indices: [n] numbers among them; x is then [n, ..., hidden_size], for these experts. sum_gradient: x's gradient is
        summed over the tensor parallel ranks; False leaves that to the caller, who may have fewer tokens than rows (`entering`).
        """
        return self.down_proj(self._activated(self._first(x, expert_indices, sum_gradient)), expert_indices)

    def rows(self, x: torch.Tensor, ends: torch.Tensor, sum_gradient: bool = True) -> torch.Tensor:
        """[m, hidden_size], sorted by this rank's experts, -> [m, hidden_size], partial sums.

        ends: [e] integers, where each expert's rows end. Rows behind the last end belong to nobody: they give zeros and cost nothing in the products.
        sum_gradient: as in `forward`.
        """
        if self._is_usual() and x.device.type != "cpu":
            return self._at_once(self.entering(x) if sum_gradient else x, ends)
        return self.down_proj.rows(self._activated(self._first.rows(x, ends, sum_gradient)), ends)

    def entering(self, x: torch.Tensor, group: Any = None) -> torch.Tensor:
        """x as it is, whose gradient is summed over the tensor parallel ranks, or those of another group."""
        return self._first.entering(x, group)

    @property
    def _first(self) -> ExpertFusedColumnParallelLinear:
        return self.gate_up_proj if self.glu_mlp else self.up_proj

    def _at_once(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        x, gate_up, down = cast_if_autocast_enabled(x, self.gate_up_proj.weight, self.down_proj.weight)
        with without_autocast():
            return grouped_mlp(x, gate_up, down, ends, self.hidden_act, max(1, x.shape[0] // self.num_experts))

    def _is_usual(self) -> bool:
        """Whether rows go through act(gate) * up without anything more, for which there is one op."""
        more = (
            self.hidden_act_scaling_factor != 1.0,
            self.hidden_act_bias != 0.0,
            self.gate_limits != (None, None),
            self.up_limits != (None, None),
        )
        if not self.glu_mlp or self.glu_type is not GLUType.GLU or any(more) or self.hidden_act not in ACTIVATIONS:
            return False
        first, second = self.gate_up_proj, self.down_proj
        plain = type(first) is ExpertFusedColumnParallelLinear and type(second) is ExpertFusedRowParallelLinear
        return plain and first.bias is None and second.bias is None

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        """Between the two projections: [..., 2 I / tp] (or [..., I / tp] without gate) -> [..., I / tp]."""
        if not self.glu_mlp:
            return self.act_fn(x)
        gate, up = x.chunk(2, dim=-1)
        gate, up = _clamped(gate, self.gate_limits), _clamped(up, self.up_limits)
        act = self.act_fn(gate if self.hidden_act_scaling_factor == 1.0 else gate * self.hidden_act_scaling_factor)
        up = up if self.hidden_act_bias == 0.0 else up + self.hidden_act_bias
        return gate * act * up if self.glu_type is GLUType.SWIGLU else act * up

    def _check_plain(self) -> None:
        """Without a gate there is nothing that these could mean."""
        given = {
            "hidden_act_scaling_factor": self.hidden_act_scaling_factor != 1.0,
            "hidden_act_bias": self.hidden_act_bias != 0.0,
            "gate_clamp_*_limit": self.gate_limits != (None, None),
            "up_clamp_*_limit": self.up_limits != (None, None),
            "glu_type=GLUType.SWIGLU": self.glu_type is GLUType.SWIGLU,
        }
        found = [name for name, is_given in given.items() if is_given]
        if found:
            raise ValueError(f"{', '.join(found)}: of gated linear units only; pass glu_mlp=True, or leave them out")


def _clamped(x: torch.Tensor, limits: tuple[float | None, float | None]) -> torch.Tensor:
    return x if limits == (None, None) else x.clamp(*limits)
