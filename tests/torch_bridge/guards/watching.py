"""Runs functions with an observer on them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from torch_bridge.guards import calls
from torch_bridge.guards.observer import Observer


def watched(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Observer]:
    """What a function returns, and the observer of the run."""
    observer = Observer(calls.call, (args, kwargs))
    return calls.run(function, args, kwargs, observer), observer


def outcome(run: Callable[[], Any]) -> Any:
    """What a run gives: its result, or its exception with text and the line of this project's tests that raised it."""
    try:
        return "result", run()
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith("computing.py")]
        return type(error).__name__, str(error), lines, type(error.__cause__).__name__
