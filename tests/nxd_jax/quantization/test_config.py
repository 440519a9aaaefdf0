"""Enums, bounds and configurations."""

from __future__ import annotations

import math

import pytest
import torch

from nxd_jax.quantization import quantization_config as config
from nxd_jax.quantization.quantization_config import (
    ActivationQuantizationType,
    DtypeBound,
    KVQuantizationConfig,
    QuantizationType,
    QuantizedDtype,
    ScaleDtype,
)


def test_neurons_float8_goes_up_to_240(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DtypeBound.from_torch_dtype(torch.float8_e4m3fn) == (240.0, -240.0)
    monkeypatch.setenv("NXD_JAX_FP8_MAX", "448")
    assert DtypeBound.from_torch_dtype(torch.float8_e4m3fn) == (448.0, -448.0)
    assert DtypeBound.from_torch_dtype(torch.float8_e5m2) == (57344.0, -57344.0)
    monkeypatch.setenv("NXD_JAX_FP8_MAX", "300")
    with pytest.raises(ValueError, match="NXD_JAX_FP8_MAX='300': must be one of 240, 448"):
        DtypeBound.from_torch_dtype(torch.float8_e4m3fn)


def test_bounds() -> None:
    assert DtypeBound.from_torch_dtype(torch.int8) == (127, -128)
    assert DtypeBound.from_torch_dtype(torch.bfloat16)[0] == torch.finfo(torch.bfloat16).max
    assert DtypeBound.from_torch_dtype(torch.float16) == (65504.0, -65504.0)
    with pytest.raises(ValueError, match=r"torch.int32 has no quantization bounds: use one of torch.int8, torch.float8_e4m3fn"):
        DtypeBound.from_torch_dtype(torch.int32)


def test_enums() -> None:
    assert "per_channel_symmetric" in QuantizationType and "scalar" not in QuantizationType
    assert torch.int8 in QuantizedDtype and torch.float16 not in QuantizedDtype
    assert ActivationQuantizationType(None) is ActivationQuantizationType.NONE and ActivationQuantizationType("static").value == "static"
    assert QuantizedDtype.get_dtype("f8e4m3") is torch.float8_e4m3fn and QuantizedDtype.F8E4M3FN is QuantizedDtype.F8E4M3
    assert QuantizedDtype.F8E5M2.is_float() and not QuantizedDtype.INT8.is_float()
    assert [d.get_packed_count() for d in (QuantizedDtype.INT8, QuantizedDtype.F4E2M1FN_X4, QuantizedDtype.F8E5M2_X4)] == [1, 4, 4]
    assert ScaleDtype.get_dtype("f8e8m0") is torch.uint8 and [s.get_default_scale() for s in ScaleDtype] == [1.0, 127]
    with pytest.raises(AssertionError, match="int4 is not a valid QuantizedDtype: use one of INT8, F8E4M3"):
        QuantizedDtype.has_dtype("int4")


def test_default_configs() -> None:
    made = config.get_default_custom_qconfig_dict()
    assert made == {
        "quantization_type": QuantizationType.PER_TENSOR_SYMMETRIC,
        "quantized_dtype": QuantizedDtype.INT8,
        "activation_quantization_type": ActivationQuantizationType.NONE,
        "clamp_bound": math.inf,
    }
    made["quantized_dtype"] = QuantizedDtype.F8E5M2
    assert config.get_default_custom_qconfig_dict()["quantized_dtype"] is QuantizedDtype.INT8
    per_channel = config.get_default_per_channel_custom_qconfig_dict()
    assert (
        per_channel["quantization_type"] is QuantizationType.PER_CHANNEL_SYMMETRIC and per_channel["quantization_per_channel_axis"] is None
    )
    blockwise = config.get_default_blockwise_custom_qconfig_dict()
    assert (blockwise["block_axis"], blockwise["block_size"], blockwise["scale_dtype"]) == (None, None, ScaleDtype.F32)
    experts = config.get_default_expert_wise_per_channel_custom_qconfig_dict()
    assert experts["quantization_type"] is QuantizationType.EXPERT_WISE_PER_CHANNEL_SYMMETRIC
    assert blockwise["quantized_dtype"] is experts["quantized_dtype"] is QuantizedDtype.F8E4M3


@pytest.mark.parametrize("axis, size", [(None, [1]), ([0], None), ([0], [1, 2])])
def test_blocks_need_both_lists(axis: list[int] | None, size: list[int] | None) -> None:
    with pytest.raises(AssertionError, match="needs block_axis and block_size, lists of the same length"):
        config.validate_block_axis_size(axis, size)
    assert config.validate_block_axis_size([0, 1], [2, 4]) == ([0, 1], [2, 4])


def test_kv_config() -> None:
    made = KVQuantizationConfig()
    assert made.k_quant_method is made.v_quant_method is QuantizationType.PER_TENSOR_SYMMETRIC
    assert made.quant_dtype is torch.float8_e4m3fn and made.direct_cast
    other = KVQuantizationConfig(v_quant_method=QuantizationType.PER_KEY_SYMMETRIC, direct_cast=False)
    assert other.v_quant_method is QuantizationType.PER_KEY_SYMMETRIC
    with pytest.raises(AssertionError, match="direct_cast=True has no scales.*PER_KEY_SYMMETRIC.*pass direct_cast=False"):
        KVQuantizationConfig(k_quant_method=QuantizationType.PER_KEY_SYMMETRIC)
    with pytest.raises(TypeError, match="quant_type"):
        KVQuantizationConfig(quant_type=torch.int8)  # type: ignore[call-arg]


def test_what_is_microscaling() -> None:
    blockwise = QuantizationType.BLOCKWISE_SYMMETRIC
    assert config.is_ocp_mx_quantized(blockwise, QuantizedDtype.F4E2M1FN_X4, ScaleDtype.F8E8M0)
    assert config.is_ocp_mx_quantized(blockwise, torch.uint32, torch.uint8)
    assert not config.is_ocp_mx_quantized(blockwise, QuantizedDtype.F8E4M3, ScaleDtype.F8E8M0)
    assert not config.is_ocp_mx_quantized(blockwise, QuantizedDtype.F4E2M1FN_X4, torch.float32)
    assert not config.is_ocp_mx_quantized(QuantizationType.PER_TENSOR_SYMMETRIC, torch.uint16, torch.uint8)
    assert not config.is_ocp_mx_quantized(blockwise, torch.float32, torch.uint8)
