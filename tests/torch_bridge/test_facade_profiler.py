"""`xp.trace_detached` at the end of a script: the trace is written, and the process ends well."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import threading

import pytest
import torch_xla.debug.profiler as xp

from tests import ports

ROOT = pathlib.Path(__file__).parents[2]

SCRIPT = """
import sys
import torch
import torch_xla.core.xla_model as xm
import torch_xla.debug.profiler as xp

folder, port, duration_ms, delay_ms = sys.argv[1:]
server = xp.start_server(int(port))
x = torch.randn(8, 8, device="xla")
thread = xp.trace_detached(f"localhost:{port}", folder, duration_ms=int(duration_ms), delay_ms=int(delay_ms))
if int(duration_ms) == 1:
    thread.join()
with xp.StepTrace("train", step_num=0):
    (x @ x).sum()
"""


@pytest.mark.parametrize(("duration", "delay", "written"), [(600_000, 0, True), (1, 0, True), (600_000, 600_000, False)])
def test_the_end_of_a_script_waits_for_the_trace(duration: int, delay: int, written: bool, tmp_path: pathlib.Path) -> None:
    """It ends a trace that would go on; one that has not begun is left out."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "out"), str(ports.free()), str(duration), str(delay)]
    environment = {**os.environ, "PYTHONPATH": path, "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert bool(list(tmp_path.rglob("*.xplane.pb"))) == written


def test_another_server_is_refused_at_once() -> None:
    before = threading.active_count()
    with pytest.raises(NotImplementedError, match=r"xp.trace\('elsewhere:1'\): only this process's own server can be traced"):
        xp.trace_detached("elsewhere:1", "folder")
    assert threading.active_count() == before
