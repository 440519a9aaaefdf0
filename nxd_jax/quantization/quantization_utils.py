"""`neuronx_distributed.quantization.quantization_utils`: quantizing tensors and torch models on the CPU, and what is in the quantized ones.

`torch.ao.quantization`, which the int8 functions are made of, is deprecated in torch; its warnings are kept silent here.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from nxd_jax.quantization.quantization_config import QuantizationType
from nxd_jax.quantization.schemes import Scheme, rounded, scale_of


@contextlib.contextmanager
def _torch_ao() -> Iterator[Any]:
    """`torch.ao`, without its warnings that it is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=r"torch\.quantize_per_tensor, torch\.quantize_per_channel")
        import torch.ao.nn.quantized.dynamic
        import torch.ao.quantization
        from torch.ao.nn.quantized.dynamic.modules import linear

        yield torch.ao, linear


# -- torch's quantized tensors -----------------------------------------------------------------------


def quantize_per_tensor_symmetric(tensor: torch.Tensor) -> torch.Tensor:
    """A qint8 tensor with one scale, absmax / 127.5, as torch's observers choose it."""
    with _torch_ao() as (ao, linear):
        observer = ao.quantization.MinMaxObserver(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
        observer(tensor)
        return cast(torch.Tensor, linear._quantize_weight(tensor, observer))


def quantize_per_channel_symmetric(tensor: torch.Tensor, channel_axis: int) -> torch.Tensor:
    """A qint8 tensor with a scale for each entry along a dim, absmax / 127."""
    from nxd_jax.quantization.observer import PerChannelAbsMaxObserver

    with _torch_ao() as (_, linear):
        observer = PerChannelAbsMaxObserver(dtype=torch.qint8, qscheme=torch.per_channel_symmetric, ch_axis=channel_axis)
        observer(tensor)
        return cast(torch.Tensor, linear._quantize_weight(tensor, observer))


def extract_q_scale_per_tensor(q_tensor: torch.Tensor) -> torch.Tensor:
    """The scale of a quantized tensor with one: float32 [1]."""
    _check_scheme(q_tensor, torch.per_tensor_affine)
    return torch.tensor([q_tensor.q_scale()])


def extract_q_scale_per_channel(q_tensor: torch.Tensor) -> torch.Tensor:
    """The scales of a quantized tensor's channels: float32, with as many dims as the tensor, such as [out, 1]."""
    _check_scheme(q_tensor, torch.per_channel_affine)
    axis = q_tensor.q_per_channel_axis()
    shape = [n if d == axis else 1 for d, n in enumerate(q_tensor.shape)]
    return q_tensor.q_per_channel_scales().to(torch.float32).view(shape)


def extract_q_scale(q_tensor: torch.Tensor) -> torch.Tensor:
    """The scale of a quantized tensor: [1], or of channels with as many dims as the tensor. ValueError for other schemes."""
    kind = q_tensor.qscheme()
    if kind is torch.per_tensor_affine:
        return extract_q_scale_per_tensor(q_tensor)
    if kind is torch.per_channel_affine:
        return extract_q_scale_per_channel(q_tensor)
    raise ValueError(f"qscheme {kind} is not supported: use per_tensor_affine or per_channel_affine")


def _check_scheme(q_tensor: torch.Tensor, expected: torch.qscheme) -> None:
    if q_tensor.qscheme() is not expected:
        raise AssertionError(f"a tensor of scheme {q_tensor.qscheme()} has no scale of {expected}: use extract_q_scale")


def convert_qint8_to_int8_state_dict(state_dict: dict[str, Any]) -> None:
    """Give torch's dynamically quantized layers in a state dict the names of quantized parallel ones, in place: weight (int8), scale, and bias if there is one.

    A layer without a bias gets none. (NxD sets it to None there, or to another layer's.)
    """
    suffix = "_packed_params.dtype"
    for prefix in [name.removesuffix(suffix) for name in state_dict if name.endswith(suffix)]:
        weight, bias = (*state_dict.pop(f"{prefix}_packed_params._packed_params"), None)[:2]
        for name in (suffix, "zero_point", "scale"):
            state_dict.pop(f"{prefix}{name}", None)
        state_dict[f"{prefix}weight"] = torch.int_repr(weight)
        state_dict[f"{prefix}scale"] = extract_q_scale(weight)
        if bias is not None:
            state_dict[f"{prefix}bias"] = bias.detach()


# -- float8 and activations --------------------------------------------------------------------------


def _check_fp8(dtype: torch.dtype) -> None:
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise AssertionError(f"dtype={dtype} is no float8: use torch.float8_e4m3fn or torch.float8_e5m2")


def quantize_fp8_per_channel(
    tensor: torch.Tensor, dtype: torch.dtype, channel_axis: int, clamp_bound: float = math.inf
) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8 numbers, float32 scales with as many dims as the tensor) with a scale for each entry along a dim, absmax / bound; 1 where all is 0.

    clamp_bound: the largest absolute value that a scale covers; what is larger is clipped. AssertionError for another dtype. (NxD's scales are at least 1e-5,
    which is too coarse for channels below 0.0024.)
    """
    _check_fp8(dtype)
    wide, axis = tensor.to(torch.float32), channel_axis % tensor.dim()
    largest = wide.abs().amax([d for d in range(tensor.dim()) if d != axis], keepdim=True) if tensor.dim() > 1 else wide.abs()
    scale = scale_of(largest.clamp_max(clamp_bound), dtype)
    return rounded(wide / scale, dtype), scale


def quantize_fp8_per_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8 numbers, a float32 scale without dims), absmax / bound; 1 for zeros, where NxD gives NaN. AssertionError for another dtype."""
    _check_fp8(dtype)
    weight, scale = Scheme(QuantizationType.PER_TENSOR_SYMMETRIC, dtype).quantize(tensor)
    return weight, scale[0]


def quantize_static_quant_activations(input: torch.Tensor, input_scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """input / input_scale in a quantized dtype: clipped to its bounds, and rounded."""
    return rounded(input.to(torch.float32) / input_scale.to(torch.float32), dtype)


# -- torch models ------------------------------------------------------------------------------------


class QuantizedLinear(nn.Module):
    """A `torch.nn.Linear` with a float8 weight, whose state dict is what is wanted of it: weight, scale, and bias if there is one. It cannot be called.

    (NxD's loses the bias.)
    """

    weight: nn.Parameter
    scale: nn.Parameter

    def set_weight_and_scale(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        """Make them parameters that are not trained."""
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(
            "a QuantizedLinear only holds weights for a checkpoint: load its state dict into the quantized parallel layers that quantize.convert makes"
        )

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> QuantizedLinear:
        """From a linear layer with a `qconfig`, whose `weight` says qscheme, dtype and (of channels) ch_axis. RuntimeError for another scheme."""
        said = mod.qconfig.weight
        if said["qscheme"] is torch.per_tensor_symmetric:
            weight, scale = quantize_fp8_per_tensor(mod.weight.detach(), said["dtype"])
            scale = scale.reshape(1)
        elif said["qscheme"] is torch.per_channel_symmetric:
            weight, scale = quantize_fp8_per_channel(mod.weight.detach(), said["dtype"], said["ch_axis"])
        else:
            raise RuntimeError(f"qscheme {said['qscheme']} is not supported: use torch.per_tensor_symmetric or torch.per_channel_symmetric")
        layer = cls()
        layer.set_weight_and_scale(weight, scale)
        bias = None if mod.bias is None else nn.Parameter(mod.bias.detach().clone(), requires_grad=False)
        layer.register_parameter("bias", bias)
        return layer


def quantize_pytorch_model_per_tensor_symmetric(
    float_model: nn.Module, inplace: bool = False, dtype: torch.dtype = torch.qint8, modules_to_not_convert: list[str] | None = None
) -> nn.Module:
    """A model whose `torch.nn.Linear`s are quantized with one scale for each weight.

    dtype: qint8 or int8, with torch's layers, which compute on the CPU; or float8_e4m3fn or float8_e5m2, with a `QuantizedLinear` each, for their state dict.
    ValueError for others. inplace: change the model itself. modules_to_not_convert: words; modules with one in their name stay as they are.
    """
    return _quantized_model(float_model, inplace, dtype, modules_to_not_convert, torch.per_tensor_symmetric)


def quantize_pytorch_model_per_channel_symmetric(
    float_model: nn.Module, inplace: bool = False, dtype: torch.dtype = torch.qint8, modules_to_not_convert: list[str] | None = None
) -> nn.Module:
    """As `quantize_pytorch_model_per_tensor_symmetric`, with a scale for each output channel."""
    return _quantized_model(float_model, inplace, dtype, modules_to_not_convert, torch.per_channel_symmetric)


def _quantized_model(model: nn.Module, inplace: bool, dtype: torch.dtype, but: list[str] | None, scheme: torch.qscheme) -> nn.Module:
    integers, floats = (torch.qint8, torch.int8), (torch.float8_e4m3fn, torch.float8_e5m2)
    if dtype not in (*integers, *floats):
        raise ValueError(
            f"dtype {dtype} is not supported to quantize a model on the CPU: use one of {', '.join(map(str, (*integers, *floats)))}"
        )
    from nxd_jax.quantization.observer import PerChannelAbsMaxObserver

    with _torch_ao() as (ao, _):
        per_channel = scheme is torch.per_channel_symmetric
        if dtype in floats:
            config: Any = ao.quantization.QConfig(activation=None, weight=dict(qscheme=scheme, dtype=dtype, ch_axis=0))
        elif per_channel:
            weight = PerChannelAbsMaxObserver.with_args(dtype=torch.qint8, qscheme=scheme, ch_axis=0)
            config = ao.quantization.QConfig(activation=ao.quantization.default_observer, weight=weight)
        else:
            config = ao.quantization.default_dynamic_qconfig
        kept = {name: None for name, _ in model.named_modules() if any(word in name for word in but or ())}
        mapping = {nn.Linear: QuantizedLinear if dtype in floats else ao.nn.quantized.dynamic.Linear}
        found = ao.quantization.quantize_dynamic(model, {nn.Linear: config, **kept}, mapping=mapping, dtype=torch.qint8, inplace=inplace)
        return cast(nn.Module, found)
