"""The floors of `torch_bridge`: imports point down only, late imports inside functions included. CONTRIBUTING.md draws them."""

from __future__ import annotations

from collections.abc import Sequence
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
    "export",
    "device",
)
"""From the ground up. Below them are the files at the root of the package, above them the facades."""

FACADES = ("torch_xla", "torch_neuronx", "libneuronxla", "_autoload")
LOOSE = 8
"""Files at the root of the package, at most."""
CIRCLE = 3
"""Files that import each other, at most."""


def _floor(module: str, order: Sequence[str]) -> int:
    """0 for a file at the root, `len(order) + 1` for facades and for the package itself."""
    head = module.partition(".")[0]
    if not head or head in FACADES:
        return len(order) + 1
    return order.index(head) + 1 if head in order else 0


def upward(found: Sequence[Import], order: Sequence[str]) -> list[str]:
    """Imports of something on a higher floor, as lines for people."""
    return [
        f"{one.importer} (line {one.line}) imports {one.imported}"
        for one in found
        if one.imported != one.importer and _floor(one.imported, order) > _floor(one.importer, order)
    ]


def test_imports_point_down() -> None:
    assert upward(floors.imports("torch_bridge", floors.read(PACKAGE)), FLOORS) == []


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
    assert upward(found, ("low", "high", "top")) == ["low.b (line 2) imports high.c"]
    assert Import("high.c", "low.b", 1) in found and Import("high.c", "low.a", 2) in found and Import("high.c", "low.a", 3) in found
    assert upward(found, ("top", "high", "low")) != []


def test_the_check_finds_circles() -> None:
    assert floors.circles(floors.imports("pkg", SOURCES)) == [["top.e", "top.f", "top.g"], ["high.c", "low.b"]]
    assert floors.circles([Import("a", "b", 1), Import("b", "c", 1)]) == []


@pytest.mark.parametrize("package", [PACKAGE, PACKAGE.parent / "nxd_jax"], ids=lambda path: path.name)
def test_circles_of_files_are_small(package: Path) -> None:
    found = floors.circles(floors.imports(package.name, floors.read(package)))
    assert [circle for circle in found if len(circle) > CIRCLE] == []
