"""One Lightning under both of its names.

Lightning comes twice, as `pytorch_lightning` with `lightning_fabric` and as `lightning.pytorch` with `lightning.fabric`: the same sources, other
classes, so that a strategy made from one is refused by the other's Trainer. `unify` makes the names of one the names of the other's modules; scripts
may then import either, or both, in any order, and get the same classes.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import pathlib
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from nxd_jax.lightning import _versions

SEPARATE = ("pytorch_lightning", "lightning_fabric")
JOINT = ("lightning.pytorch", "lightning.fabric")
_TOP = "lightning"
_STAND_IN = pathlib.Path(__file__).with_name("_top_level.py")
_LOCK = threading.Lock()


def unify() -> None:
    """Make `pytorch_lightning` and `lightning.pytorch` two names of the same modules, in this process and from now on.

    The one that was imported already is kept; if neither was, `pytorch_lightning` if it is installed. Where only that is installed, `lightning`
    itself becomes a small stand-in. Calling it again does nothing. Warns (RuntimeWarning) if both were imported before: it is too late then, and
    `pytorch_lightning` is what the strategy is made from. Raises ImportError as `_versions.check` does.
    """
    with _LOCK:
        if any(isinstance(finder, _Finder) for finder in sys.meta_path):
            return
        _versions.check()
        kept, other = _kept_and_other()
        apart = [name for name in other if _is_imported(name)]
        if apart:
            _warn_apart(kept)
        aliases = {alias: name for alias, name in zip(other, kept, strict=True) if alias not in apart}
        sys.meta_path.insert(0, _Finder(aliases, _stand_in_folders()))


def _kept_and_other() -> tuple[tuple[str, str], tuple[str, str]]:
    """The modules that stay what they are, and the names that become theirs."""
    for separate, joint in zip(SEPARATE, JOINT, strict=True):
        if _is_imported(separate) != _is_imported(joint):
            return (SEPARATE, JOINT) if _is_imported(separate) else (JOINT, SEPARATE)
        if _is_imported(separate):
            break
    return (SEPARATE, JOINT) if _is_package(SEPARATE[0]) else (JOINT, SEPARATE)


def _is_imported(name: str) -> bool:
    """Whether a module of its own is imported under this name (and not another's)."""
    return getattr(sys.modules.get(name), "__name__", None) == name


def _is_package(name: str) -> bool:
    """Whether a top-level package can be imported. A mere folder of that name is none."""
    spec = _spec_of(name)
    return spec is not None and spec.origin is not None


def _spec_of(name: str) -> ModuleSpec | None:
    if name in sys.modules:
        return sys.modules[name].__spec__
    return importlib.util.find_spec(name)


def _warn_apart(kept: tuple[str, str]) -> None:
    names = sorted({name for name in (*SEPARATE, *JOINT) if _is_imported(name)})
    warnings.warn(
        f"{', '.join(names)} were imported before neuronx_distributed.lightning: two copies of Lightning, whose classes differ. The strategy, the "
        f"module and the callbacks of neuronx_distributed.lightning are made from {kept[0]}: use {kept[0]}.Trainer, because the other copy's refuses "
        "them. To be free to use both names, import neuronx_distributed.lightning first, or only one of the names before it.",
        RuntimeWarning,
        stacklevel=3,
    )


def _stand_in_folders() -> list[str] | None:
    """Where modules below the stand-in for `lightning` are looked for; None if a package of that name is installed, so that none is needed.

    A mere folder `lightning`, of the script's own, is no package: its modules can still be imported.
    """
    spec = _spec_of(_TOP)
    if spec is None:
        return []
    return list(spec.submodule_search_locations or ()) if spec.origin is None else None


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules under the names that became another's.

    aliases: their first parts, and what those stand for. folders: of the stand-in for `lightning`; None: it is installed.
    """

    def __init__(self, aliases: Mapping[str, str], folders: list[str] | None):
        self.aliases = aliases
        self.folders = folders

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname == _TOP and self.folders is not None:
            return importlib.util.spec_from_file_location(_TOP, _STAND_IN, submodule_search_locations=list(self.folders))
        real = self._real(fullname)
        spec = None if real is None else _spec_of(real)
        if real is None or spec is None:
            return None
        found = ModuleSpec(fullname, _Loader(real), origin=spec.origin)
        found.submodule_search_locations = spec.submodule_search_locations
        return found

    def _real(self, name: str) -> str | None:
        for alias, real in self.aliases.items():
            if name == alias or name.startswith(f"{alias}."):
                return real + name[len(alias) :]
        return None


class _Loader(importlib.abc.Loader):
    """Puts the real module under the other name. The real one is imported first, so that nobody sees half an alias, and keeps its own `__spec__`."""

    def __init__(self, real: str):
        self.real = real

    def create_module(self, spec: ModuleSpec) -> None:
        importlib.import_module(self.real)

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = sys.modules[self.real]
