"""`torch_xla.experimental.fori_loop`: scripts import it so that torch's `while_loop` takes xla tensors, which it does here without."""

from __future__ import annotations

from typing import Any

from torch._higher_order_ops.while_loop import while_loop

__all__ = ["fori_loop", "while_loop"]


def fori_loop(*args: Any) -> Any:
    """`fori_loop.fori_loop`: raises NotImplementedError, since its releases take their arguments in different orders."""
    raise NotImplementedError(
        "torch_xla.experimental.fori_loop.fori_loop: releases of torch_xla differ in what it takes. Write a Python loop, which is recorded and compiled as one "
        "where its passes are alike, or torch._higher_order_ops.while_loop.while_loop"
    )
