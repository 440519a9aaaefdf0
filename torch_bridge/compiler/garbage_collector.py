"""Python's garbage collector while a program is traced and lowered.

JAX makes some hundred thousand objects there, and most of them live as long as the program. That many new ones make the collector walk through every object
of the process, PyTorch's and transformers' modules too: 0.3 of the 2.3 seconds of a first step of a Llama of 6 layers. So it does not run in the meantime, and
what the first programs of a process leave counts as old at once. What later ones leave counts as new: it may be garbage of programs that are gone.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

OLD_AT_ONCE = 3
"""Programs of a process whose objects count as old: more than a training script has, and few enough that garbage among them does not matter."""

_traced = 0


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No collections inside, unless somebody turns the collector on. Where it is off already, and stays off, nothing is done."""
    global _traced
    if not gc.isenabled():
        yield
        return
    _traced += 1
    ages = _traced <= OLD_AT_ONCE and not gc.get_freeze_count()  # what the script itself froze stays so
    if ages:
        gc.collect(1)  # new garbage of the script's is not to become old
    gc.disable()
    try:
        yield
        if ages:
            gc.freeze()
            gc.unfreeze()  # to the oldest generation, without a walk
    finally:
        gc.enable()
