"""The floors of `torch_bridge`: imports point down only, late imports inside functions included. CONTRIBUTING.md draws them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torch_bridge import floors
from tests.torch_bridge.floors import Import

PACKAGE = Path(__file__).parents[2] / "torch_bridge"

FLOORS = (
    "config",
    "mesh",
    "script",
    "telemetry",
    "ir",
    "precision",
    "lowerings",
    "passes",
    "compiler",
    "runtime",
    "recorder",
    "collectives",
    "per_rank",
    "optimizers",
    "guards",
    "replay",
    "fsdp",
    "generation",
    "export",
    "aot",
    "device",
)
"""From the ground up. Below them are the files at the root of the package, above them the facades."""

FACADES = ("torch_xla", "torch_neuronx", "libneuronxla", "_autoload")
LOOSE = 8
"""Files at the root of the package, at most."""
CIRCLE = 3
"""Files that import each other, at most."""


def test_imports_point_down() -> None:
    assert floors.upward(floors.imports("torch_bridge", floors.read(PACKAGE)), FLOORS, FACADES) == []


def test_imports_by_name_can_be_read() -> None:
    """But in the table of the package's own names, where the facades get their other names, and the loaders of model files, which `nxd_jax` names."""
    assert floors.unread("torch_bridge", floors.read(PACKAGE)) == ["", "aot.script_files", "device.aliasing"]


def test_every_package_has_a_floor_and_few_files_are_loose() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages == {*FLOORS, *(name for name in FACADES if not name.startswith("_"))}
    assert len(list(PACKAGE.glob("*.py"))) <= LOOSE


def test_packages_say_what_they_are() -> None:
    for name in FLOORS:
        assert (PACKAGE / name / "__init__.py").read_text().startswith('"""'), name


SOURCES = {
    "__init__.py": "",
    "root.py": "",
    "low/__init__.py": "",
    "low/a.py": "from pkg import root\n",
    "low/b.py": "def late():\n    from pkg.high import c\n",
    "high/__init__.py": "",
    "high/c.py": "from pkg.low.b import late\nfrom pkg.low import a\nimport pkg.low.a\n",
    "high/d.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg.top import e\n",
    "top/__init__.py": "",
    "top/e.py": "from pkg.top.f import x\n",
    "top/f.py": "def late():\n    import pkg.top.g\n",
    "top/g.py": "from pkg.top import e\n",
}


def test_the_check_finds_what_points_up() -> None:
    """Late imports count, those for type checkers do not; a name of a module is its module."""
    found = floors.imports("pkg", SOURCES)
    assert floors.upward(found, ("low", "high", "top")) == ["low.b (line 2) imports high.c"]
    assert Import("high.c", "low.b", 1) in found and Import("high.c", "low.a", 2) in found and Import("high.c", "low.a", 3) in found
    assert floors.upward(found, ("top", "high", "low")) != []


BY_NAME = {
    "__init__.py": "",
    "low/__init__.py": "def lazy(name):\n    return import_module(f'{__name__}.a')\n",
    "low/a.py": "import importlib\ndef late():\n    importlib.import_module('pkg.high.c').run()\n",
    "low/b.py": "def late(name):\n    __import__('pkg.high.c.run')\n    import_module('json')\n",
    "high/__init__.py": "def lazy(name):\n    return importlib.import_module(f'{__name__}.{name}')\n",
    "high/c.py": "def late(name):\n    importlib.import_module(name)\n",
}


def test_the_check_reads_imports_by_name() -> None:
    found = floors.imports("pkg", BY_NAME)
    assert floors.upward(found, ("low", "high")) == ["low.a (line 3) imports high.c", "low.b (line 2) imports high.c"]
    assert Import("low", "low.a", 2) in found
    assert floors.unread("pkg", BY_NAME) == ["high.c"]
    with pytest.raises(ValueError, match=r"low\.b \(line 2\): write relative imports as absolute ones"):
        floors.imports("pkg", {"low/b.py": "\nfrom . import a\n"})


def test_the_check_finds_circles() -> None:
    assert floors.circles(floors.imports("pkg", SOURCES)) == [["top.e", "top.f", "top.g"], ["high.c", "low.b"]]
    assert floors.circles([Import("a", "b", 1), Import("b", "c", 1)]) == []


def test_circles_of_files_are_small() -> None:
    assert [circle for circle in floors.circles(floors.imports("torch_bridge", floors.read(PACKAGE))) if len(circle) > CIRCLE] == []
