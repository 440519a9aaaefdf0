"""Functions that modules imported by name (`from random import random`) before they were replaced by those that know numbers of each rank.

Such a module has the function that was there then, which would give all ranks the first one's numbers without a word. Its names are bound anew. Python's own
modules, torch's, NumPy's, JAX's and ours keep what they have; what a class, a default argument or a closure holds stays, too.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import statistics
import struct
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch

_SOURCES = (math, statistics, random, np, np.random, torch, torch.random, torch.nn.utils, json, struct)
_MAYBE = ("sklearn.metrics",)
_NOT_TOUCHED = frozenset(sys.stdlib_module_names - {"__main__"}) | {"torch", "numpy", "jax", "jaxlib", "torch_bridge", "nxd_jax", "sklearn"}


@contextlib.contextmanager
def bound_anew() -> Iterator[None]:
    """Around what replaces functions of `math`, `statistics`, `random`, `json`, `struct`, NumPy, torch and libraries."""
    sources = [*_SOURCES, *(sys.modules[name] for name in _MAYBE if name in sys.modules)]
    before = [dict(vars(module)) for module in sources]
    yield
    replaced: dict[int, tuple[Any, Any]] = {}
    for module, old in zip(sources, before, strict=True):
        new = vars(module)
        replaced.update({id(f): (f, new[name]) for name, f in old.items() if new[name] is not f})
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in _NOT_TOUCHED and issubclass(
            type(module), ModuleType
        ):  # cffi's libraries only call themselves modules
            space = object.__getattribute__(module, "__dict__")  # a module that waits to be loaded goes on waiting
            space.update({key: replaced[id(value)][1] for key, value in list(space.items()) if id(value) in replaced})
