"""One module under two names: `torch_xla.x` is the very object `torch_bridge.torch_xla.x`, whichever is imported first."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from torch_bridge.device import absent

STAND_IN = "+nxd.jax"
"""The end of the version of a distribution of ours under an original's name."""

_ALIASES: dict[str, str] = {}


def install(alias: str, target: str) -> None:
    """Make `alias` and everything below it names of the package `target`."""
    _ALIASES[alias] = target
    absent.install()
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    sys.modules[alias] = importlib.import_module(target)


def original(distribution: str) -> importlib.metadata.Distribution | None:
    """The installed original of what we stand in for, or None.

    Scripts and libraries ask for the *distribution* `torch_xla` too (`importlib.metadata.version`). We ship one, with `STAND_IN` in its version; it may
    come before or after an original on `sys.path`.
    """
    return next((found for found in importlib.metadata.distributions(name=distribution) if not _version(found).endswith(STAND_IN)), None)


def refuse_original(distribution: str) -> None:
    """Raise ImportError if the original of what we stand in for is installed as well."""
    found = original(distribution)
    if found is None:
        return
    raise ImportError(
        f"the original {distribution} {_version(found)} is installed in this environment. nxd_jax provides a module of the same name that "
        "runs on JAX, "
        f"and both cannot own the device 'xla' in one process. Run `pip uninstall {distribution}`, or use nxd_jax in a virtual "
        "environment of its own."
    )


def _version(found: importlib.metadata.Distribution) -> str:
    """The version, also of a folder that a broken installation left without one."""
    with contextlib.suppress(Exception):
        if found.version:
            return found.version
    return "(a version that cannot be read)"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        top, _, rest = fullname.partition(".")
        if top not in _ALIASES:
            return None
        real = f"{_ALIASES[top]}.{rest}" if rest else _ALIASES[top]
        spec = importlib.util.find_spec(real)
        if spec is None:
            return None
        return ModuleSpec(fullname, _Loader(real), origin=spec.origin, is_package=spec.submodule_search_locations is not None)


class _Loader(importlib.abc.Loader):
    """Hands out the real module and gives it back its own `__spec__`, which the import system replaces."""

    def __init__(self, real: str):
        self.real = real
        self.spec: ModuleSpec | None = None

    def get_code(self, name: str) -> CodeType | None:
        """For `python -m`."""
        found = importlib.util.find_spec(self.real)
        loader = None if found is None else found.loader
        code: CodeType | None = loader.get_code(self.real) if isinstance(loader, importlib.abc.InspectLoader) else None
        return code

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.real)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec
