"""The report of metrics, appended to a file."""

from __future__ import annotations

import sys

from torch_bridge.telemetry import metrics_report


def append(name: str) -> None:
    """Append the report to a file, or write it to "STDOUT" or "STDERR"."""
    text = metrics_report.report()
    stream = {"STDOUT": sys.stdout, "STDERR": sys.stderr}.get(name)
    if stream is not None:
        stream.write(text)
        return
    with open(name, "a") as file:
        file.write(text)
