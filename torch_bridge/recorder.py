"""Brings the recorder up: importing this gives xla tensors their behaviour (and imports JAX). Nothing imports it before the first xla tensor is made."""

from torch_bridge import dispatch, specials, tensor

tensor._dispatch = dispatch.dispatch

__all__ = ["dispatch", "specials", "tensor"]
