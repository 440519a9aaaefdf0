"""`torch_xla.debug.metrics`, known as `met`: what the bridge compiled, ran and copied, and which ops fell back to the CPU (counters
`aten::<op>`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_bridge import metrics
from torch_bridge.telemetry import metrics_report as _report


def counter_names() -> list[str]:
    """`met.counter_names`: names of the counters that have counted."""
    return sorted(metrics.COUNTERS)


def counter_value(name: str) -> int | None:
    """`met.counter_value`: None if it has not counted."""
    return metrics.COUNTERS.get(name)


def metric_names() -> list[str]:
    """`met.metric_names`: names of the metrics that have samples."""
    return _report.used_metrics()


def metric_data(name: str) -> Any:
    """`met.metric_data`: (samples ever, their sum, ((time, value), ...) of the last ones); values of time metrics in nanoseconds.

    None if there are no samples.
    """
    return _report.data(name)


def clear_counters() -> None:
    """`met.clear_counters`."""
    metrics.clear_counters()


def clear_metrics() -> None:
    """`met.clear_metrics`."""
    metrics.clear_metrics()


def clear_all() -> None:
    """`met.clear_all`: forget all counters and metrics."""
    clear_counters()
    clear_metrics()


def metrics_report() -> str:
    """`met.metrics_report`: everything, as text."""
    return _report.report()


def short_metrics_report(counter_names: Sequence[str] | None = None, metric_names: Sequence[str] | None = None) -> str:
    """`met.short_metrics_report`: the counters and the metrics named, and CPU fallbacks. By default steps, cached compilations; compile, execute and transfer
    times."""
    return _report.short(metric_names or (), counter_names or ())


def executed_fallback_ops() -> list[str]:
    """`met.executed_fallback_ops`: counters of the ops that ran on the CPU."""
    return _report.fallback_ops()
