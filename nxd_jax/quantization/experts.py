"""Quantized linear layers of experts, whose weights expert and tensor parallel ranks share out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.types import Device

from nxd_jax.modules.moe.grouped_product import grouped_product
from nxd_jax.modules.moe.moe_parallel_layers import (
    Distribution,
    ExpertFusedColumnParallelLinear,
    ExpertFusedLinear,
    ExpertFusedRowParallelLinear,
)
from nxd_jax.quantization.base import BaseQuantizeParallelLinear, Config, logger
from nxd_jax.quantization.linear import check_class, of_config
from nxd_jax.quantization.products import product
from nxd_jax.quantization.quantization_config import (
    _DEFAULT_CUSTOM_QCONFIG_DICT,
    ActivationQuantizationType,
    QuantizationType,
    QuantizedDtype,
    ScaleDtype,
)
from nxd_jax.tensor_parallel.casting import cast_if_autocast_enabled
from nxd_jax.tensor_parallel.matmul import without_autocast
from torch_bridge.mesh.groups import GroupLike


class _Experts(BaseQuantizeParallelLinear, ExpertFusedLinear):
    """What the two layers have in common."""

    _channel_axis = 2

    def _set_fused(self, is_fused_gate_up: bool, rank_ordering: Sequence[int] | None) -> None:
        self.is_fused_gate_up = is_fused_gate_up
        if rank_ordering is not None:
            raise NotImplementedError(
                f"{type(self).__name__} does not take rank_ordering, which layers of experts do not have here: leave it out"
            )

    def initialize_weight_and_bias(self) -> None:
        super().initialize_weight_and_bias()
        partition = self._partitions.get("scale")
        if partition is not None and partition.entries is not None:
            for name in ("expert_model_parallel", "expert_distribution", "is_prefill"):
                if hasattr(self.weight, name):
                    setattr(self.scale, name, getattr(self.weight, name))

    def _product(self, x: torch.Tensor, expert_indices: torch.Tensor | None, all_reduce: bool) -> torch.Tensor:
        return product(self, x, self._chosen(self.weight, expert_indices), self._chosen_scale(expert_indices), all_reduce)

    def _chosen_scale(self, expert_indices: torch.Tensor | None) -> torch.Tensor:
        """The scale of some experts, or the one that all have."""
        own = self.quantization_type in (QuantizationType.EXPERT_WISE_PER_CHANNEL_SYMMETRIC, QuantizationType.BLOCKWISE_SYMMETRIC)
        return self._chosen(self.scale, expert_indices) if own else self.scale

    def _over_result(self, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """A scale [1] or [e or 1, 1, out] such as it broadcasts with a result [e, ..., out] of x [e, ..., in]."""
        return scale if scale.dim() == 1 else scale.reshape(scale.shape[0], *[1] * (x.dim() - 2), scale.shape[-1])

    def _grouped(self, x: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Rows that are sorted by expert times the dequantized weight."""
        x, bias = cast_if_autocast_enabled(x, bias)
        with without_autocast():
            return grouped_product(x, self.dequantized_weight(x.dtype), ends, None if bias is None else bias.to(x.dtype))


class QuantizedExpertFusedColumnParallel(_Experts, ExpertFusedColumnParallelLinear):
    """`ExpertFusedColumnParallelLinear` with a quantized weight: a rank has [num_experts / ep, input_size, output_size / tp].

    quantization_type: "per_tensor_symmetric" (scale [1]), "per_channel_symmetric" ([1, 1, output_size / tp]: experts share them),
    "expert_wise_per_channel_symmetric" ([num_experts / ep, 1, output_size / tp]) or "blockwise_symmetric" (blocks of dims 1 and 2).
    quantization_per_channel_axis: 2, or None. is_fused_gate_up: kept as an attribute, without effect. The other arguments of quantization are those of
    `QuantizedColumnParallel`, the rest those of the float layer. Inputs are not quantized.

    Raises NotImplementedError for `rank_ordering`; see `BaseQuantizeParallelLinear` for state and other errors.
    """

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        bias: bool = False,
        quantization_type: QuantizationType | str = "per_tensor_symmetric",
        dtype: torch.dtype = torch.float32,
        quantized_dtype: QuantizedDtype | torch.dtype = QuantizedDtype.INT8,
        device: Device = None,
        stride: int = 1,
        keep_master_weight: bool = False,
        quantization_per_channel_axis: int | None = None,
        tensor_model_parallel_group: GroupLike = None,
        block_axis: list[int] | None = None,
        block_size: list[int] | None = None,
        scale_dtype: ScaleDtype | torch.dtype = torch.float32,
        expert_model_parallel_group: GroupLike = None,
        is_prefill: bool = True,
        rank_ordering: Sequence[int] | None = None,
        is_fused_gate_up: bool = False,
        expert_distribution: Distribution | None = None,
        reduce_dtype: torch.dtype = torch.float32,
    ):
        self._set_fused(is_fused_gate_up, rank_ordering)
        self._set_quantization(
            quantization_type, quantized_dtype, dtype, quantization_per_channel_axis, block_axis, block_size, scale_dtype
        )
        ExpertFusedColumnParallelLinear.__init__(
            self,
            num_experts,
            input_size,
            output_size,
            bias=bias,
            dtype=dtype,
            device=device,
            stride=stride,
            keep_master_weight=keep_master_weight,
            tensor_model_parallel_group=tensor_model_parallel_group,
            expert_model_parallel_group=expert_model_parallel_group,
            expert_distribution=expert_distribution,
            is_prefill=is_prefill,
            reduce_dtype=reduce_dtype,
        )

    @classmethod
    def from_float(cls, mod: Any, q_config: Config = _DEFAULT_CUSTOM_QCONFIG_DICT, quantize_weights: bool = False) -> Any:
        """The quantized layer of an `ExpertFusedColumnParallelLinear`; otherwise as `QuantizedColumnParallel.from_float`."""
        check_class(mod, "ExpertFusedColumnParallelLinear")
        return cls(**_of_experts(mod, q_config))._taking(mod, quantize_weights)


class QuantizedExpertFusedRowParallel(_Experts, ExpertFusedRowParallelLinear):
    """`ExpertFusedRowParallelLinear` with a quantized weight: a rank has [num_experts / ep, input_size / tp, output_size].

    Scales of output channels all tensor parallel ranks have whole; they multiply a rank's own result, before the sum over ranks. reduce_output: make that
    sum here (default False: whoever combines experts' results does). The others are as in `QuantizedExpertFusedColumnParallel`, and so is what is raised.
    """

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        reduce_output: bool = False,
        bias: bool = False,
        quantization_type: QuantizationType | str = "per_tensor_symmetric",
        quantized_dtype: QuantizedDtype | torch.dtype = QuantizedDtype.INT8,
        dtype: torch.dtype = torch.float32,
        device: Device = None,
        stride: int = 1,
        keep_master_weight: bool = False,
        quantization_per_channel_axis: int | None = None,
        tensor_model_parallel_group: GroupLike = None,
        block_axis: list[int] | None = None,
        block_size: list[int] | None = None,
        scale_dtype: ScaleDtype | torch.dtype = torch.float32,
        expert_model_parallel_group: GroupLike = None,
        is_prefill: bool = True,
        rank_ordering: Sequence[int] | None = None,
        is_fused_gate_up: bool = False,
        input_is_parallel: bool = True,
        expert_distribution: Distribution | None = None,
        reduce_dtype: torch.dtype = torch.float32,
    ):
        self._set_fused(is_fused_gate_up, rank_ordering)
        self._set_quantization(
            quantization_type, quantized_dtype, dtype, quantization_per_channel_axis, block_axis, block_size, scale_dtype
        )
        ExpertFusedRowParallelLinear.__init__(
            self,
            num_experts,
            input_size,
            output_size,
            bias=bias,
            reduce_output=reduce_output,
            input_is_parallel=input_is_parallel,
            dtype=dtype,
            device=device,
            stride=stride,
            keep_master_weight=keep_master_weight,
            tensor_model_parallel_group=tensor_model_parallel_group,
            expert_model_parallel_group=expert_model_parallel_group,
            expert_distribution=expert_distribution,
            is_prefill=is_prefill,
            reduce_dtype=reduce_dtype,
        )

    @classmethod
    def from_float(cls, mod: Any, q_config: Config = _DEFAULT_CUSTOM_QCONFIG_DICT, quantize_weights: bool = False) -> Any:
        """The quantized layer of an `ExpertFusedRowParallelLinear`; otherwise as `QuantizedColumnParallel.from_float`."""
        check_class(mod, "ExpertFusedRowParallelLinear")
        more = dict(reduce_output=mod.reduce_output, input_is_parallel=mod.input_is_parallel)
        return cls(**_of_experts(mod, q_config), **more)._taking(mod, quantize_weights)


def _of_experts(mod: Any, q_config: Config) -> dict[str, Any]:
    """The arguments that a float layer and a configuration say. Inputs of experts are not quantized: a warning says so where they are asked to be."""
    config = of_config(q_config)
    kind = ActivationQuantizationType(config.pop("activation_quantization_type", None))
    config.pop("clamp_bound", None)
    if kind is not ActivationQuantizationType.NONE:
        logger.warning(
            "%s: inputs of experts are not quantized, activation_quantization_type=%s has no effect", type(mod).__name__, kind.value
        )
    return dict(
        num_experts=mod.num_experts,
        input_size=mod.input_size,
        output_size=mod.output_size,
        bias=mod.bias is not None,
        dtype=mod.weight.dtype,
        device=mod.weight.device,
        stride=mod.stride,
        keep_master_weight=mod.keep_master_weight,
        tensor_model_parallel_group=mod.tensor_parallel_group,
        expert_model_parallel_group=mod._entries.group,
        expert_distribution=mod.expert_distribution,
        is_prefill=mod.is_prefill,
        reduce_dtype=mod.reduce_dtype,
        **config,
    )
