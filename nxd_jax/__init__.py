"""nxd_jax: NeuronX Distributed scripts on JAX. Scripts import it as `neuronx_distributed`.

Every module has the place and the names that it has there. So far: `trainer`, `lightning`, `optimizer`, `parallel_layers` (with
`parallel_state`), `modules`, `operators`, `kernels`, `overrides`, `utils`, `pipeline`, `quantization`, and `training`, which scripts import as
`neuronx_distributed_training`. Not part of the original: `checkpoint` (what the trainer's checkpoints are made of), `topology`
(Trainium machines as data and pictures), `abstract` (what a script needs on a machine that is not at hand), `inspect` (graphs, HLO,
collectives, memory, costs of what runs), `inference` (language models that generate text), and the commands `run`, `ckpt`, `top`, `ls`
(each `nxd-` and its name on the command line) and `parallel_compile` (`neuron_parallel_compile`).
Subpackages are imported when first used; what is not there yet, `_later.py` lists.
"""

from __future__ import annotations

import importlib
from typing import Any

from nxd_jax import _later
from nxd_jax._version import __version__

_SUBMODULES = (
    "abstract",
    "inference",
    "inspect",
    "kernels",
    "lightning",
    "modules",
    "operators",
    "optimizer",
    "overrides",
    "parallel_layers",
    "parallel_state",
    "pipeline",
    "quantization",
    "scripts",
    "topology",
    "trace",
    "trainer",
    "training",
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
    "BaseNxDModel": "trace.nxd_model",
    "ModelBuilder": "trace.model_builder_v2",
    "NxDModel": "trace.nxd_model",
    "NxDParallelState": "trace.parallel_context",
    "TorchScriptNxDModel": "trace.nxd_model",
    "convert_nxd_model_to_torchscript_model": "trace.nxd_model",
    "shard_checkpoint": "trace.functions",
}
"""Names that are here too, and the modules that define them."""

__all__ = ["__version__"]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _FROM:
        return getattr(importlib.import_module(f"{__name__}.{_FROM[name]}"), name)
    if name in _later.LATER:
        raise AttributeError(_later.text(name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_SUBMODULES, *_FROM])
