"""Names that a script imported before there was a number that differs by rank."""

from __future__ import annotations

import random
import sys
from types import ModuleType

import pytest

from torch_bridge.per_rank import imported_names


class Library:
    """Says that it is a module, as cffi's libraries do, and has no names of its own."""

    __slots__ = ()
    __class__ = ModuleType  # type: ignore[assignment]


def test_they_are_bound_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (lambda: "old"), (lambda: "new")  # not names of this module, which would be bound anew
    source = ModuleType("source")
    source.draw = source.again = old  # type: ignore[attr-defined]
    monkeypatch.setattr(imported_names, "_SOURCES", (source,))
    modules = {name: ModuleType(name) for name in ("a_users_script", "a_users_package.part", "torch_bridge.a_part")}
    for name, module in modules.items():
        module.drawn, module.other = old, random.sample  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    assert isinstance(Library(), ModuleType)
    monkeypatch.setitem(sys.modules, "a_library", Library())  # type: ignore[arg-type]
    with imported_names.bound_anew():
        source.draw = source.again = new  # type: ignore[attr-defined]
    assert [module.drawn for module in modules.values()] == [new, new, old]
    assert all(module.other is random.sample for module in modules.values())
