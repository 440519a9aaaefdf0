"""The bridge's counters and timings as torch_xla reports them: the same lines and number formats, so that scripts that parse the report go
on working.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch_bridge.metrics import COUNTERS, METRICS, Metric

PERCENTILES = (1, 5, 10, 20, 50, 80, 90, 95, 99)
SHORT_METRICS = ("CompileTime", "ExecuteTime", "TransferToDeviceTime", "TransferFromDeviceTime")
SHORT_COUNTERS = ("CachedCompile", "MarkStep")

_TIME_PARTS = (("d", 86400e6), ("h", 3600e6), ("m", 60e6), ("s", 1e6), ("ms", 1e3))
_NANOSECONDS = 1e9


def used_metrics() -> list[str]:
    """Names of the metrics that have samples."""
    return [name for name, metric in METRICS.items() if metric.count]


def data(name: str) -> tuple[int, float, tuple[tuple[float, float], ...]] | None:
    """(samples ever, their sum, the last samples as (seconds since the epoch, value)); times are in nanoseconds, as in torch_xla.

    None if there are none.
    """
    metric = METRICS.get(name)
    if metric is None or not metric.count:
        return None
    samples = tuple(zip(_times(metric), (_in_report_unit(metric, s) for s in metric.samples), strict=True))
    return metric.count, _in_report_unit(metric, metric.total), samples


def report(metrics: Iterable[str] | None = None, counters: Iterable[str] | None = None) -> str:
    """The report on these metrics and counters that have samples; on all of them by default."""
    lines: list[str] = []
    for name in METRICS if metrics is None else metrics:
        metric = METRICS.get(name)
        if metric is not None and metric.count:
            lines += _metric_lines(metric)
    for name in sorted(COUNTERS) if counters is None else counters:
        if name in COUNTERS:
            lines += [f"Counter: {name}", f"  Value: {COUNTERS[name]}"]
    return "\n".join(lines) + "\n"


def short(metrics: Sequence[str] = (), counters: Sequence[str] = ()) -> str:
    """The report on these metrics and counters (the few that matter most where none are named), and every op that fell back to the CPU."""
    return report(metrics or SHORT_METRICS, dict.fromkeys((*(counters or SHORT_COUNTERS), *fallback_ops())))


def fallback_ops() -> list[str]:
    """Counters of the ops that ran on the CPU for want of a lowering."""
    return sorted(name for name in COUNTERS if name.startswith("aten::"))


def _metric_lines(metric: Metric) -> list[str]:
    samples = sorted(metric.samples)
    lines = [f"Metric: {metric.name}", f"  TotalSamples: {metric.count}", f"  Accumulator: {_show(metric, metric.total)}"]
    times = _times(metric)
    span = times[-1] - times[0] if times else 0.0
    if span > 0:
        lines += [f"  ValueRate: {_show(metric, sum(samples) / span)} / second", f"  Rate: {len(samples) / span:.6g} / second"]
    points = [(p, samples[min(len(samples) - 1, len(samples) * p // 100)]) for p in PERCENTILES]
    return [*lines, "  Percentiles: " + "; ".join(f"{p}%={_show(metric, v)}" for p, v in points)]


def _times(metric: Metric) -> list[float]:
    """When each kept sample was taken (seconds since the epoch); nan as long as `Metric` keeps no `times`."""
    return list(getattr(metric, "times", ())) or [math.nan] * len(metric.samples)


def _in_report_unit(metric: Metric, value: float) -> float:
    return value * _NANOSECONDS if metric.unit == "s" else value


def _show(metric: Metric, value: float) -> str:
    if metric.unit == "s":
        return format_seconds(value)
    return format_bytes(value) if metric.unit == "bytes" else f"{value:.2f}"


def format_seconds(seconds: float) -> str:
    """As torch_xla writes times: `04s743ms048.550us`, leading zero parts left out."""
    left = seconds * 1e6
    text = ""
    for suffix, microseconds in _TIME_PARTS:
        whole = int(left // microseconds)
        if whole or text:
            text += f"{whole:0{3 if suffix == 'ms' else 2}d}{suffix}"
            left -= whole * microseconds
    return f"{text}{left:07.3f}us"


def format_bytes(count: float) -> str:
    """As torch_xla writes sizes: `1.50MB`, in powers of 1024."""
    for suffix in ("B", "KB", "MB", "GB"):
        if count < 1024:
            return f"{count:.2f}{suffix}"
        count /= 1024
    return f"{count:.2f}TB"
