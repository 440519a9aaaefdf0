"""Values on their way into `self.log`: on the host as soon as that costs nothing, on the device where ranks have to be put together."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from torch_bridge.mesh import rank_numbers
from torch_bridge.recorder import copies
from torch_bridge.recorder.tensor import XLATensor


def to_log(value: Any, together: bool, now: bool) -> Any:
    """What to give Lightning for a value. together: it will be reduced over ranks (`sync_dist`); now: somebody reads it in this step.

    Numbers and CPU copies that differ among ranks are each rank's own again if they are put together, else the first hosted rank's. A tensor on the device
    is read at once if it is computed and needed now: kept there, Lightning's copies of it would make one more program in every step.
    """
    if isinstance(value, numbers.Number) or rank_numbers.is_ranked(value):
        if together and rank_numbers.is_ranked(value):
            return torch.zeros((), dtype=torch.double, device="xla") + value
        first = rank_numbers.own(value, 0) if rank_numbers.is_ranked(value) else value
        return torch.tensor(float(first), dtype=torch.get_default_dtype(), device="cpu")
    if isinstance(value, XLATensor):
        return value.detach().cpu() if now and not together and not value._storage.pending else value
    if isinstance(value, torch.Tensor) and together and copies.kept(value) is not None:
        return value.to("xla")
    return value
