"""Which cases of tests marked `thorough` run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_collection_modifyitems


class Item:
    """A collected test."""

    def __init__(self, nodeid: str, **marked: int):
        self.nodeid = nodeid
        self._mark = SimpleNamespace(kwargs=marked) if nodeid.startswith("much") else None

    def get_closest_marker(self, name: str) -> Any:
        return self._mark if name == "thorough" else None


def _run(arguments: list[str], everything: bool = False) -> tuple[list[str], list[str]]:
    """(what runs, what is left out)."""
    items = [Item("one"), *(Item(f"much[{k}]", keep=3) for k in range(7)), Item("much_alone"), Item("two")]
    left_out: list[str] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(item.nodeid for item in items))
    config = SimpleNamespace(getoption=lambda name: everything, args=arguments, hook=hook)
    pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
    return [item.nodeid for item in items], sorted(left_out)


def test_some_cases_run_spread_over_all() -> None:
    ran, left_out = _run(["tests"])
    assert ran == ["one", "much[0]", "much[2]", "much[4]", "two"]
    assert left_out == ["much[1]", "much[3]", "much[5]", "much[6]", "much_alone"]


@pytest.mark.parametrize("arguments, everything", [(["tests"], True), (["tests/a.py::much"], False)])
def test_all_run_when_asked_for(arguments: list[str], everything: bool) -> None:
    ran, left_out = _run(arguments, everything)
    assert len(ran) == 10 and not left_out
