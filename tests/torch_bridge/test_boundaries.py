"""Who imports whom, and what importing costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _loaded_after(code: str, package: str) -> bool:
    return _python(f"{code}\nimport sys; print(any(m == {package!r} or m.startswith({package + '.'!r}) for m in sys.modules))") == "True"


def test_importing_the_bridge_starts_no_jax():
    assert not _loaded_after("import torch_bridge", "jax")


def test_importing_torch_alone_starts_no_jax():
    assert not _loaded_after("import torch; torch.ones(2).sum(); torch.device('cpu')", "jax")


def test_the_check_can_fail():
    assert _loaded_after("import torch_bridge; torch_bridge.to_jax", "jax")


def test_the_bridge_does_not_know_nxd():
    everything = (
        "import torch_bridge, importlib, pkgutil\n"
        "for m in pkgutil.walk_packages(torch_bridge.__path__, 'torch_bridge.'):\n    importlib.import_module(m.name)"
    )
    assert not _loaded_after(everything, "nxd_jax")


def test_jax_backends_start_with_the_first_tensor_only():
    code = (
        "import torch, torch_bridge, torch_bridge.recorder\n"
        "from jax._src import xla_bridge\n"
        "print(len(xla_bridge._backends)); torch.ones(2).to('xla'); print(len(xla_bridge._backends))"
    )
    before, after = _python(code).split()
    assert before == "0" and int(after) >= 1
