"""`torch_neuronx.experimental.profiler`: a training loop's trace, for TensorBoard."""

from __future__ import annotations

import logging
import pathlib
import threading
from typing import Any

from torch_bridge.torch_xla.core import xla_model
from torch_bridge.torch_xla.debug import profiler as xp

logger = logging.getLogger("torch_bridge")


class profile:
    """`torch_neuronx.experimental.profiler.profile`: trace what a `with` block does, with JAX's profiler (`torch_xla.debug.profiler`).

    ms_duration: record at most so many milliseconds; the block may end before. neuron_tensorboard_plugin_dir: `<logdir>/plugins/neuron`; the trace
    goes to `<logdir>/plugins/profile`, which `tensorboard --logdir <logdir>` (with xprof) shows, or below output_dir if that is given.
    auto_start=False: recording starts with `start()`. port, profile_type, target, delete_working are accepted: one trace has the host's and the
    devices' side, and needs no server. traced_only is accepted, too: models of `torch_neuronx.trace` are in the trace, among all that runs.

    `nxd_jax.inspect.profile` reads such a trace back: the time of modules, lines and ops.
    """

    def __init__(
        self,
        *,
        port: int = 9012,
        ms_duration: float = 60000,
        neuron_tensorboard_plugin_dir: str = "logs/plugins/neuron",
        profile_type: str = "operator",
        auto_start: bool = True,
        delete_working: bool = True,
        traced_only: bool = False,
        target: str | None = None,
        output_dir: str | None = None,
    ):
        plugin = pathlib.Path(neuron_tensorboard_plugin_dir)
        self.folder = pathlib.Path(output_dir) if output_dir else plugin.parents[1] if plugin.parts[-2:-1] == ("plugins",) else plugin
        self.ms_duration = ms_duration
        self.auto_start = auto_start
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def __enter__(self) -> profile:
        if self.auto_start:
            self.start()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            if self._timer is not None:
                xla_model.wait_device_ops()
        finally:
            self._stop()

    def start(self) -> None:
        """Start recording. While it records, a second call logs a warning."""
        with self._lock:
            if self._timer is not None:
                logger.warning("torch_neuronx.experimental.profiler: the profile is being recorded already")
                return
            xp.start_trace(self.folder)
            self._timer = threading.Timer(self.ms_duration / 1000, self._stop)
            self._timer.daemon = True
            self._timer.start()

    def _stop(self) -> None:
        """Write the trace, unless that is done: the block has ended, or the time is up."""
        with self._lock:
            if self._timer is None:
                return
            self._timer.cancel()
            self._timer = None
            xp.stop_trace()
