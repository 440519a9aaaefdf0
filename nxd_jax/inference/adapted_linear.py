"""Parallel linear layers with room for several LoRA adapters, of which each row of a batch has one or none.

Legend: B rows, S tokens, N adapters and none, R rank, I inputs, O outputs of this rank.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from nxd_jax.inference.lora_serving import LoraServingConfig
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

FACTORS = ("lora_A", "lora_B")


def _add_factors(layer: Any, room: LoraServingConfig, inputs: int, outputs: int, cut: str, dim: int) -> None:
    """Zeros, at least float32, as PEFT keeps adapters: lora_A [N, R, I] and lora_B [N, O, R]. cut: the one that ranks share out, along `dim`."""
    shapes = ((room.max_lora_rank, inputs), (outputs, room.max_lora_rank))
    for name, shape in zip(FACTORS, shapes, strict=True):
        zeros = torch.zeros(room.max_loras + 1, *shape, dtype=torch.promote_types(layer.dtype, torch.float32), device=layer.device)
        layer.register_parameter(name, nn.Parameter(zeros))
        if name == cut:
            layer._partitions[name] = dataclasses.replace(layer._partition, dim=dim)
            layer._partitions[name].mark(getattr(layer, name))


def with_low_rank(
    out_BSO: torch.Tensor, x_BSI: torch.Tensor, a_NRI: torch.Tensor, b_NOR: torch.Tensor, adapter_ids: torch.Tensor
) -> torch.Tensor:
    """out + x A^T B^T with each row's own A and B, [B, S, O]; in the factors' dtype, and rounded once to that of out. adapter_ids: [B] int64."""
    a, b = a_NRI.index_select(0, adapter_ids), b_NOR.index_select(0, adapter_ids)
    return (out_BSO + torch.matmul(torch.matmul(x_BSI.to(a.dtype), a.transpose(1, 2)), b.transpose(1, 2))).to(out_BSO.dtype)


class ColumnWithAdapters(ColumnParallelLinear):
    """A `ColumnParallelLinear` without `gather_output`; forward takes adapter_ids [B] int64 (None: no row has one). All ranks have A, each its part of B."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def __init__(self, inputs: int, outputs: int, room: LoraServingConfig, **more: Any):
        super().__init__(inputs, outputs, **more)
        _add_factors(self, room, self.input_size, self.output_size_per_partition, "lora_B", 1)

    def forward(self, input: torch.Tensor, adapter_ids: torch.Tensor | None = None) -> torch.Tensor:
        """input: [B, S, input_size]; the result [B, S, output_size / tp]."""
        found: torch.Tensor = super().forward(input)
        return found if adapter_ids is None else with_low_rank(found, input, self.lora_A, self.lora_B, adapter_ids)


class RowWithAdapters(RowParallelLinear):
    """A `RowParallelLinear` with `input_is_parallel`; forward as in `ColumnWithAdapters`. Each rank has its part of A, all have B: what adapters add is
    summed together with the layer's own partial results."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def __init__(self, inputs: int, outputs: int, room: LoraServingConfig, **more: Any):
        super().__init__(inputs, outputs, **more)
        _add_factors(self, room, self.input_size_per_partition, self.output_size, "lora_A", 2)

    def forward(self, input: torch.Tensor, adapter_ids: torch.Tensor | None = None) -> torch.Tensor:
        """input: [B, S, input_size / tp]; the result [B, S, output_size]."""
        if adapter_ids is None:
            plain: torch.Tensor = super().forward(input)
            return plain
        out = self._multiply(input, self.weight, all_reduce=False, gather=False)
        out = with_low_rank(out, input, self.lora_A, self.lora_B, adapter_ids)
        out = self._rpl_maybe_reduce_output(out)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def column(name: str, inputs: int, outputs: int, room: LoraServingConfig | None, **more: Any) -> ColumnParallelLinear:
    """A layer whose outputs ranks share out, with room for adapters if `name` is one of their target modules."""
    if room is None or name not in room.target_modules:
        return ColumnParallelLinear(inputs, outputs, gather_output=False, **more)
    return ColumnWithAdapters(inputs, outputs, gather_output=False, room=room, **more)


def row(name: str, inputs: int, outputs: int, room: LoraServingConfig | None, **more: Any) -> RowParallelLinear:
    """A layer whose inputs ranks share out, as `column`."""
    if room is None or name not in room.target_modules:
        return RowParallelLinear(inputs, outputs, input_is_parallel=True, **more)
    return RowWithAdapters(inputs, outputs, input_is_parallel=True, room=room, **more)


def through(layer: nn.Module, x: torch.Tensor, adapter_ids: torch.Tensor | None) -> torch.Tensor:
    """A layer's result for x [B, S, inputs], of rows with these adapters where it has room for some."""
    found: torch.Tensor = layer(x, adapter_ids) if isinstance(layer, (ColumnWithAdapters, RowWithAdapters)) else layer(x)
    return found
