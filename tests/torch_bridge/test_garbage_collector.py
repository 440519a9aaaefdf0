"""Python's garbage collector while programs are traced and lowered."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torch_bridge.compiler import executable_cache, garbage_collector

MANY = 30_000
LATER = garbage_collector.OLD_AT_ONCE


class Node:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On, before the first program; behind the test as it was."""
    monkeypatch.setattr(garbage_collector, "_traced", 0)
    enabled = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if enabled else gc.disable)()


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generation of each collection that runs."""
    found: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


@pytest.mark.parametrize("traced", [0, LATER])
def test_no_collection_inside(monkeypatch: pytest.MonkeyPatch, collections: list[int], traced: int) -> None:
    monkeypatch.setattr(garbage_collector, "_traced", traced)
    with garbage_collector.paused():
        collections.clear()
        kept = [Node() for _ in range(MANY)]
        assert not collections and not gc.isenabled()
    assert gc.isenabled()
    del kept


@pytest.mark.parametrize(("traced", "old"), [(0, True), (LATER, False)])
def test_what_first_programs_leave_is_old_at_once(monkeypatch: pytest.MonkeyPatch, traced: int, old: bool) -> None:
    monkeypatch.setattr(garbage_collector, "_traced", traced)
    with garbage_collector.paused():
        gone = weakref.ref(Node())
    gc.collect(1)
    assert (gone() is not None) == old
    gc.collect()
    assert gone() is None  # all objects are looked at


def test_new_garbage_of_the_script_is_collected_before() -> None:
    gone = weakref.ref(Node())
    with garbage_collector.paused():
        assert gone() is None


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    with garbage_collector.paused():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_what_the_script_froze_stays_frozen() -> None:
    gc.disable()
    gone = weakref.ref(Node())
    gc.freeze()
    gc.enable()
    try:
        with garbage_collector.paused():
            pass
        gc.collect()
        assert gone() is not None  # frozen garbage is not looked at
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
    gc.collect()
    assert gone() is None


def test_an_error_turns_it_on_again() -> None:
    with pytest.raises(ValueError, match="traced"), garbage_collector.paused():
        raise ValueError("traced")
    assert gc.isenabled()


def test_it_is_off_while_a_program_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    prepared = executable_cache.prepared

    def watched(*args: Any) -> Any:
        found.append(gc.isenabled())
        return prepared(*args)

    monkeypatch.setattr(executable_cache, "prepared", watched)
    x = torch.arange(11, device="xla")
    assert (x * 11 + 5).tolist() == [11 * i + 5 for i in range(11)]
    assert found
    assert not any(found)
    assert gc.isenabled()
