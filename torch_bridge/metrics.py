"""Counters and timings of the bridge, under torch_xla's names (`torch_xla.debug.metrics` reads them)."""

from __future__ import annotations

import threading
import time
from collections import deque

_LOCK = threading.Lock()
_SAMPLES_KEPT = 1024


class Metric:
    """A series of samples: how many, their sum, and the last 1024 for percentiles, with the time of each in seconds since the epoch.

    `unit` is 's', 'bytes' or ''.
    """

    def __init__(self, name: str, unit: str):
        self.name = name
        self.unit = unit
        self.count = 0
        self.total = 0.0
        self.samples: deque[float] = deque(maxlen=_SAMPLES_KEPT)
        self.times: deque[float] = deque(maxlen=_SAMPLES_KEPT)
        METRICS[name] = self

    def add(self, value: float) -> None:
        with _LOCK:
            self.count += 1
            self.total += value
            self.samples.append(value)
            self.times.append(time.time())

    def clear(self) -> None:
        with _LOCK:
            self.count, self.total = 0, 0.0
            self.samples.clear()
            self.times.clear()


METRICS: dict[str, Metric] = {}
COUNTERS: dict[str, int] = {}

COMPILE_TIME = Metric("CompileTime", "s")
EXECUTE_TIME = Metric("ExecuteTime", "s")
EXECUTE_REPLICATED = Metric("ExecuteReplicatedTime", "s")
"""Of programs over all devices (`xr.use_spmd`), which `EXECUTE_TIME` counts, too."""
GRAPH_SIZE = Metric("TensorsGraphSize", "")
ALIASED_INPUTS = Metric("InputOutputAliasCount", "")
"""Of a compiled program: inputs whose memory its results take."""
TRANSFER_TO_DEVICE = Metric("TransferToDeviceTime", "s")
TRANSFER_FROM_DEVICE = Metric("TransferFromDeviceTime", "s")
OUTBOUND_DATA = Metric("OutboundData", "bytes")
INBOUND_DATA = Metric("InboundData", "bytes")


def count(name: str, by: int = 1) -> None:
    """Add to a counter."""
    with _LOCK:
        COUNTERS[name] = COUNTERS.get(name, 0) + by


def clear_counters() -> None:
    with _LOCK:
        COUNTERS.clear()


def clear_metrics() -> None:
    for metric in METRICS.values():
        metric.clear()


class _Misses(threading.local):
    """`PersistentCacheMiss`, as far as this thread compiled."""

    of_thread = 0


MISSES = _Misses()
