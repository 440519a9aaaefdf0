"""`neuronx_distributed.trace`: models traced for inference, compiled for all tensor parallel ranks, kept in files and run by shape.

Four generations of one API stand on `torch_bridge.aot`: `parallel_model_trace` (`trace.trace`), the builder of `trace.model_builder`, the builder that
`neuronx_distributed.ModelBuilder` is (`trace.model_builder_v2`), and its functions (`trace.functions`).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch_bridge.torch_neuronx  # noqa: F401 : scripts end with torch.classes.neuron.Runtime().unsafe_close()
from torch_bridge.aot import script_files

for _kind, _loader in (
    ("NxDModel", "nxd_jax.trace.nxd_model.torchscript:loaded"),
    ("NxDModelExecutor", "nxd_jax.trace.spmd:loaded"),
    ("parallel model", "nxd_jax.trace.trace:loaded"),
    ("traced module", "torch_bridge.aot.traced_module:loaded"),
):
    script_files.loads(_kind, _loader)

_FROM = {
    "parallel_model_load": "trace",
    "parallel_model_save": "trace",
    "parallel_model_trace": "trace",
    "ModelBuilder": "model_builder",
    "BaseModelInstance": "model_builder",
    "NxDModel": "nxd_model",
    "NxDParallelState": "parallel_context",
    "shard_checkpoint": "functions",
}
_MODULES = (
    "functions",
    "mock_torchdist",
    "model_builder",
    "model_builder_utils",
    "model_builder_v2",
    "nxd_model",
    "parallel_context",
    "spmd",
    "trace",
)


def __getattr__(name: str) -> Any:
    if name in _FROM:
        return getattr(importlib.import_module(f"{__name__}.{_FROM[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FROM, *_MODULES])
