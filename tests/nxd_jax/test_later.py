"""What errors say of modules and names that are not there yet, and that asking for them otherwise gives a plain no."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import neuronx_distributed as nxd_api
import pytest
from neuronx_distributed import modules

from nxd_jax import _later

IMPORTS = {
    "import neuronx_distributed.trace": "neuronx_distributed.trace: tracing for inference is not there yet; .*to_jax",
    "from neuronx_distributed import trace": "neuronx_distributed.trace: tracing for inference",
    "from nxd_jax import trace": "neuronx_distributed.trace: tracing for inference",
    "from neuronx_distributed.trace.model_builder import ModelBuilder": "neuronx_distributed.trace: tracing for inference",
    "from neuronx_distributed import NxDParallelState": "neuronx_distributed.NxDParallelState: tracing for inference",
    "from neuronx_distributed.modules import moe": "neuronx_distributed.modules.moe: mixture of experts is not there yet",
    "from neuronx_distributed.modules.moe.model import MoE": "neuronx_distributed.modules.moe: mixture of experts is not there yet",
    "import neuronx_distributed.quantization": "neuronx_distributed.quantization: quantization is not there yet",
    "from neuronx_distributed.pipeline import timeline": "neuronx_distributed.pipeline.timeline: it is not there .*use `with nxd_jax.inspect.pipeline",
    "from neuronx_distributed.utils.timeline import Timeline": "neuronx_distributed.utils.timeline: it is not there",
    "from neuronx_distributed.scripts.checkpoint_converter import CheckpointConverterBase": "neuronx_distributed.scripts: .*nxd-ckpt convert",
    "import neuronx_distributed.nothing": "No module named 'neuronx_distributed.nothing'",
    "from neuronx_distributed import nothing": "cannot import name 'nothing'",
}


@pytest.mark.parametrize("code", IMPORTS)
def test_imports(code: str) -> None:
    with pytest.raises(ImportError, match=IMPORTS[code]):
        exec(code)


@pytest.mark.parametrize("name", [n for n in _later.LATER if "." not in n])
def test_attributes(name: str) -> None:
    assert not hasattr(nxd_api, name)
    with pytest.raises(AttributeError, match=f"neuronx_distributed.{name}: .*not there yet"):
        getattr(nxd_api, name)


def test_asking_what_there_is() -> None:
    for name in ("trace", "modules.moe", "quantization", "pipeline.timeline"):
        assert importlib.util.find_spec(f"neuronx_distributed.{name}") is None
    assert importlib.util.find_spec("neuronx_distributed.pipeline") is not None
    assert not hasattr(modules, "moe") and not hasattr(nxd_api, "nothing")
    finder = next(f for f in sys.meta_path if isinstance(f, _later._Finder))
    assert finder.find_spec("neuronx_distributed.trace") is None
    _later.install()
    assert sum(isinstance(f, _later._Finder) for f in sys.meta_path) == 1


def test_a_real_module_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_later.LATER, "modules.rms_norm", "it is not there yet")
    for name in ("neuronx_distributed.modules.rms_norm", "nxd_jax.modules.rms_norm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from neuronx_distributed.modules.rms_norm import RMSNorm

    assert RMSNorm.__module__ == "nxd_jax.modules.rms_norm"


def test_a_script_that_goes_on_without() -> None:
    code = "try:\n    from neuronx_distributed.modules.moe import MoE\nexcept ImportError as e:\n    print(type(e).__name__, e.name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["ModuleNotFoundError", "neuronx_distributed.modules.moe"], done.stderr
