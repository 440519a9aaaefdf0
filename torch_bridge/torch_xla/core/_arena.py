"""Helper classes of `torch_xla.core.xla_model`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from torch_bridge import nested
from torch_bridge.torch_xla import _XLAC


class ToXlaTensorArena:
    """`xm.ToXlaTensorArena`: collect the selected tensors of nested data, convert them all as one list, and put the results in their
    places.
    """

    def __init__(self, convert_fn: Callable[[list[Any]], list[Any]], select_fn: Callable[[Any], bool]):
        self._convert_fn = convert_fn
        self._select_fn = select_fn

    def transform(self, inputs: Any) -> Any:
        """A copy of `inputs` with the selected tensors converted; parts without any are shared."""
        found = nested.collect(inputs, self._select_fn)
        return nested.replace(inputs, self._select_fn, list(self._convert_fn(found)) if found else [])


def check_view_sharing(obj: Any) -> None:
    """`xm.check_view_sharing`: raise RuntimeError if two tensors in nested data look into the same storage."""
    seen: dict[Any, torch.Tensor] = {}
    for t in nested.collect(obj, lambda x: isinstance(x, torch.Tensor)):
        key = _XLAC._xla_get_tensor_id(t) if t.device.type == "xla" else t.untyped_storage().data_ptr()
        other = seen.setdefault((t.device.type, key), t)
        if other is not t:
            raise RuntimeError(
                f"a {t.dtype} tensor of shape {list(t.shape)} is sharing a view with a {other.dtype} tensor of shape {list(other.shape)}"
            )


class RateTracker:
    """`xm.RateTracker`: counts per second, smoothed (`rate`) and since the start (`global_rate`)."""

    def __init__(self, smooth_factor: float | None = None):
        self._smooth = float(os.environ.get("RATE_TRACKER_SMOOTHING", "0.4")) if smooth_factor is None else smooth_factor
        self._start = self._since = time.time()
        self._total = 0.0
        self._count = 0.0
        self._rate: float | None = None

    def add(self, count: float) -> None:
        """Count some more."""
        self._count += count
        self._total += count

    def rate(self) -> float:
        """Counts per second since the last call, smoothed with earlier rates."""
        now = time.time()
        elapsed = now - self._since
        if elapsed <= 0:
            return 0.0
        current = self._count / elapsed
        if self._rate is not None:
            current = (1 - self._smooth) * current + self._smooth * self._rate
        self._since, self._count, self._rate = now, 0.0, current
        return current

    def global_rate(self) -> float:
        """Counts per second since the tracker was made."""
        elapsed = time.time() - self._start
        return self._total / elapsed if elapsed > 0 else 0.0
