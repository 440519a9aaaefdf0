"""What NeuronX Distributed has and this release has not yet: its names, and what to do instead.

Importing one raises ModuleNotFoundError, so that `try: import ... except ImportError` goes on; asking a module for one raises AttributeError. The real module
of a name comes first, so a name may stay here until somebody takes it out.
"""

from __future__ import annotations

from torch_bridge.device.import_errors import ExplainingFinder

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
    _Finder.install()


class _Finder(ExplainingFinder):
    def error_of(self, fullname: str) -> ModuleNotFoundError | None:
        top, _, name = fullname.partition(".")
        known = top in ("neuronx_distributed", "nxd_jax") and name in LATER
        return ModuleNotFoundError(text(name), name=f"neuronx_distributed.{name}") if known else None
