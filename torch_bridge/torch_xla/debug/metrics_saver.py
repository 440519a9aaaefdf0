"""`torch_xla.debug.metrics_saver`: the report of metrics, appended to a file."""

from __future__ import annotations

from torch_bridge.config.variables import VARIABLES
from torch_bridge.telemetry import metrics_file as _file


def save_metrics(metrics_file: str | None = None) -> None:
    """`metrics_saver.save_metrics`: append `met.metrics_report()` to a file, or write it to "STDOUT" or "STDERR".

    Without a name, to the one in `XLA_METRICS_FILE`, and nowhere if that is unset. With `XLA_METRICS_FILE` every step ends with it (`torch_xla.sync()`,
    `xm.mark_step()`), in the first process of each machine.
    """
    name = metrics_file if metrics_file is not None else VARIABLES["XLA_METRICS_FILE"].now()
    if name:
        _file.append(name)
