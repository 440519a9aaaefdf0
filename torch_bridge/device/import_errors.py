"""Errors of imports that say more than that there is no such module."""

from __future__ import annotations

import abc
import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class ExplainingFinder(importlib.abc.MetaPathFinder):
    """The last to be asked: finds nothing, and says why. `importlib.util.find_spec`, which asks what there is, gets its None."""

    @classmethod
    def install(cls) -> None:
        """Have imports ask one of this class, once."""
        if not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.append(cls())

    @abc.abstractmethod
    def error_of(self, fullname: str) -> ModuleNotFoundError | None:
        """What importing a module raises; None: nothing is known of it."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        error = self.error_of(fullname)
        if error is not None and _importing():
            raise error
        return None


def _importing() -> bool:
    """Whether it is an import that asks the finder which calls this, through importlib's `_find_spec` (and not `importlib.util.find_spec`)."""
    asking = sys._getframe(2).f_back
    return asking is not None and asking.f_code.co_name == "_find_and_load_unlocked"
