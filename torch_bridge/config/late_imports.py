"""Does something with a module of a library as soon as it is there: at once if it has been imported, else when it is. Imports nothing itself."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then(module)` once the module called `name` has been loaded. A second call with both the same changes nothing while the first one waits."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        then(module)
    elif not any(isinstance(finder, Finder) and (finder.name, finder.then) == (name, then) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder(name, then))


class Finder(importlib.abc.MetaPathFinder):
    """Waits for one module, until it is loaded: who only asks where it is (`importlib.util.find_spec`) does not end that."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]):
        self.name = name
        self.then = then
        self._is_asking = False

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module's own spec, with a loader that calls `then` afterwards."""
        if fullname != self.name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._loaded)
        return spec

    def _loaded(self, module: ModuleType) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self.then(module)


class _Loader(importlib.abc.Loader):
    """Loads a module as its own loader does, and calls `then` with it."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]):
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
