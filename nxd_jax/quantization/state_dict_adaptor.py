"""The parameters of a quantized layer in a state dict: of quantized parallel layers, or of torch's own dynamically quantized ones."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from nxd_jax.quantization.quantization_utils import extract_q_scale

_DTYPE, _PACKED = "_packed_params.dtype", "_packed_params._packed_params"


class QuantizedParallelLinearLayerStateDictAdaptor:
    """Full weights, biases and scales out of a state dict, for a layer whose names start with `prefix` (such as "mlp.up_proj.").

    A layer of torch's own has (quantized weight, bias) under `_packed_params._packed_params`. Raises RuntimeError where a state dict lacks the tensor.
    """

    @staticmethod
    def get_weight_from_state_dict(prefix: str, state_dict: dict[str, Any]) -> torch.Tensor:
        """`weight`, or the integers of torch's quantized weight (int8)."""
        if f"{prefix}weight" in state_dict:
            weight: torch.Tensor = state_dict[f"{prefix}weight"]
            return weight
        if f"{prefix}{_DTYPE}" in state_dict:
            return torch.int_repr(state_dict[f"{prefix}{_PACKED}"][0])
        raise RuntimeError(f"Cannot find {prefix}weight in the state_dict, nor {prefix}{_PACKED}")

    @staticmethod
    def set_weight_to_state_dict(prefix: str, tensor: torch.Tensor, state_dict: dict[str, Any]) -> None:
        """Replace what `get_weight_from_state_dict` finds. (NxD cannot do it for torch's layers: it assigns to an item of a tuple.)"""
        if f"{prefix}weight" in state_dict:
            state_dict[f"{prefix}weight"] = tensor
        elif f"{prefix}{_DTYPE}" in state_dict:
            _, *rest = state_dict[f"{prefix}{_PACKED}"]
            state_dict[f"{prefix}{_PACKED}"] = (tensor, *rest)
        else:
            raise RuntimeError(f"Cannot find {prefix}weight in the state_dict, nor {prefix}{_PACKED}")

    @staticmethod
    def get_bias_from_state_dict(prefix: str, state_dict: dict[str, Any]) -> torch.Tensor | None:
        """`bias`, or that of torch's layer; None with a warning if there is none."""
        if f"{prefix}bias" in state_dict:
            found = state_dict[f"{prefix}bias"]
        elif f"{prefix}{_DTYPE}" in state_dict:
            found = state_dict[f"{prefix}{_PACKED}"][1]
        else:
            warnings.warn(f"Cannot find {prefix}bias in the state_dict", stacklevel=2)
            return None
        return found.detach() if isinstance(found, torch.nn.Parameter) else found

    @staticmethod
    def set_bias_to_state_dict(prefix: str, tensor: torch.Tensor, state_dict: dict[str, Any]) -> None:
        """Replace what `get_bias_from_state_dict` finds. (NxD raises NotImplementedError.)"""
        if f"{prefix}bias" in state_dict:
            state_dict[f"{prefix}bias"] = tensor
        elif f"{prefix}{_DTYPE}" in state_dict:
            state_dict[f"{prefix}{_PACKED}"] = (state_dict[f"{prefix}{_PACKED}"][0], tensor)
        else:
            raise RuntimeError(f"Cannot find {prefix}bias in the state_dict, nor {prefix}{_PACKED}")

    @staticmethod
    def get_scale_from_state_dict(prefix: str, state_dict: dict[str, Any]) -> torch.Tensor:
        """The scale of torch's quantized weight ([1], or [out, 1]), else `scale`. (torch's layers have an entry `scale` besides, that of their output.)"""
        if f"{prefix}{_DTYPE}" in state_dict and state_dict[f"{prefix}{_PACKED}"][0].dtype is torch.qint8:
            return extract_q_scale(state_dict[f"{prefix}{_PACKED}"][0])
        if f"{prefix}scale" in state_dict:
            scale: torch.Tensor = state_dict[f"{prefix}scale"]
            return scale
        raise RuntimeError(f"Cannot find {prefix}scale in the state_dict, nor {prefix}{_PACKED}")
