"""`torch_xla` and `torch_bridge.torch_xla` are one set of modules, in either order of import, and refuse the original beside them."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import subprocess
import sys

import pytest

from torch_bridge import aliasing

ROOT = pathlib.Path(__file__).parents[2]


def run(code: str) -> str:
    path = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SAME = """
import sys, importlib
{first}
import torch_xla, torch_xla.core.xla_model as xm, torch_bridge.torch_xla.core.xla_model as real
from torch_xla.distributed import parallel_loader as pl
import torch_xla.debug.metrics as met
import torch_bridge.torch_xla
assert torch_xla is torch_bridge.torch_xla is sys.modules["torch_xla"] is importlib.import_module("torch_xla")
assert xm is real is torch_xla.core.xla_model is importlib.import_module("torch_xla.core.xla_model")
assert pl is importlib.import_module("torch_bridge.torch_xla.distributed.parallel_loader") is torch_xla.distributed.parallel_loader
from torch_xla.core.xla_model import mark_step
assert mark_step is real.mark_step
for name, module in list(sys.modules.items()):
    if name.startswith("torch_xla"):
        twin = sys.modules["torch_bridge." + name]
        assert module is twin and module.__spec__.name == module.__name__ == "torch_bridge." + name, name
from torch_xla.utils.serialization import TensorReference
assert TensorReference.__module__ == "torch_xla.utils.serialization"
import pickle
assert type(pickle.loads(pickle.dumps(TensorReference(3)))) is TensorReference
print("same")
"""


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    "first",
    [
        "import torch_xla.core.xla_model",
        "import torch_xla",
        "import torch_bridge.torch_xla.core.xla_model",
        "from torch_xla.distributed import parallel_loader",
        "import torch_bridge.torch_xla.utils.serialization",
        "import torch_neuronx",
    ],
)
def test_one_set_of_modules(first: str) -> None:
    assert run(SAME.format(first=first)) == "same"


def test_import_is_light_and_complete() -> None:
    out = run(
        "import sys, torch_xla, torch_neuronx.utils; print('jax' in sys.modules, 'torch_bridge.dispatch' in sys.modules);"
        "print({'core', 'distributed', 'debug', 'runtime', 'device', 'sync', 'amp', '_XLAC'} <= set(dir(torch_xla)));"
        "print('mark_step' in dir(torch_xla.core.xla_model), torch_xla.amp.syncfree.AdamW.__name__ if hasattr(torch_xla.amp, 'syncfree') else '')"
    )
    assert out.split("\n")[:2] == ["False False", "True"] and out.split("\n")[2].startswith("True")


def test_missing_names_are_reported_under_the_name_used() -> None:
    out = run(
        "import torch_xla\n"
        "try:\n    import torch_xla.nothing\nexcept ModuleNotFoundError as e:\n    print(e)\n"
        "try:\n    torch_xla.nothing\nexcept AttributeError as e:\n    print(e)\n"
        "import importlib.util, pkgutil\n"
        "print(importlib.util.find_spec('torch_xla.runtime') is not None, importlib.util.find_spec('torch_xla.nothing'))\n"
        "print('torch_xla.core.xla_model' in [m.name for m in pkgutil.walk_packages(torch_xla.__path__, 'torch_xla.')])\n"
    )
    lines = out.split("\n")
    assert lines[0] == "No module named 'torch_xla.nothing'" and "'torch_xla' has no attribute 'nothing'" in lines[1]
    assert lines[2:] == ["True None", "True"]


def test_libraries_find_it() -> None:
    out = run(
        "from transformers.utils import is_torch_xla_available as a; from accelerate.utils import is_torch_xla_available as b; print(a(), b())"
    )
    assert out.split("\n")[-1] == "True True"


@pytest.mark.parametrize(("package", "distribution"), [("torch_xla", "torch_xla"), ("torch_neuronx", "torch-neuronx")])
def test_the_original_beside_it_is_refused(package: str, distribution: str) -> None:
    out = run(
        "import importlib.metadata as m, torch\n"
        "class Found:\n    version = '2.7.0'\n"
        "real = m.distribution\n"
        f"m.distribution = lambda name: Found if name == {distribution!r} else real(name)\n"
        f"try:\n    import {package}\nexcept ImportError as e:\n    print(e)\n"
        f"import sys; print({package!r} in sys.modules)"
    )
    text, loaded = out.split("\n")
    assert f"the original {distribution} 2.7.0 is installed" in text and f"pip uninstall {distribution}" in text and loaded == "False"


def test_refuse_original(monkeypatch: pytest.MonkeyPatch) -> None:
    aliasing.refuse_original("no-such-distribution-here")

    class Found:
        version = "1.0"

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Found)
    with pytest.raises(ImportError, match="virtual environment of its own"):
        aliasing.refuse_original("torch_xla")
