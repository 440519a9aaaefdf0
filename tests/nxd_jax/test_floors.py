"""The floors of `nxd_jax`: imports point down only, late imports inside functions included. CONTRIBUTING.md draws them."""

from __future__ import annotations

import functools
from pathlib import Path

from tests.torch_bridge import floors
from tests.torch_bridge.floors import Import

PACKAGE = Path(__file__).parents[2] / "nxd_jax"

FLOORS = (
    "_distribution",
    "_version",
    "_flags",
    "_later",
    "_progress",
    "_wrapper",
    "interpreter",
    "topology",
    "tensor_parallel",
    "operators",
    "utils",
    "parallel_layers",
    "parallel_state",
    "pipeline",
    "kernels",
    "overrides",
    "checkpoint",
    "modules",
    "quantization",
    "optimizer",
    "trainer",
    "trace",
    "lightning",
    "inspect",
    "abstract",
    "top",
    "ls",
    "parallel_compile",
    "run",
    "ckpt",
    "inspect_run",
    "training",
    "inference",
    "scripts",
)
"""Packages and the files beside them, from the ground up; above them is the package's own table of names."""


@functools.cache
def _found() -> list[Import]:
    return floors.imports("nxd_jax", floors.read(PACKAGE))


def test_imports_point_down() -> None:
    assert floors.upward(_found(), FLOORS) == []


def test_everything_has_a_floor() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages | {path.stem for path in PACKAGE.glob("*.py")} == {*FLOORS, "__init__"}


def test_there_are_no_circles() -> None:
    """Neither of files nor of packages."""
    found = _found()
    assert floors.circles(found) == []
    packages = [Import(one.importer.partition(".")[0], one.imported.partition(".")[0], one.line) for one in found]
    assert floors.circles([one for one in packages if one.importer != one.imported]) == []


def test_imports_by_name_can_be_read() -> None:
    """But those that take a name from elsewhere: Lightning's other one, a user's module of metrics, what `--import` names, classes that a YAML file names."""
    assert floors.unread("nxd_jax", floors.read(PACKAGE)) == [
        "inference.evaluate",
        "lightning._one_lightning",
        "training.own_code",
        "training.registry",
    ]


def test_packages_say_what_they_are() -> None:
    for init in PACKAGE.glob("*/__init__.py"):
        assert init.read_text().startswith('"""'), init


WORKING = ("checkpoint", "modules", "quantization", "optimizer", "trainer", "lightning", "inspect", "abstract")
NAMES = ("parallel_layers", "parallel_state")


def test_working_files_do_not_import_names_of_nxd() -> None:
    """`parallel_layers` adapts arguments; the work is in `tensor_parallel`, and that is what other packages use."""
    ups = [one for one in _found() if one.importer.partition(".")[0] in WORKING and one.imported.partition(".")[0] in NAMES]
    assert [f"{one.importer} (line {one.line}) imports {one.imported}" for one in ups] == []
