"""Quantized linear layers whose weights tensor parallel ranks share out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.types import Device

from nxd_jax.quantization.base import BaseQuantizeParallelLinear, Config
from nxd_jax.quantization.products import product
from nxd_jax.quantization.quantization_config import (
    _DEFAULT_CUSTOM_QCONFIG_DICT,
    ActivationQuantizationType,
    QuantizationType,
    QuantizedDtype,
    ScaleDtype,
)
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from torch_bridge.mesh.groups import GroupLike


class _Linear(BaseQuantizeParallelLinear):
    """What the two layers have in common."""

    def _multiply(self, input: torch.Tensor, weight: torch.Tensor, all_reduce: bool, gather: bool) -> torch.Tensor:
        return product(self, input, weight, self.scale, all_reduce, gather)

    def _over_result(self, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """A scale [1] or [out, 1] such as it broadcasts with a result [..., out]."""
        return scale.reshape(-1)


class QuantizedColumnParallel(_Linear, ColumnParallelLinear):
    """`ColumnParallelLinear` with a quantized weight: each rank has W_i of shape [output_size / tp, input_size], and its part of the scale.

    quantization_type: "per_tensor_symmetric" (scale [1], all ranks have it), "per_channel_symmetric" ([output_size / tp, 1]) or "blockwise_symmetric" (an
    entry for each of a rank's blocks). quantized_dtype: int8, float8_e4m3fn or float8_e5m2. dtype: of the bias. quantization_per_channel_axis: 0, or None.
    block_axis, block_size: dims of the weight and how many entries a block has along each (a last one may have fewer, along dims that ranks do not share out).
    scale_dtype: float32, or uint8 for exponents. activation_quantization_type: "dynamic" quantizes inputs to float8_e4m3fn, each token with a scale of its own;
    "static" to the weight's dtype, with the parameter `input_scale`. clamp_bound: the largest absolute input that a dynamic scale covers.
    The others are as in `ColumnParallelLinear`; padding is allowed in training mode, too.

    Results are those of the dequantized layer: numbers are multiplied as they are, results are scaled before they are gathered. State and errors: see
    `BaseQuantizeParallelLinear`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        quantization_type: QuantizationType | str = "per_tensor_symmetric",
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        quantized_dtype: QuantizedDtype | torch.dtype = QuantizedDtype.INT8,
        device: Device = None,
        stride: int = 1,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        quantization_per_channel_axis: int | None = None,
        block_axis: list[int] | None = None,
        block_size: list[int] | None = None,
        scale_dtype: ScaleDtype | torch.dtype = torch.float32,
        tensor_model_parallel_group: GroupLike = None,
        pad: bool = False,
        activation_quantization_type: ActivationQuantizationType | str | None = None,
        clamp_bound: float = math.inf,
        rank_ordering: Sequence[int] | None = None,
        **float_layer: Any,
    ):
        self._set_quantization(
            quantization_type,
            quantized_dtype,
            dtype,
            quantization_per_channel_axis,
            *(block_axis, block_size, scale_dtype),
            *(activation_quantization_type, clamp_bound),
        )
        ColumnParallelLinear.__init__(
            self,
            input_size,
            output_size,
            bias=bias,
            gather_output=gather_output,
            dtype=dtype,
            device=device,
            stride=stride,
            sequence_parallel_enabled=sequence_parallel_enabled,
            sequence_dimension=sequence_dimension,
            keep_master_weight=keep_master_weight,
            pad=pad,
            tensor_model_parallel_group=tensor_model_parallel_group,
            rank_ordering=rank_ordering,
            **float_layer,
        )

    def forward(self, input: torch.Tensor, slice_indices: torch.Tensor | None = None) -> Any:
        """As `ColumnParallelLinear.forward`. Raises NotImplementedError for `slice_indices`."""
        if slice_indices is not None:
            raise NotImplementedError(
                "QuantizedColumnParallel computes all of its outputs: leave out slice_indices, and select from the result"
            )
        return super().forward(input)

    @classmethod
    def from_float(cls, mod: Any, q_config: Config = _DEFAULT_CUSTOM_QCONFIG_DICT, quantize_weights: bool = False) -> Any:
        """The quantized layer of a `ColumnParallelLinear` (AssertionError for another class). q_config: a dict of `quantization_config`'s functions.

        Its weight is zeros, for a quantized checkpoint to be loaded, as in NxD; quantize_weights: the float layer's, quantized, and its bias.
        """
        check_class(mod, "ColumnParallelLinear")
        made = cls(
            input_size=mod.input_size,
            output_size=mod.output_size - mod.pad_size,
            gather_output=mod.gather_output,
            pad_alignment_size_per_rank=mod.pad_alignment_size_per_rank,
            keep_padded_output=mod.keep_padded_output,
            **_of_linear(mod),
            **of_config(q_config),
        )
        return made._taking(mod, quantize_weights)


class QuantizedRowParallel(_Linear, RowParallelLinear):
    """`RowParallelLinear` with a quantized weight: each rank has W_i of shape [output_size, input_size / tp].

    quantization_type: scales of "per_tensor_symmetric" ([1]) and "per_channel_symmetric" ([output_size, 1]) all ranks have whole; they multiply a rank's own
    result, before the sum over ranks. Arguments of quantization are those of `QuantizedColumnParallel`, the others those of `RowParallelLinear`.

    Raises RuntimeError for sequence_parallel_enabled without input_is_parallel; see `BaseQuantizeParallelLinear` for state and other errors.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        quantization_type: QuantizationType | str = "per_tensor_symmetric",
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        quantized_dtype: QuantizedDtype | torch.dtype = QuantizedDtype.INT8,
        device: Device = None,
        stride: int = 1,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        quantization_per_channel_axis: int | None = None,
        reduce_output: bool = True,
        tensor_model_parallel_group: GroupLike = None,
        pad: bool = False,
        activation_quantization_type: ActivationQuantizationType | str | None = None,
        clamp_bound: float = math.inf,
        block_axis: list[int] | None = None,
        block_size: list[int] | None = None,
        scale_dtype: ScaleDtype | torch.dtype = torch.float32,
        rank_ordering: Sequence[int] | None = None,
        **float_layer: Any,
    ):
        self._set_quantization(
            quantization_type,
            quantized_dtype,
            dtype,
            quantization_per_channel_axis,
            *(block_axis, block_size, scale_dtype),
            *(activation_quantization_type, clamp_bound),
        )
        RowParallelLinear.__init__(
            self,
            input_size,
            output_size,
            bias=bias,
            input_is_parallel=input_is_parallel,
            dtype=dtype,
            device=device,
            stride=stride,
            sequence_parallel_enabled=sequence_parallel_enabled,
            sequence_dimension=sequence_dimension,
            keep_master_weight=keep_master_weight,
            pad=pad,
            reduce_output=reduce_output,
            tensor_model_parallel_group=tensor_model_parallel_group,
            rank_ordering=rank_ordering,
            **float_layer,
        )

    @classmethod
    def from_float(cls, mod: Any, q_config: Config = _DEFAULT_CUSTOM_QCONFIG_DICT, quantize_weights: bool = False) -> Any:
        """The quantized layer of a `RowParallelLinear`; otherwise as `QuantizedColumnParallel.from_float`."""
        check_class(mod, "RowParallelLinear")
        made = cls(
            input_size=mod.input_size - mod.pad_size,
            output_size=mod.output_size,
            input_is_parallel=mod.input_is_parallel,
            reduce_output=mod.reduce_output,
            **_of_linear(mod),
            **of_config(q_config),
        )
        return made._taking(mod, quantize_weights)


def check_class(mod: Any, name: str) -> None:
    """Raise AssertionError unless a module's class has a name."""
    if type(mod).__name__ != name:
        raise AssertionError(
            f"{name} expected, got {type(mod).__name__}: a layer that derives from it needs a `mapping` of its own in quantize.convert"
        )


def of_config(q_config: Config) -> dict[str, Any]:
    """The arguments of a layer that a configuration says."""
    names = ("quantization_type", "quantized_dtype", "quantization_per_channel_axis", "block_axis", "block_size", "scale_dtype",
             "activation_quantization_type", "clamp_bound")  # fmt: skip
    unknown = sorted(set(q_config) - set(names))
    missing = sorted({"quantization_type", "quantized_dtype"} - set(q_config))
    if unknown or missing:
        raise ValueError(
            f"a quantization config has {', '.join(names)}; unknown: {', '.join(unknown) or 'none'}, missing: {', '.join(missing) or 'none'}. "
            "get_default_custom_qconfig_dict() makes one"
        )
    return dict(q_config)


def _of_linear(mod: Any) -> dict[str, Any]:
    """The arguments that both float layers have."""
    return dict(
        bias=mod.bias is not None,
        dtype=mod.weight.dtype,
        device=mod.weight.device,
        stride=mod.stride,
        sequence_parallel_enabled=mod.sequence_parallel_enabled,
        sequence_dimension=mod.sequence_dimension,
        keep_master_weight=mod.keep_master_weight,
        skip_bias_add=mod.skip_bias_add,
        pad=mod.pad,
        tensor_model_parallel_group=mod.tensor_parallel_group,
        reduce_dtype=mod.reduce_dtype,
        rank_ordering=mod.rank_ordering,
    )
