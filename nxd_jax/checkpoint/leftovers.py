"""What Orbax leaves behind when a save fails.

It closes its event loop at the first error, while other arrays are still being written. Each of these would tell of its own later ('Future exception was never
retrieved', 'Event loop is closed'), hundreds of lines around the one that counts, and write into a folder that is about to be removed.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Iterable, Iterator

PATIENCE = 60.0
"""Seconds that writing may go on for after an error."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """While this is open, what ends after its event loop is closed says nothing of it."""
    hook = sys.unraisablehook

    def note(unraisable: sys.UnraisableHookArgs) -> None:
        if not (_is_orbax(unraisable.object) or str(unraisable.exc_value) == "Event loop is closed"):
            hook(unraisable)

    sys.unraisablehook = note
    try:
        yield
    finally:
        if sys.unraisablehook is note:
            sys.unraisablehook = hook


def settle(errors: Iterable[BaseException]) -> None:
    """Wait until all that was being written has ended, and let go of it. errors: what the save failed with."""
    loops = logging.getLogger("asyncio")
    loops.addFilter(_is_waited_for)
    try:
        _wait()
        for error in errors:
            traceback.clear_frames(error.__traceback__)  # they hold the loop and its tasks
        gc.collect()
    finally:
        loops.removeFilter(_is_waited_for)


def _wait() -> None:
    """Until TensorStore has nothing more to write. It has no list of that: its futures are looked for among all objects."""
    tensorstore = sys.modules.get("tensorstore")
    if tensorstore is None:
        return
    for found in [
        o for o in gc.get_objects() if issubclass(type(o), tensorstore.Future)
    ]:  # isinstance would run what objects do for __class__
        with contextlib.suppress(Exception):
            found.exception(timeout=PATIENCE)


def _is_waited_for(record: logging.LogRecord) -> bool:
    """A filter without what futures and tasks tell that nobody asks any more."""
    return "never retrieved" not in record.getMessage() and "destroyed but it is pending" not in record.getMessage()


def _is_orbax(found: object) -> bool:
    return inspect.iscoroutine(found) and os.sep + "orbax" + os.sep in found.cr_code.co_filename
