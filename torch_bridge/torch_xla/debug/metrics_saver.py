"""`torch_xla.debug.metrics_saver`: the report of metrics, appended to a file."""

from __future__ import annotations

import os
import sys

from torch_bridge.torch_xla.debug import metrics


def save_metrics(metrics_file: str | None = None) -> None:
    """`metrics_saver.save_metrics`: append `met.metrics_report()` to a file, or write it to "STDOUT" or "STDERR".

    Without a name, to the one in `XLA_METRICS_FILE`, and nowhere if that is unset. It is written when this is called, not by itself after each step.
    """
    name = metrics_file if metrics_file is not None else os.environ.get("XLA_METRICS_FILE")
    if not name:
        return
    text = metrics.metrics_report()
    stream = {"STDOUT": sys.stdout, "STDERR": sys.stderr}.get(name)
    if stream is not None:
        stream.write(text)
        return
    with open(name, "a") as file:
        file.write(text)
