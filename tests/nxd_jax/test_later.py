"""What errors say of modules and names that are not there yet, and that asking for them otherwise gives a plain no."""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys

import neuronx_distributed as nxd_api
import pytest
from neuronx_distributed import pipeline

from nxd_jax import _later

IMPORTS = {
    "import neuronx_distributed.experimental": "neuronx_distributed.experimental: it is not there yet",
    "from nxd_jax import experimental": "neuronx_distributed.experimental: it is not there yet",
    "from neuronx_distributed import experimental": "neuronx_distributed.experimental: it is not there yet",
    "from neuronx_distributed.experimental.quantization import microscaling": "neuronx_distributed.experimental: it is not there yet",
    "from neuronx_distributed.pipeline import timeline": "neuronx_distributed.pipeline.timeline: it is not there .*use `with nxd_jax.inspect.pipeline",
    "from neuronx_distributed.utils.timeline import Timeline": "neuronx_distributed.utils.timeline: it is not there",
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


def test_the_package_itself_imports_nothing_that_is_installed() -> None:
    """The commands and `nxd_jax.topology` start in no time, and without torch: `-S` hides what is in site-packages."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import nxd_jax; assert 'torch_bridge' not in sys.modules"
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code, str(pathlib.Path(__file__).parents[2])], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr


def test_asking_what_there_is() -> None:
    for name in ("experimental", "pipeline.timeline"):
        assert importlib.util.find_spec(f"neuronx_distributed.{name}") is None
    assert importlib.util.find_spec("neuronx_distributed.pipeline") is not None
    assert not hasattr(pipeline, "timeline") and not hasattr(nxd_api, "nothing")
    finder = next(f for f in sys.meta_path if isinstance(f, _later._Finder))
    assert finder.find_spec("neuronx_distributed.experimental") is None
    _later.install()
    assert sum(isinstance(f, _later._Finder) for f in sys.meta_path) == 1


def test_a_real_module_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_later.LATER, "modules.rms_norm", "it is not there yet")
    for name in ("neuronx_distributed.modules.rms_norm", "nxd_jax.modules.rms_norm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from neuronx_distributed.modules.rms_norm import RMSNorm

    assert RMSNorm.__module__ == "nxd_jax.modules.rms_norm"


def test_a_script_that_goes_on_without() -> None:
    code = (
        "try:\n    from neuronx_distributed.experimental import quantization\nexcept ImportError as e:\n    print(type(e).__name__, e.name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["ModuleNotFoundError", "neuronx_distributed.experimental"], done.stderr
