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
        "import torch, torch_bridge, torch_bridge.device.startup\n"
        "from jax._src import xla_bridge\n"
        "print(len(xla_bridge._backends)); torch.ones(2).to('xla'); print(len(xla_bridge._backends))"
    )
    before, after = _python(code).split()
    assert before == "0" and int(after) >= 1


HEAVY = (
    "flax",
    "jax._src.pallas.core",
    "lightning",
    "matplotlib",
    "optax",
    "orbax",
    "pandas",
    "pytorch_lightning",
    "rich",
    "scipy",
    "sympy",
    "tensorboard",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "transformers",
)
"""What takes long to import and a first step does without. (torch itself imports some of it later: its optimizers `torch._dynamo`, its first tensor
subclass `torch.distributed.tensor`.)"""


def test_imports_bring_nothing_heavy():
    """Beyond torch and jax; everything that training scripts import, and what the first xla tensor does."""
    code = (
        "import sys, torch, jax\n"
        "before = set(sys.modules)\n"
        "import torch_xla, torch_neuronx, nxd_jax, neuronx_distributed\n"
        "import torch_xla.core.xla_model, torch_xla.distributed.parallel_loader, torch_xla.debug.metrics\n"
        "import neuronx_distributed.parallel_layers.layers, neuronx_distributed.trainer, neuronx_distributed.optimizer\n"
        "import neuronx_distributed.modules.qkv_linear, torch_bridge.device.startup\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    loaded = _python("import sys; sys.path.append('aliases')\n" + code).split()
    assert "torch_bridge.runtime.executor" in loaded and "nxd_jax.trainer.trainer" in loaded, "the check can fail"
    assert [m for m in loaded if m in HEAVY or m.partition(".")[0] in HEAVY] == []
