"""Instrumented functions compute what the original ones do: results, exceptions with their lines, and the order of everything."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

from tests.torch_bridge.guards import computing
from tests.torch_bridge.guards.computing import CASES, Log
from tests.torch_bridge.guards.watching import outcome, watched
from torch_bridge.guards import probes
from torch_bridge.guards.instrument import instrumented
from torch_bridge.guards.routing import CannotInstrument

_PROBES = types.CellType(probes)


@pytest.mark.parametrize("f", CASES, ids=lambda f: f.__name__)
def test_a_watched_function_computes_what_the_original_does(f: Callable[[Log], Any]) -> None:
    plain, seen = Log(), Log()
    expected = outcome(lambda: f(plain))
    assert outcome(lambda: watched(f, seen)[0]) == expected
    assert seen.said == plain.said


@pytest.mark.parametrize("f", CASES, ids=lambda f: f.__name__)
def test_an_instrumented_function_that_nobody_watches_does_too(f: Callable[[Log], Any]) -> None:
    try:
        routed = instrumented(f, _PROBES)  # type: ignore[arg-type]
    except CannotInstrument:
        assert f in (computing.nested_targets, computing.frame_is_its_own)
        return
    plain, seen = Log(), Log()
    expected = outcome(lambda: f(plain))
    assert outcome(lambda: routed(seen)) == expected
    assert seen.said == plain.said
