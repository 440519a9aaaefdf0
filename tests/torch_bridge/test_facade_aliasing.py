"""`torch_xla` and `torch_bridge.torch_xla` are one set of modules, in either order of import, and refuse the original beside them."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import subprocess
import sys

import pytest

from torch_bridge.device import aliasing, registration

ROOT = pathlib.Path(__file__).parents[2]


def run(code: str, first: str = "", last: str = "") -> str:
    """What a Python process prints, with these folders before and after ours on its path."""
    path = os.pathsep.join(filter(None, [first, str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", ""), last]))
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
        "import sys, torch_xla, torch_neuronx.utils; print('jax' in sys.modules, 'torch_bridge.recorder.dispatch' in sys.modules);"
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


def test_the_distribution_torch_xla_is_found_before_torch_is_imported() -> None:
    """transformers before 5 asks for it so while it is imported, and has no torch_xla without it."""
    out = run(
        "import importlib.metadata as m, importlib.util, sys\n"
        "print(importlib.util.find_spec('torch_xla') is not None, m.version('torch_xla') == m.version('torch-xla'), 'torch' in sys.modules)\n"
        "print('torch_xla' in m.packages_distributions()['torch_xla'])\n"
        "import torch_xla\n"
        "print(m.version('torch_xla') == torch_xla.__version__ + '+nxd.jax')\n"
        "from packaging.version import parse\n"
        "print(parse('2.9.0') <= parse(m.version('torch_xla')) < parse('2.9.1'))"
    )
    assert out.split() == ["True", "True", "False", "True", "True", "True"]


def test_the_releases_that_scripts_ask_for() -> None:
    """The module's version is the release whose names it has; so is that of the distribution, with the mark of a stand-in."""
    out = run(
        "import importlib.metadata as m\n"
        "import neuronx_distributed, torch_neuronx\n"
        "from neuronx_distributed._version import __version__\n"
        "print(__version__, neuronx_distributed.__version__, m.version('neuronx-distributed'))\n"
        "print(m.version('torch-neuronx') == torch_neuronx.__version__ + '+nxd.jax')"
    )
    assert out.split() == ["0.18.0", "0.18.0", "0.18.0+nxd.jax", "True"]


def put_original(folder: pathlib.Path, distribution: str, text: str | None = None) -> str:
    """What pip leaves of the original, as far as `importlib.metadata` looks; the folder it lies in."""
    found = folder / f"{distribution.replace('-', '_')}-2.7.0.dist-info"
    found.mkdir()
    if text is not None:
        (found / "METADATA").write_text(text)
    return str(folder)


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize(("package", "distribution"), [("torch_xla", "torch_xla"), ("torch_neuronx", "torch-neuronx")])
def test_the_original_beside_it_is_refused(package: str, distribution: str, place: str, tmp_path: pathlib.Path) -> None:
    original = put_original(tmp_path, distribution, f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.7.0\n")
    out = run(
        f"try:\n    import {package}\nexcept ImportError as e:\n    print(e)\nimport sys; print({package!r} in sys.modules)",
        **{place: original},
    )
    text, loaded = out.split("\n")
    assert f"the original {distribution} 2.7.0 is installed" in text and f"pip uninstall {distribution}" in text and loaded == "False"


@pytest.mark.parametrize("text", [None, "Metadata-Version: 2.1\nName: torch_xla\nVersion: 2.7.0\n"])
def test_import_torch_leaves_the_device_to_the_original(text: str | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to one whose metadata cannot be read."""
    assert not registration.real_torch_xla()
    monkeypatch.syspath_prepend(put_original(tmp_path, "torch_xla", text))
    assert registration.real_torch_xla()
    with pytest.raises(ImportError, match=r"torch_xla (2.7.0|\(a version that cannot be read\)) is installed"):
        aliasing.refuse_original("torch_xla")


def test_refuse_original(monkeypatch: pytest.MonkeyPatch) -> None:
    aliasing.refuse_original("no-such-distribution-here")
    aliasing.refuse_original("torch_xla")  # the one that nxd_jax brings

    class Found:
        version = "1.0"

    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [Found])
    with pytest.raises(ImportError, match="virtual environment of its own"):
        aliasing.refuse_original("torch_xla")
