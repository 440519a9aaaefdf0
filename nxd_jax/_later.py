"""What NeuronX Distributed has and this release has not yet: its names, and what to do instead.

Importing one raises ModuleNotFoundError, so that `try: import ... except ImportError` goes on; asking a module for one raises AttributeError. The real module
of a name comes first, so a name may stay here until somebody takes it out.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_TIMELINE = (
    "it is not there (NxD itself writes no timeline: NxDPPModel leaves trace_file_path aside); for the times of a pipeline's step use "
    "`with nxd_jax.inspect.pipeline(model) as step:`, and nxd_jax.inspect.schedule for those of a schedule"
)
_OTHER = "it is not there yet; this release trains with parallel_layers, trainer, optimizer, modules.lora and lightning"

LATER = {
    **dict.fromkeys(("pipeline.timeline", "utils.timeline"), _TIMELINE),
    "experimental": _OTHER,
}
"""Modules and names below `neuronx_distributed`, and what an error says of them."""


def text(name: str) -> str:
    """What an error says of a name of `LATER`."""
    return f"neuronx_distributed.{name}: {LATER[name]}"


def install() -> None:
    """Let imports of what is in `LATER` say so."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """The last to be asked: finds nothing, and says why. `importlib.util.find_spec`, which asks what there is, gets its None."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        top, _, name = fullname.partition(".")
        if top in ("neuronx_distributed", "nxd_jax") and name in LATER and _importing():
            raise ModuleNotFoundError(text(name), name=f"neuronx_distributed.{name}")
        return None


def _importing() -> bool:
    """Whether it is an import that asks the finder which calls this, through importlib's `_find_spec` (and not `importlib.util.find_spec`)."""
    asking = sys._getframe(2).f_back
    return asking is not None and asking.f_code.co_name == "_find_and_load_unlocked"
