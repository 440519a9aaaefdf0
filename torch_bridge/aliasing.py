"""One module under two names: `torch_xla.x` is the very object `torch_bridge.torch_xla.x`, whichever is imported first."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_ALIASES: dict[str, str] = {}


def install(alias: str, target: str) -> None:
    """Make `alias` and everything below it names of the package `target`."""
    _ALIASES[alias] = target
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    sys.modules[alias] = importlib.import_module(target)


def refuse_original(distribution: str) -> None:
    """Raise ImportError if the original of what we stand in for is installed as well."""
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"the original {distribution} {found.version} is installed in this environment. nxd_jax provides a module of the same name that "
        "runs on JAX, "
        f"and both cannot own the device 'xla' in one process. Run `pip uninstall {distribution}`, or use nxd_jax in a virtual "
        "environment of its own."
    )


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        top, _, rest = fullname.partition(".")
        if top not in _ALIASES:
            return None
        real = f"{_ALIASES[top]}.{rest}" if rest else _ALIASES[top]
        spec = importlib.util.find_spec(real)
        if spec is None:
            return None
        return ModuleSpec(fullname, _Loader(real), is_package=spec.submodule_search_locations is not None)


class _Loader(importlib.abc.Loader):
    """Hands out the real module and gives it back its own `__spec__`, which the import system replaces."""

    def __init__(self, real: str):
        self.real = real
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.real)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec
