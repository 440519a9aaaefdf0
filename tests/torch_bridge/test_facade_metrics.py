"""`torch_xla.debug.metrics`: real counts in torch_xla's format."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as met

from torch_bridge import metrics
from torch_bridge.telemetry import metrics_report

pytestmark = pytest.mark.usefixtures("clean_step")


def step(n: int) -> None:
    x = torch.full((n,), 2.0, device="xla")
    for _ in range(2):
        y = x * 3
        torch_xla.sync()
    y.cpu()


def test_counts_compilations_and_executions() -> None:
    met.clear_all()
    assert met.counter_names() == [] and met.metric_names() == [] and met.metric_data("CompileTime") is None
    step(7301)
    assert met.counter_value("UncachedCompile") >= 1
    assert met.counter_value("MarkStep") == 2
    assert met.counter_value("nothing") is None
    compiled = met.metric_data("CompileTime")
    assert compiled[0] == met.counter_value("UncachedCompile") == len(compiled[2])
    count, total, samples = met.metric_data("ExecuteTime")
    assert count == len(samples) >= 2
    assert total == pytest.approx(sum(value for _, value in samples))
    assert 1e3 < total < 60e9, "nanoseconds"
    bytes_in = met.metric_data("InboundData")
    assert bytes_in[1] == 7301 * 4
    before = met.counter_value("UncachedCompile")
    step(7301)
    assert met.counter_value("UncachedCompile") == before
    assert met.counter_value("CachedCompile") >= 1


METRIC = re.compile(
    r"Metric: (\S+)\s+TotalSamples: (\d+)\s+Accumulator: (\S+)[^P]+Percentiles: "
    + "; ".join(rf"{p}%=(\S+)" for p in (1, 5, 10, 20, 50, 80, 90, 95, 99))
)
COUNTER = re.compile(r"Counter: (\S+)\s+Value: (\d+)")


def test_report_is_what_scripts_parse() -> None:
    met.clear_all()
    step(7302)
    report = met.metrics_report()
    found = {m[1]: m for m in METRIC.finditer(report)}
    assert {"CompileTime", "ExecuteTime", "TensorsGraphSize", "TransferFromDeviceTime", "InboundData"} <= found.keys()
    assert int(found["ExecuteTime"][2]) == met.metric_data("ExecuteTime")[0]
    assert re.fullmatch(r"(\d+m)?(\d\ds)?(\d{3}ms)?\d{3}\.\d{3}us", found["CompileTime"][3])
    assert found["InboundData"][3] == "28.52KB"
    assert {m[1]: int(m[2]) for m in COUNTER.finditer(report)} == metrics.COUNTERS
    short = met.short_metrics_report()
    assert "Metric: CompileTime" in short and "Counter: MarkStep" in short and "TensorsGraphSize" not in short
    named = met.short_metrics_report(metric_names=["TensorsGraphSize"])
    assert "TensorsGraphSize" in named and "CompileTime" not in named and "Counter: MarkStep" in named
    named = met.short_metrics_report(counter_names=["UncachedCompile"])
    assert "Counter: UncachedCompile" in named and "MarkStep" not in named and "Metric: CompileTime" in named


def test_fallbacks_are_counted() -> None:
    met.clear_all()
    metrics.count("aten::made_up", 2)
    assert met.executed_fallback_ops() == ["aten::made_up"]
    assert "Counter: aten::made_up\n  Value: 2" in met.short_metrics_report()
    met.clear_counters()
    assert met.executed_fallback_ops() == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "000.000us"),
        (0.000029724, "029.724us"),
        (0.433358348, "433ms358.348us"),
        (4.74304855, "04s743ms048.550us"),
        (3725.5, "01h02m05s500ms000.000us"),
    ],
)
def test_times_as_torch_xla_writes_them(seconds: float, text: str) -> None:
    assert metrics_report.format_seconds(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(10, "10.00B"), (1536, "1.50KB"), (3 << 20, "3.00MB"), (5 << 40, "5.00TB")])
def test_sizes_as_torch_xla_writes_them(count: float, text: str) -> None:
    assert metrics_report.format_bytes(count) == text


def test_samples_carry_their_time() -> None:
    met.clear_all()
    step(7303)
    times = [t for t, _ in met.metric_data("ExecuteTime")[2]]
    assert times == sorted(times) and times[0] > 1.7e9
    assert "  Rate: " in met.metrics_report()


def test_reading_metrics_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        met.metrics_report()
