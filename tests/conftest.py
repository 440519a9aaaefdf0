"""Tests run on the CPU unless JAX_PLATFORMS says otherwise, and keep compiled programs in `.cache/jax` between runs."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import signal
import sys
from collections.abc import Iterator

import pytest

_ROOT = pathlib.Path(__file__).parent.parent

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background of a shell script: tests of Ctrl-C need it
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "64")  # worlds of up to 64 ranks; a world of one uses the first

if importlib.util.find_spec("torch_xla") is None:  # not installed: `torch_xla` and the like are found in the checkout
    sys.path.append(str(_ROOT / "aliases"))


@pytest.fixture
def clean_step() -> Iterator[None]:
    """Nothing recorded before the test and no step closures left after it."""
    from torch_bridge import executor, steps

    executor.sync()
    yield
    steps._closures.clear()
    executor.sync()


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Each test draws the same numbers, whichever tests ran before it."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def bounded_memory() -> Iterator[None]:
    """Executables pile up over thousands of tests: forget them after each file."""
    yield
    if "jax" in sys.modules:
        import jax

        if "torch_bridge.executor" in sys.modules:
            sys.modules["torch_bridge.executor"].clear_cache()
        jax.clear_caches()
