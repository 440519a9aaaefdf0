"""aten -> JAX, one file per family. Importing this package fills the registry."""

import importlib as _importlib
import pkgutil as _pkgutil

from torch_bridge.lowerings.registry import (
    AxesRule,
    Lowering,
    Stacks,
    batches,
    is_cast,
    is_collective,
    is_view,
    lookup,
    lowering,
    may_call_kernels,
    registered,
    stacks_of,
)

for _module in _pkgutil.iter_modules(__path__):
    _importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "AxesRule",
    "Lowering",
    "Stacks",
    "batches",
    "is_cast",
    "is_collective",
    "is_view",
    "lookup",
    "lowering",
    "may_call_kernels",
    "registered",
    "stacks_of",
]
