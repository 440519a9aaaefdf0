"""`torch_xla.experimental.eager`."""

from __future__ import annotations

import contextlib

from torch_bridge.recorder import eager_mode as eager
from torch_bridge.torch_xla.torch_xla import compile


def is_eager_mode() -> bool:
    """`torch_xla.experimental.is_eager_mode`: whether every op runs by itself."""
    return eager.enabled()


def eager_mode(enable: bool) -> None:
    """`torch_xla.experimental.eager_mode`: run every op by itself, at once, but for what `torch_xla.compile` or `torch.compile` is around.

    The numbers are those of whole steps, up to the rounding that fusing ops changes; it is slow, and shows an error at its line.
    """
    eager.enable(enable)


def eager_mode_context(enable: bool) -> contextlib.AbstractContextManager[None]:
    """`torch_xla.experimental.eager_mode_context`: `eager_mode` for a `with` block."""
    return eager.mode(enable)


__all__ = ["compile", "eager_mode", "eager_mode_context", "is_eager_mode"]
