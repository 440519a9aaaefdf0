"""Which tensors have a value while a module is captured: constants, and what follows from them (`export.known_values`)."""

from __future__ import annotations

import torch

from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.recorder.varying import differs
from torch_bridge.runtime.session import STATE


def known(t: torch.Tensor) -> bool:
    """Whether a tensor has a value, the same for all ranks, that is no input and nothing of the module's."""
    if not isinstance(t, XLATensor):
        constants = STATE.session.cpu_constants
        return t.device.type == "cpu" and (constants is None or constants.own(t) is None)
    storage = t._storage
    if storage.pending:
        known = storage.segment.known
        return known is not None and known(storage)
    return storage.constant or (storage.held is not None and not differs(t))
