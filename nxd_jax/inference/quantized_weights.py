"""int8 and float8 weights of a decoder: its layers become quantized ones before the trace, and a folder's float tensors are quantized as they are read."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nxd_jax.inference import dtype_names
from nxd_jax.quantization import quantization_config as schemes
from nxd_jax.quantization.base import BaseQuantizeParallelLinear
from nxd_jax.quantization.quantization_config import QuantizationType, QuantizedDtype
from nxd_jax.quantization.quantize import convert

TYPES = tuple(kind.value for kind in (QuantizationType.PER_TENSOR_SYMMETRIC, QuantizationType.PER_CHANNEL_SYMMETRIC))
"""What may share a scale."""
FLOAT = ["lm_head"]
"""Layers that stay as they are: logits are what rounding hurts most, and a tied one is the embedding."""


def check(quantized: bool, kind: str, path: str | None, has_adapters: bool) -> None:
    """Raise what `InferenceConfig` does for these fields."""
    if kind not in TYPES:
        raise ValueError(f"quantization_type={kind!r} must be one of {', '.join(TYPES)}")
    if path is not None:
        raise NotImplementedError(
            f"quantized_checkpoints_path={path!r}: weights are quantized as they are read from the model's own folder: leave it out"
        )
    if quantized and has_adapters:
        raise NotImplementedError(
            "quantized=True with lora_config: layers with room for adapters have float weights: leave one of them out, or merge an adapter with PEFT's "
            "merge_and_unload"
        )


def dtype_name(given: object) -> str:
    """NxD's name of a dtype, or of one of its names. Raises what `InferenceConfig` does."""
    try:
        return dtype_names.quantized(given)
    except ValueError as error:
        raise ValueError(f"quantization_dtype={error}") from None


def quantize(model: nn.Module, full: dict[str, torch.Tensor], kind: str, dtype: str) -> None:
    """Convert the parallel linear layers of a model in place, all but `FLOAT`, and with them their weights in `full`, to which scales are added.

    full: a checkpoint that `preprocess_checkpoint` has been through, which arranges and pads what a scale is then for.
    """
    config: Any = schemes.get_default_per_channel_custom_qconfig_dict()
    if QuantizationType(kind) is QuantizationType.PER_TENSOR_SYMMETRIC:
        config = schemes.get_default_custom_qconfig_dict()
    config["quantized_dtype"] = QuantizedDtype(QuantizedDtype.get_dtype(dtype))
    convert(model, config, inplace=True, modules_to_not_convert=FLOAT)
    for name, layer in model.named_modules():
        if isinstance(layer, BaseQuantizeParallelLinear):
            full[f"{name}.weight"], full[f"{name}.scale"] = layer.quantized(full[f"{name}.weight"])
