"""Branches that only raise: which answer goes on is read from the source."""

from __future__ import annotations

import linecache
import sys
from typing import Any

import pytest

from torch_bridge.script import raising


class Asked:
    """A truth that notes what is known of the branch that asks for it."""

    def __init__(self, truth: bool):
        self.truth = truth
        self.found: list[raising.Guard | None] = []

    def __bool__(self) -> bool:
        self.found.append(raising.at(sys._getframe(1)))
        return self.truth


def _guard(statement: str, truth: bool) -> Any:
    """The guard of `x` in a statement that goes on with this truth."""
    text = f"def f(x, yes, no):\n    if no:\n        pass\n    {statement}\n"
    name = f"guard {statement}"
    linecache.cache[name] = len(text), None, text.splitlines(True), name
    space: dict[str, Any] = {}
    exec(compile(text, name, "exec"), space)
    asked = Asked(truth)
    space["f"](asked, True, False)
    return asked.found[0]


@pytest.mark.parametrize(
    ("statement", "answer", "error", "text"),
    [
        ("if x: raise ValueError('too large')", False, "ValueError", "too large: `x` is True"),
        ("if not x: raise RuntimeError(f'bad {yes} and {1 + 2}')", True, "RuntimeError", "bad {yes} and {1 + 2}: `x` is False"),
        ("if yes and x: raise ValueError", False, "ValueError", "`x` is True"),
        ("if x or no: raise ValueError", False, "ValueError", "`x` is True"),
        ("if not (x and yes): raise ValueError", True, "ValueError", "`x` is False"),
        ("assert x", True, "AssertionError", "`x` is False"),
        ("assert not x, 'so'", False, "AssertionError", "so: `x` is True"),
        ("assert x and yes", True, "AssertionError", "`x` is False"),
        ("assert no or x", True, "AssertionError", "`x` is False"),
    ],
)
def test_what_goes_on(statement: str, answer: bool, error: str, text: str) -> None:
    assert _guard(statement, answer) == raising.Guard(answer, error, text)


@pytest.mark.parametrize(
    ("statement", "truth"),
    [
        ("if x and no: raise ValueError", False),
        ("assert x or yes", True),
        ("if x: yes = 1; raise ValueError", False),
        ("if x: yes = 1", False),
        ("if x: raise StopIteration", False),
        ("if x: raise Missing('of another module')", False),
        ("if x: raise ValueError('a', 'b')", False),
        ("yes if x else no", True),
        ("while x: raise ValueError", False),
    ],
)
def test_what_decides_more(statement: str, truth: bool) -> None:
    assert _guard(statement, truth) is None
