"""`neuronx_distributed.quantization.quantization_config`: how weights and activations are quantized, as enums and dicts."""

from __future__ import annotations

import enum
import math
from enum import Enum
from typing import Any, TypedDict

import torch

from torch_bridge.config import variables

FP8_MAX = variables.VARIABLES["NXD_JAX_FP8_MAX"]


class MyEnumMeta(enum.EnumMeta):
    """An enum of which `value in Enum` can be asked, on every Python."""

    def __contains__(cls, item: object) -> bool:
        try:
            cls(item)
        except ValueError:
            return False
        return True


class DtypeBound(Enum):
    """The largest and the least number of a quantized dtype.

    F8E4M3 is Neuron's format, with an exponent for infinities as in IEEE 754: up to 240. F8E4M3FN is OCP's, which torch and GPUs have: up to 448.
    """

    F8E4M3_MAX = 240.0
    F8E4M3_MIN = -240.0
    INT8_MAX = 127
    INT8_MIN = -128
    F8E4M3FN_MAX = torch.finfo(torch.float8_e4m3fn).max
    F8E4M3FN_MIN = torch.finfo(torch.float8_e4m3fn).min
    F8E5M2_MAX = torch.finfo(torch.float8_e5m2).max
    F8E5M2_MIN = torch.finfo(torch.float8_e5m2).min
    F4E2M1FN_X2_MAX = 6.0
    F4E2M1FN_X2_MIN = -6.0
    F8E8M0_MAX = 2.0**127
    F8E8M0_MIN = 2.0**-127
    BFLOAT16_MAX = torch.finfo(torch.bfloat16).max
    BFLOAT16_MIN = torch.finfo(torch.bfloat16).min
    FLOAT16_MAX = torch.finfo(torch.float16).max
    FLOAT16_MIN = torch.finfo(torch.float16).min

    @staticmethod
    def from_torch_dtype(dtype: torch.dtype) -> tuple[float, float]:
        """(largest, least) of int8, float8_e4m3fn, float8_e5m2, bfloat16 or float16; ValueError for others.

        That of float8_e4m3fn is 240, as on Neuron, unless the environment says `NXD_JAX_FP8_MAX=448`.
        """
        name = _BOUNDS.get(dtype)
        if name is None:
            raise ValueError(f"{dtype} has no quantization bounds: use one of {', '.join(map(str, _BOUNDS))}")
        if dtype is torch.float8_e4m3fn and FP8_MAX.now() == "448":
            name = "F8E4M3FN"
        return DtypeBound[f"{name}_MAX"].value, DtypeBound[f"{name}_MIN"].value


_BOUNDS = {
    torch.int8: "INT8",
    torch.float8_e4m3fn: "F8E4M3",
    torch.float8_e5m2: "F8E5M2",
    torch.bfloat16: "BFLOAT16",
    torch.float16: "FLOAT16",
}


class QuantizationType(Enum, metaclass=MyEnumMeta):
    """What shares a scale: all of a tensor, an output channel, a key's head (of a KV cache), a block, or an output channel of one expert."""

    PER_TENSOR_SYMMETRIC = "per_tensor_symmetric"
    PER_CHANNEL_SYMMETRIC = "per_channel_symmetric"
    PER_KEY_SYMMETRIC = "per_key_symmetric"
    BLOCKWISE_SYMMETRIC = "blockwise_symmetric"
    EXPERT_WISE_PER_CHANNEL_SYMMETRIC = "expert_wise_per_channel_symmetric"


class ActivationQuantizationType(Enum, metaclass=MyEnumMeta):
    """How a layer's input is quantized.

    DYNAMIC: to float8_e4m3fn, with a scale for each token. STATIC: to the weight's dtype, with the layer's `input_scale`.
    """

    DYNAMIC = "dynamic"
    STATIC = "static"
    NONE = None


class _NamedDtypes(Enum, metaclass=MyEnumMeta):
    @classmethod
    def has_dtype(cls, dtype_string: str) -> None:
        """Raise AssertionError unless a name, in any case, is one of these."""
        if dtype_string.upper() not in cls.__members__:
            raise AssertionError(f"{dtype_string} is not a valid {cls.__name__}: use one of {', '.join(cls.__members__)}")

    @classmethod
    def get_dtype(cls, dtype_string: str) -> torch.dtype:
        """The torch dtype of a name such as "f8e4m3"; AssertionError as in `has_dtype`."""
        cls.has_dtype(dtype_string)
        dtype: torch.dtype = cls[dtype_string.upper()].value
        return dtype


class QuantizedDtype(_NamedDtypes):
    """What weights are quantized to. Names with _X4 have four numbers in one; tensors of them can be dequantized (F4E2M1FN_X4), layers do not take them."""

    INT8 = torch.int8
    F8E4M3 = torch.float8_e4m3fn
    F8E4M3FN = torch.float8_e4m3fn
    F8E5M2 = torch.float8_e5m2
    F4E2M1FN_X4 = torch.uint16
    F8E4M3FN_X4 = torch.uint32
    F8E5M2_X4 = torch.uint32

    def is_float(self) -> bool:
        """Whether it is no integer format."""
        return self is not QuantizedDtype.INT8

    def get_packed_count(self) -> int:
        """How many numbers one element holds: 4 or 1."""
        return 4 if self in (QuantizedDtype.F4E2M1FN_X4, QuantizedDtype.F8E4M3FN_X4) else 1


class ScaleDtype(_NamedDtypes):
    """What scales are kept in: float32, or bytes that are exponents: 2 ** (byte - 127), and 255 is NaN (OCP's E8M0)."""

    F32 = torch.float32
    F8E8M0 = torch.uint8

    def get_default_scale(self) -> float:
        """What stands for a scale of 1."""
        return 127 if self is ScaleDtype.F8E8M0 else 1.0


class KVQuantizationConfig:
    """How keys and values of a cache are quantized.

    k_quant_method, v_quant_method: a `QuantizationType`, default per tensor. quant_dtype: default float8_e4m3fn. direct_cast: cast without a scale
    (default True). Raises AssertionError for direct_cast with another method than per tensor, TypeError for other arguments.
    """

    def __init__(
        self,
        *,
        k_quant_method: QuantizationType = QuantizationType.PER_TENSOR_SYMMETRIC,
        v_quant_method: QuantizationType = QuantizationType.PER_TENSOR_SYMMETRIC,
        quant_dtype: torch.dtype = torch.float8_e4m3fn,
        direct_cast: bool = True,
    ):
        self.k_quant_method = k_quant_method
        self.v_quant_method = v_quant_method
        self.quant_dtype = quant_dtype
        self.direct_cast = direct_cast
        plain = QuantizationType.PER_TENSOR_SYMMETRIC
        if direct_cast and not k_quant_method == v_quant_method == plain:
            raise AssertionError(
                f"direct_cast=True has no scales, so both methods must be PER_TENSOR_SYMMETRIC; got {k_quant_method} and {v_quant_method}: "
                "pass direct_cast=False"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KVQuantizationConfig) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))


# -- configurations of layers ------------------------------------------------------------------------


class BASE_QCONFIG_DICT_TYPE(TypedDict):
    """What every configuration says. clamp_bound: the largest absolute activation that a dynamic scale covers; infinity: no limit."""

    quantization_type: QuantizationType
    quantized_dtype: QuantizedDtype
    activation_quantization_type: ActivationQuantizationType
    clamp_bound: float


class PER_CHANNEL_QCONFIG_DICT_TYPE(BASE_QCONFIG_DICT_TYPE):
    """quantization_per_channel_axis: the weight's output dim; None: what the layer has (0, of experts 2)."""

    quantization_per_channel_axis: int | None


class EXPERT_WISE_PER_CHANNEL_QCONFIG_DICT_TYPE(PER_CHANNEL_QCONFIG_DICT_TYPE):
    """As `PER_CHANNEL_QCONFIG_DICT_TYPE`, for layers of experts."""


class BLOCKWISE_QCONFIG_DICT_TYPE(BASE_QCONFIG_DICT_TYPE):
    """block_axis, block_size: dims of the weight that are cut into blocks, and how many entries a block has along each. scale_dtype: see `ScaleDtype`."""

    block_axis: list[int] | None
    block_size: list[int] | None
    scale_dtype: ScaleDtype


def _config(kind: QuantizationType, dtype: QuantizedDtype, **more: Any) -> dict[str, Any]:
    base = dict(
        quantization_type=kind, quantized_dtype=dtype, activation_quantization_type=ActivationQuantizationType.NONE, clamp_bound=math.inf
    )
    return {**base, **more}


def get_default_custom_qconfig_dict() -> BASE_QCONFIG_DICT_TYPE:
    """int8 with one scale for a weight."""
    return BASE_QCONFIG_DICT_TYPE(**_config(QuantizationType.PER_TENSOR_SYMMETRIC, QuantizedDtype.INT8))  # type: ignore[typeddict-item]


def get_default_per_channel_custom_qconfig_dict() -> PER_CHANNEL_QCONFIG_DICT_TYPE:
    """int8 with a scale for each output channel."""
    made = _config(QuantizationType.PER_CHANNEL_SYMMETRIC, QuantizedDtype.INT8, quantization_per_channel_axis=None)
    return PER_CHANNEL_QCONFIG_DICT_TYPE(**made)  # type: ignore[typeddict-item]


def get_default_blockwise_custom_qconfig_dict() -> BLOCKWISE_QCONFIG_DICT_TYPE:
    """F8E4M3 with a float32 scale for each block; set `block_axis` and `block_size`."""
    made = _config(
        QuantizationType.BLOCKWISE_SYMMETRIC, QuantizedDtype.F8E4M3, block_axis=None, block_size=None, scale_dtype=ScaleDtype.F32
    )
    return BLOCKWISE_QCONFIG_DICT_TYPE(**made)  # type: ignore[typeddict-item]


def get_default_expert_wise_per_channel_custom_qconfig_dict() -> EXPERT_WISE_PER_CHANNEL_QCONFIG_DICT_TYPE:
    """F8E4M3 with a scale for each output channel of each expert."""
    made = _config(QuantizationType.EXPERT_WISE_PER_CHANNEL_SYMMETRIC, QuantizedDtype.F8E4M3, quantization_per_channel_axis=None)
    return EXPERT_WISE_PER_CHANNEL_QCONFIG_DICT_TYPE(**made)  # type: ignore[typeddict-item]


_DEFAULT_CUSTOM_QCONFIG_DICT = get_default_custom_qconfig_dict()
_DEFAULT_PER_CHANNEL_QCONFIG_DICT = get_default_per_channel_custom_qconfig_dict()
_DEFAULT_BLOCKWISE_QCONFIG_DICT = get_default_blockwise_custom_qconfig_dict()
_DEFAULT_EXPERT_WISE_PER_CHANNEL_QCONFIG_DICT = get_default_expert_wise_per_channel_custom_qconfig_dict()


def validate_block_axis_size(block_axis: list[int] | None, block_size: list[int] | None) -> tuple[list[int], list[int]]:
    """Both lists; AssertionError if one is missing or they differ in length."""
    if block_axis is None or block_size is None or len(block_axis) != len(block_size):
        raise AssertionError(
            f"blockwise quantization needs block_axis and block_size, lists of the same length (such as [0, 1] and [128, 128]); got {block_axis} "
            f"and {block_size}"
        )
    return block_axis, block_size


def is_ocp_mx_quantized(q_type: QuantizationType, q_dtype: QuantizedDtype | torch.dtype, scale_dtype: ScaleDtype | torch.dtype) -> bool:
    """Whether it is OCP's Microscaling: blocks of packed numbers with exponents as scales."""
    if q_type != QuantizationType.BLOCKWISE_SYMMETRIC or q_dtype not in QuantizedDtype or scale_dtype not in ScaleDtype:
        return False
    return QuantizedDtype(q_dtype).get_packed_count() == 4 and ScaleDtype(scale_dtype) is ScaleDtype.F8E8M0
