"""Puts ours in the place of transformers' `GenerationMixin.generate`: when transformers is imported, or at once if it has been."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

WHERE = "transformers.generation.utils"
"""The module that has `GenerationMixin`."""


def install() -> None:
    """Called when the first xla tensor of the process is made, without which no model is on xla. Imports nothing of transformers."""
    module = sys.modules.get(WHERE)
    if module is not None and hasattr(module, "GenerationMixin"):
        _wrap(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _wrap(module: ModuleType) -> None:
    mixin: Any = module.GenerationMixin
    original = mixin.generate
    if hasattr(original, "_of_transformers"):
        return

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        from torch_bridge.generation import generate

        return generate.generate(original, self, args, kwargs)

    generate._of_transformers = original  # type: ignore[attr-defined]
    mixin.generate = generate


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for that module, once."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != WHERE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads it as its own loader does, and wraps `generate` then."""

    def __init__(self, loader: Any):
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _wrap(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
