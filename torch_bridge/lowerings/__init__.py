"""aten -> JAX, one file per family. Importing this package fills the registry."""

import importlib as _importlib
import pkgutil as _pkgutil

from torch_bridge.lowerings.registry import Lowering, is_collective, lookup, lowering, registered

for _module in _pkgutil.iter_modules(__path__):
    _importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Lowering", "is_collective", "lookup", "lowering", "registered"]
