"""Compiling in less time: most of XLA's optimizations off, and its older emitters, which do not lower each fusion through MLIR.

For what compares within tolerances: files of `QUICK` (`tests/conftest.py`), and processes that tests start with `environment()`. The older emitters round
what they fuse in ways that depend on what is beside it: two programs of the same ops can differ in bits.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

VARIABLE = "JAX_DISABLE_MOST_OPTIMIZATIONS"
EMITTERS = "xla_cpu_use_fusion_emitters"


@contextlib.contextmanager
def compiling(older_emitters: bool = False) -> Iterator[None]:
    """What this process compiles meanwhile."""
    import jax
    from jax._src import compiler

    options, before = compiler.get_compile_options, jax.config.read(VARIABLE.lower())

    def quick(*args: Any, **named: Any) -> Any:
        made = options(*args, **named)
        made.env_option_overrides += [(EMITTERS, False)]
        return made

    if older_emitters and has_older_emitters():
        compiler.get_compile_options = quick
    jax.config.update(VARIABLE.lower(), True)
    try:
        yield
    finally:
        compiler.get_compile_options = options
        jax.config.update(VARIABLE.lower(), before)


@functools.cache
def has_older_emitters() -> bool:
    """Whether this XLA has them and the option (jaxlib 0.11 has neither)."""
    from torch_bridge import _compat

    return _compat.knows_options({EMITTERS: False})


def environment() -> dict[str, str]:
    """The variables of a process that is to compile so; none if this one was told how to (`JAX_DISABLE_MOST_OPTIMIZATIONS=0 make test`)."""
    if VARIABLE in os.environ:
        return {}
    if not has_older_emitters():
        return {VARIABLE: "1"}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --{EMITTERS}=false".strip()
    return {VARIABLE: "1", "XLA_FLAGS": flags}
