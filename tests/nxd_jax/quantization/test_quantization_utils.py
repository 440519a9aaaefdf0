"""Tensors and torch models on the CPU, and what state dicts say of them."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from nxd_jax.quantization import quantization_utils as utils
from nxd_jax.quantization.observer import PerChannelAbsMaxObserver
from nxd_jax.quantization.quantization_layers import QuantizedParallelLinearLayerStateDictAdaptor as Adaptor

ROWS = torch.tensor([[1.0, -190, -950, 900, 100], [2.0, 255, -900, 80, -80]])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel")
def test_scales_of_quantized_tensors() -> None:
    one = torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 2, torch.quint8)
    assert utils.extract_q_scale(one) == 0.1 and utils.extract_q_scale(one).shape == (1,)
    scales, zeros = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.zeros(4, dtype=torch.int64)
    rows = torch.quantize_per_channel(torch.randn(4, 3), scales, zeros, 0, torch.qint8)
    assert torch.equal(utils.extract_q_scale(rows), scales.unsqueeze(1)) and utils.extract_q_scale(rows).dtype is torch.float32
    columns = torch.quantize_per_channel(torch.randn(3, 4), scales, zeros, 1, torch.qint8)
    assert utils.extract_q_scale(columns).shape == (1, 4)
    with pytest.raises(AssertionError, match="has no scale of torch.per_tensor_affine: use extract_q_scale"):
        utils.extract_q_scale_per_tensor(rows)
    with pytest.raises(AssertionError, match="has no scale of torch.per_channel_affine"):
        utils.extract_q_scale_per_channel(one)
    with pytest.raises(ValueError, match="per_channel_affine_float_qparams is not supported: use per_tensor_affine or"):
        utils.extract_q_scale(torch.quantize_per_channel(torch.randn(4, 3), scales, torch.zeros(4), 0, torch.quint8))


def test_quantized_tensors() -> None:
    tensor = torch.tensor([[1.0, -190, -950, 900, 100]])
    torch.testing.assert_close(torch.tensor(utils.quantize_per_tensor_symmetric(tensor).q_scale()), torch.tensor(950 / 127.5))
    for axis, largest in ((1, [2.0, 255, 950, 900, 100]), (0, [950.0, 900.0])):
        scales = utils.quantize_per_channel_symmetric(ROWS, axis).q_per_channel_scales()
        torch.testing.assert_close(scales.float(), torch.tensor(largest) / 127)


@pytest.mark.parametrize("axis, largest", [(0, [[950.0], [900.0]]), (1, [[2.0], [255.0], [950.0], [900.0], [100.0]])])
def test_observer(axis: int, largest: list[list[float]]) -> None:
    observer = PerChannelAbsMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_channel_symmetric, ch_axis=axis)()
    with pytest.raises(RuntimeError, match="has measured nothing yet"):
        observer.calculate_qparams()
    assert observer(ROWS) is ROWS
    observer(ROWS / 2)
    observer(torch.empty(0, 5))
    assert observer.max_val.tolist() == largest and "abs_max_val" in repr(observer)
    scale, zero_point = observer.calculate_qparams()
    torch.testing.assert_close(scale, torch.tensor(largest).squeeze(1) / 127)
    assert not zero_point.any() and zero_point.dtype is torch.int64
    observer.reset_min_max_vals()
    observer(torch.zeros_like(ROWS))
    assert (observer.calculate_qparams()[0] == torch.finfo(torch.float32).eps).all()
    with pytest.raises(NotImplementedError, match="has no state to load"):
        observer.load_state_dict({"max_val": torch.zeros(1)})


def test_observers_that_cannot_be() -> None:
    with pytest.raises(AssertionError, match="supports torch.qint8 only, got dtype=torch.quint8"):
        PerChannelAbsMaxObserver(dtype=torch.quint8)
    with pytest.raises(ValueError, match="got qscheme=torch.per_channel_affine"):
        PerChannelAbsMaxObserver(qscheme=torch.per_channel_affine)


def test_float8() -> None:
    weight = torch.randn(3, 8) * torch.tensor([[1e-4], [1.0], [0.0]])
    for dtype, bound, error in ((torch.float8_e4m3fn, 240.0, 2**-4), (torch.float8_e5m2, 57344.0, 2**-3)):
        numbers, scale = utils.quantize_fp8_per_channel(weight, dtype, 0)
        largest = np.abs(weight.numpy()).max(1, keepdims=True)
        np.testing.assert_allclose(scale.numpy(), np.where(largest > 0, largest / bound, 1), rtol=1e-6)
        assert ((numbers.float() * scale - weight).abs() <= weight.abs() * error + scale * 1e-2).all()
        numbers, scale = utils.quantize_fp8_per_tensor(weight, dtype)
        assert scale.dim() == 0 and numbers.float().abs().max() == bound
    numbers, scale = utils.quantize_fp8_per_channel(torch.full((2, 2), 100.0), torch.float8_e4m3fn, -1, clamp_bound=1.0)
    assert scale.tolist() == [[1 / np.float32(240)] * 2] and (numbers.float() == 240).all()
    with pytest.raises(AssertionError, match="dtype=torch.int8 is no float8"):
        utils.quantize_fp8_per_tensor(weight, torch.int8)
    with pytest.raises(AssertionError, match="dtype=torch.int8 is no float8"):
        utils.quantize_fp8_per_channel(weight, torch.int8, 0)
    assert not torch.isnan(utils.quantize_fp8_per_tensor(torch.zeros(2), torch.float8_e5m2)[0].float()).any()


def test_static_activations() -> None:
    x, scale = torch.tensor([0.0, 0.26, -0.24, 99.0, -99.0]), torch.tensor([0.1])
    assert utils.quantize_static_quant_activations(x, scale, torch.int8).tolist() == [0, 3, -2, 127, -128]
    assert utils.quantize_static_quant_activations(x, scale, torch.float8_e4m3fn).float().tolist() == [0, 2.5, -2.5, 240, -240]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 4, bias=False)
        self.lm_head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lm_head(self.second(self.first(x).relu()))
        return out


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("dtype", [torch.qint8, torch.int8])
def test_torch_models_in_int8(per_channel: bool, dtype: torch.dtype) -> None:
    model, x = Model(), torch.randn(3, 8)
    quantize = utils.quantize_pytorch_model_per_channel_symmetric if per_channel else utils.quantize_pytorch_model_per_tensor_symmetric
    made = quantize(model, dtype=dtype, modules_to_not_convert=["lm_head"])
    assert type(model.first) is nn.Linear and type(made.lm_head) is nn.Linear
    torch.testing.assert_close(made(x), model(x), atol=0.05, rtol=0.05)
    state = made.state_dict()
    packed = state["first._packed_params._packed_params"][0]
    assert packed.dtype is torch.qint8
    assert torch.equal(Adaptor.get_weight_from_state_dict("first.", state), packed.int_repr())
    assert torch.equal(Adaptor.get_scale_from_state_dict("first.", state), utils.extract_q_scale(packed))
    bias = Adaptor.get_bias_from_state_dict("first.", state)
    assert bias is not None and torch.equal(bias, model.first.bias.detach())
    assert Adaptor.get_bias_from_state_dict("second.", state) is None

    utils.convert_qint8_to_int8_state_dict(state)
    expected = {"first.weight", "first.scale", "first.bias", "second.weight", "second.scale", "lm_head.weight", "lm_head.bias"}
    assert set(state) == expected
    assert state["first.weight"].dtype is torch.int8 and state["first.scale"].shape == ((6, 1) if per_channel else (1,))
    torch.testing.assert_close(state["first.weight"] * state["first.scale"], packed.dequantize())
    error = (state["second.weight"] * state["second.scale"] - model.second.weight).abs()
    assert (error <= state["second.scale"] / 2 * 1.001).all()
    before = copy.deepcopy(state)
    utils.convert_qint8_to_int8_state_dict(state)
    assert all(torch.equal(state[k], before[k]) for k in expected)


@pytest.mark.parametrize("per_channel", [False, True])
def test_torch_models_in_float8(per_channel: bool) -> None:
    model = Model()
    quantize = utils.quantize_pytorch_model_per_channel_symmetric if per_channel else utils.quantize_pytorch_model_per_tensor_symmetric
    made = quantize(model, inplace=True, dtype=torch.float8_e4m3fn, modules_to_not_convert=["head"])
    assert made is model and isinstance(made.first, utils.QuantizedLinear) and type(made.lm_head) is nn.Linear
    state, float_state = made.state_dict(), Model().state_dict()
    assert set(state) == {"first.weight", "first.scale", "first.bias", "second.weight", "second.scale", "lm_head.weight", "lm_head.bias"}
    assert state["first.weight"].dtype is torch.float8_e4m3fn and state["first.scale"].shape == ((6, 1) if per_channel else (1,))
    weight = float_state["first.weight"]
    error = (state["first.weight"].float() * state["first.scale"] - weight).abs()
    assert (error <= weight.abs() / 16 + state["first.scale"] * 2**-10).all() and torch.equal(
        state["first.bias"], float_state["first.bias"]
    )
    with pytest.raises(NotImplementedError, match="only holds weights for a checkpoint: load its state dict into"):
        made.first(torch.zeros(8))


def test_models_that_cannot_be() -> None:
    with pytest.raises(
        ValueError, match="dtype torch.quint8 is not supported to quantize a model on the CPU: use one of torch.qint8, torch.int8"
    ):
        utils.quantize_pytorch_model_per_tensor_symmetric(Model(), dtype=torch.quint8)
    layer = nn.Linear(2, 2)
    layer.qconfig = type("Config", (), {"weight": dict(qscheme=torch.per_tensor_affine, dtype=torch.float8_e4m3fn)})  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="qscheme torch.per_tensor_affine is not supported"):
        utils.QuantizedLinear.from_float(layer)


def test_plain_state_dicts() -> None:
    state = {"a.weight": torch.ones(2, dtype=torch.int8), "a.scale": torch.ones(1), "a.bias": torch.zeros(2)}
    assert (
        Adaptor.get_weight_from_state_dict("a.", state) is state["a.weight"]
        and Adaptor.get_scale_from_state_dict("a.", state) is state["a.scale"]
    )
    Adaptor.set_weight_to_state_dict("a.", torch.zeros(2, dtype=torch.int8), state)
    Adaptor.set_bias_to_state_dict("a.", torch.ones(2), state)
    assert not state["a.weight"].any() and torch.equal(Adaptor.get_bias_from_state_dict("a.", state), torch.ones(2))  # type: ignore[arg-type]
    packed = {"a._packed_params.dtype": torch.qint8, "a._packed_params._packed_params": (utils.quantize_per_tensor_symmetric(ROWS), None)}
    Adaptor.set_weight_to_state_dict("a.", ROWS, packed)
    Adaptor.set_bias_to_state_dict("a.", ROWS[0], packed)
    weight, bias = packed["a._packed_params._packed_params"]
    assert weight is ROWS and torch.equal(bias, ROWS[0])


def test_what_a_state_dict_lacks() -> None:
    for get in (Adaptor.get_weight_from_state_dict, Adaptor.get_scale_from_state_dict):
        with pytest.raises(RuntimeError, match=r"Cannot find lay1\.(weight|scale) in the state_dict"):
            get("lay1.", {"lay1.something": torch.zeros(1)})
    for put in (Adaptor.set_weight_to_state_dict, Adaptor.set_bias_to_state_dict):
        with pytest.raises(RuntimeError, match=r"Cannot find lay1\.(weight|bias) in the state_dict"):
            put("lay1.", torch.zeros(1), {})
    with pytest.warns(UserWarning, match=r"Cannot find lay1\.bias in the state_dict"):
        assert Adaptor.get_bias_from_state_dict("lay1.", {}) is None
