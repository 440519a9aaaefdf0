"""`neuronx_distributed.modules.moe.shared_experts`: experts that every token takes, as one gated MLP."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from nxd_jax.modules.moe.model_utils import activation
from nxd_jax.tensor_parallel import layer_groups, regions
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from torch_bridge.mesh import world


class ColumnParallelLinearTransposed(ColumnParallelLinear):
    """`ColumnParallelLinear` that holds its weight as [input_size, output_size / tp]: same values, other way round."""

    def set_weight_and_bias_config(self) -> None:
        super().set_weight_and_bias_config()
        self.weight_shape, self.weight_partition_dim = self.weight_shape[::-1], 1

    def _init_weight(self, weight: torch.Tensor) -> None:
        _init_transposed(super()._init_weight, weight)

    def _multiply(self, input: torch.Tensor, weight: torch.Tensor, all_reduce: bool, gather: bool) -> torch.Tensor:
        return super()._multiply(input, weight.t(), all_reduce, gather)


class RowParallelLinearTransposed(RowParallelLinear):
    """`RowParallelLinear` that holds its weight as [input_size / tp, output_size]: same values, other way round."""

    def set_weight_and_bias_config(self) -> None:
        super().set_weight_and_bias_config()
        self.weight_shape, self.weight_partition_dim = self.weight_shape[::-1], 0

    def _init_weight(self, weight: torch.Tensor) -> None:
        _init_transposed(super()._init_weight, weight)

    def _multiply(self, input: torch.Tensor, weight: torch.Tensor, all_reduce: bool, gather: bool) -> torch.Tensor:
        return super()._multiply(input, weight.t(), all_reduce, gather)


def _init_transposed(init: Any, weight: torch.Tensor) -> None:
    """Draw what the layer would draw for a weight that lies as torch's do."""
    usual = torch.empty(weight.shape[::-1], dtype=weight.dtype)
    init(usual)
    weight.copy_(usual.t())


class SharedExperts(torch.nn.Module):
    """down(act(gate(x)) * up(x)) for every token; `num_shared_experts` experts of `intermediate_size` are one MLP of the product of both.

    The results are this tensor-parallel rank's PARTIAL sums: `MoE` adds them to the routed experts' and reduces once for both.

    hidden_act: a key of `ACT2FN`. dtype: of the weights. tensor_model_parallel_group: the ranks that share the weights out; default the tensor-parallel group.
    reduce_dtype: in which the input's gradient is summed.
    fused_gate_up_projection: one weight `gate_up_proj` (the rank's gate part, then its up part) in place of `gate_proj` and `up_proj`.
    transpose_weights: hold weights as [in, out]; `preshard_hook` turns those of a full checkpoint. (NxD trains such layers wrongly: the input's gradient is
    not summed.)
    sequence_parallel_enabled: every rank has all weights and takes its own part of the sequence, so that the result is complete, nothing of it is to be
    reduced, and it must be added after the routed experts were. The weights have `sequence_parallel_enabled` set, and their gradients are added up over
    the ranks with those of the norms. Generating one token (eval, `seq_len == 1`), all ranks have that token: each uses its part of the weights, and the
    result is a partial sum.

    Raises ValueError for an unknown hidden_act or sizes below 1; sizes that do not divide raise as the linear layers do.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_shared_experts: int,
        hidden_act: str,
        dtype: torch.dtype = torch.float32,
        tensor_model_parallel_group: Any = None,
        reduce_dtype: torch.dtype = torch.float32,
        fused_gate_up_projection: bool = False,
        sequence_parallel_enabled: bool = False,
        transpose_weights: bool = False,
    ):
        super().__init__()
        for name, size in (
            ("hidden_size", hidden_size),
            ("intermediate_size", intermediate_size),
            ("num_shared_experts", num_shared_experts),
        ):
            if size < 1:
                raise ValueError(f"SharedExperts: {name}={size} must be at least 1")
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_shared_experts = num_shared_experts
        self.act_fn = activation(hidden_act)
        self.dtype = dtype
        self.reduce_dtype = reduce_dtype
        self.fused_gate_up_projection = fused_gate_up_projection
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.transpose_weights = transpose_weights
        self.shared_by = layer_groups.of_layer(tensor_model_parallel_group)
        self.tensor_parallel_group = (
            layer_groups.Members([[r] for r in range(world.size())]) if sequence_parallel_enabled else self.shared_by
        )
        self._make_layers(intermediate_size * num_shared_experts)

    def _make_layers(self, intermediate: int) -> None:
        common: dict[str, Any] = {
            "bias": False,
            "dtype": self.dtype,
            "reduce_dtype": self.reduce_dtype,
            "tensor_model_parallel_group": self.tensor_parallel_group,
        }
        column = ColumnParallelLinearTransposed if self.transpose_weights else ColumnParallelLinear
        row = RowParallelLinearTransposed if self.transpose_weights else RowParallelLinear
        if self.fused_gate_up_projection:
            self.gate_up_proj = column(self.hidden_size, 2 * intermediate, gather_output=False, stride=2, **common)
        else:
            self.gate_proj = column(self.hidden_size, intermediate, gather_output=False, **common)
            self.up_proj = column(self.hidden_size, intermediate, gather_output=False, **common)
        self.down_proj = row(intermediate, self.hidden_size, input_is_parallel=True, reduce_output=False, **common)
        if self.sequence_parallel_enabled:
            for parameter in self.parameters():
                parameter.sequence_parallel_enabled = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, seq_len: int | None = None) -> torch.Tensor:
        """x: [..., hidden_size]. seq_len: of the undivided sequence. Returns what the class says, of x's shape."""
        if self.sequence_parallel_enabled and seq_len == 1 and not self.training:
            return self._by_parts(x)
        if self.fused_gate_up_projection:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(self.act_fn(gate) * up)

    def _by_parts(self, x: torch.Tensor) -> torch.Tensor:
        """With this rank's part of weights that it has in full."""
        if self.fused_gate_up_projection:
            gate, up = self._usual(self.gate_up_proj).chunk(2, dim=0)
        else:
            gate, up = self._usual(self.gate_proj), self._usual(self.up_proj)
        inner = self.act_fn(F.linear(x, self._part(gate, 0))) * F.linear(x, self._part(up, 0))
        return F.linear(inner, self._part(self._usual(self.down_proj), 1))

    def _usual(self, layer: Any) -> torch.Tensor:
        """A layer's weight as [out, in]."""
        weight: torch.Tensor = layer.weight
        return weight.t() if self.transpose_weights else weight

    def _part(self, weight: torch.Tensor, dim: int) -> torch.Tensor:
        return regions.scatter(weight, dim, self.shared_by)

    def preshard_hook(self, model_state_dict: dict[str, Any], prefix: str) -> None:
        """With `transpose_weights`, turn the weights of a full checkpoint, which lie as [out, in]. prefix: "<name of this module>.weight"."""
        if not self.transpose_weights:
            return
        own = prefix.removesuffix("weight")
        for name, _ in self.named_children():
            key = f"{own}{name}.weight"
            if key in model_state_dict:
                model_state_dict[key] = model_state_dict[key].t().contiguous()
