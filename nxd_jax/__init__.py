"""nxd_jax: NeuronX Distributed scripts on JAX. Scripts import it as `neuronx_distributed`.

Every module has the place and the names that it has there. So far: `trainer`, `lightning`, `optimizer`, `parallel_layers` (with `parallel_state`), `modules`,
`kernels`, `overrides`, `utils`, and, not part of the original, `checkpoint` (what the trainer's checkpoints are made of), `topology` (Trainium machines as data
and pictures), `abstract` (what a script needs on a machine that is not at hand), `inspect` (graphs, HLO, collectives, memory, costs of what runs), and the
commands `run`, `ckpt`, `top`, `ls` (each `nxd-` and its name on the command line) and `parallel_compile` (`neuron_parallel_compile`). Subpackages are imported
when first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_SUBMODULES = (
    "abstract",
    "inspect",
    "kernels",
    "lightning",
    "modules",
    "optimizer",
    "overrides",
    "parallel_layers",
    "parallel_state",
    "topology",
    "trainer",
    "utils",
)
_FROM = {
    "abstract_run": "abstract",
    "initialize_parallel_model": "trainer",
    "initialize_parallel_optimizer": "trainer",
    "neuronx_distributed_config": "trainer",
    "CheckpointIOState": "trainer.checkpoint",
    "finalize_checkpoint": "trainer.checkpoint",
    "has_checkpoint": "trainer.checkpoint",
    "load_checkpoint": "trainer.checkpoint",
    "save_checkpoint": "trainer.checkpoint",
}
"""Names that are here too, and the modules that define them."""
_LATER = {"ModelBuilder", "shard_checkpoint", "NxDModel", "pipeline", "trace"}

__all__ = ["__version__"]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _FROM:
        return getattr(importlib.import_module(f"{__name__}.{_FROM[name]}"), name)
    if name in _LATER:
        raise AttributeError(
            f"neuronx_distributed.{name} is not there yet: this release trains with parallel layers, neuronx_distributed_config, initialize_parallel_model and "
            "initialize_parallel_optimizer, in a loop of your own as examples/llama/train.py has it"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_SUBMODULES, *_FROM])
