"""nxd_jax: NeuronX Distributed scripts on JAX. Scripts import it as `neuronx_distributed`.

Every module has the place and the names that it has there. So far: `parallel_layers` (with `parallel_state`), `modules`, `kernels`, `overrides`, `utils`,
and, not part of the original, `topology` (Trainium machines as data and pictures) and `run` (the command `nxd-run`). Subpackages are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_SUBMODULES = ("kernels", "modules", "overrides", "parallel_layers", "parallel_state", "topology", "utils")
_LATER = {
    "CheckpointIOState", "finalize_checkpoint", "has_checkpoint", "load_checkpoint", "save_checkpoint", "initialize_parallel_model",
    "initialize_parallel_optimizer", "neuronx_distributed_config", "ModelBuilder", "shard_checkpoint", "NxDModel", "pipeline", "trace", "trainer",
    "lightning", "optimizer",
}  # fmt: skip

__all__ = ["__version__"]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _LATER:
        raise AttributeError(
            f"neuronx_distributed.{name} is not there yet: this release has the parallel layers and parallel state. Write the loop with torch.optim and "
            "parallel_layers.grads as examples/llama/train.py does"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_SUBMODULES])
