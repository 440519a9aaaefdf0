"""torch's own tracer, `make_fx`, on xla tensors (`torch.func.linearize` is made of it).

It follows only the tensor types it knows. An op on another type runs untraced, and the traced function returns the numbers that it had while it was
traced: wrong for every other input. So it is told of ours.
"""

from __future__ import annotations

import torch.fx.experimental.proxy_tensor as proxy_tensor

from torch_bridge.recorder.tensor import XLATensor


def install() -> None:
    """Put it in place (once)."""
    if XLATensor not in proxy_tensor.HANDLED_TYPES:
        proxy_tensor.HANDLED_TYPES = (*proxy_tensor.HANDLED_TYPES, XLATensor)  # type: ignore[assignment]
