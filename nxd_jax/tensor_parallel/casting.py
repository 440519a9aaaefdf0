"""Tensors in other dtypes, what autocast asks for, and copies on the CPU."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils._pytree import tree_map


def autocast_dtype() -> torch.dtype | None:
    """The dtype that autocast for xla (or for CUDA, which scripts switch on in its place) asks for; None if it is off."""
    for device in ("xla", "cuda"):
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None


def cast_tensor(tensor: object, from_dtype: torch.dtype = torch.float32, to_dtype: torch.dtype = torch.bfloat16) -> Any:
    """A tensor of one dtype in another; anything else as it is."""
    return tensor.to(to_dtype) if isinstance(tensor, torch.Tensor) and tensor.dtype == from_dtype else tensor


def cast_all(state: object, from_dtype: torch.dtype = torch.float32, to_dtype: torch.dtype = torch.bfloat16) -> Any:
    """`cast_tensor` for all tensors in nested lists, tuples and dicts."""
    return tree_map(lambda x: cast_tensor(x, from_dtype, to_dtype), state)


def cast_if_autocast_enabled(*args: Any) -> tuple[Any, ...]:
    """The arguments, floating-point tensors among them in the dtype of autocast if it is on."""
    dtype = autocast_dtype()
    if dtype is None:
        return args
    return tree_map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, args)


def verify_casted_dtype(value: object) -> None:
    """Raise AssertionError if autocast is on and a floating-point tensor in `value` has another dtype than it asks for."""
    dtype = autocast_dtype()

    def check(x: object) -> Any:
        if dtype is not None and isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != dtype:
            raise AssertionError(f"Datatype of tensor is expected to be {dtype}, got {x.dtype} instead, in one of shape {list(x.shape)}")
        return x

    tree_map(check, value)


def move_all_tensor_to_cpu(data: object, convert: bool = True) -> Any:
    """`data` with the xla tensors in nested lists, tuples and dicts copied to the CPU; with `convert=False` as it is."""
    if not convert:
        return data
    return tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) and x.device.type == "xla" else x, data)


def wide_dtype() -> torch.dtype:
    """What holds float32 numbers on the device: torch.float32, but torch.float64 with `XLA_DOWNCAST_BF16=1`, which makes torch.float32 bfloat16 there."""
    return torch.float64 if os.environ.get("XLA_DOWNCAST_BF16", "0") == "1" else torch.float32
