"""Modules of Neuron's software that scripts import and that are not here: what an error says of them, and what to use instead.

Importing one raises ModuleNotFoundError, so that `try: import ... except ImportError` goes on, and `importlib.util.find_spec` answers None. A module that is
installed comes first.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_KERNELS = (
    "NKI kernels and Neuron's compiler need Neuron hardware. For attention there is neuronx_distributed.kernels.flash_attn, for mixtures of experts "
    "neuronx_distributed.modules.moe; write other kernels as torch functions, or in JAX: torch_xla.core.xla_builder.call_jax"
)
_PROGRAMS = (
    "programs are StableHLO here, not HLO protobufs and NEFFs: use torch_neuronx.trace, neuronx_distributed.ModelBuilder or nxd_jax.inspect"
)
_CACHE = "JAX compiles here: NEURON_COMPILE_CACHE_URL, or NEURON_CC_FLAGS=--cache_dir=..., names the folder that keeps compiled programs"
_TEXT = "use nxd_jax.inference, or the command nxd-generate, for text from Hugging Face models"
_QUANTIZED = "use neuronx_distributed.quantization"

ABSENT = {
    "libneuronxla.libncc": _CACHE,
    "libneuronxla.neuron_cc_cache": _CACHE,
    "libneuronxla.neuron_cc_wrapper": _CACHE,
    "libneuronxla.proto": _PROGRAMS,
    "neuronx_distributed_inference": _TEXT,
    "neuronxcc": _KERNELS,
    "nki": _KERNELS,
    "nkilib": _KERNELS,
    "torch_neuron": "it is for Inferentia 1; use torch_neuronx.trace",
    "torch_neuronx.nki_hop": _KERNELS,
    "torch_neuronx.proto": _PROGRAMS,
    "torch_neuronx.pyhlo": _PROGRAMS,
    "torch_neuronx.xla_impl.structure": _PROGRAMS,
    "torch_neuronx.xla_impl.trace": _PROGRAMS,
    "torch_xla.distributed.xla_dist": "start one process per rank with torchrun, or all ranks of a machine with nxd-run",
    "torch_xla.experimental.quantized": _QUANTIZED,
    "torch_xla.experimental.xla_quantized_matmul": _QUANTIZED,
    "transformers_neuronx": _TEXT,
}
"""What an error says of a module, and so of all below it."""


def install() -> None:
    """Let imports of what is in `ABSENT` say so."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """The last to be asked: finds nothing, and says why."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        name = fullname.removeprefix("torch_bridge.")  # what an alias is of: `from torch_neuronx.xla_impl import trace` asks for it
        if name in ABSENT and _importing():
            raise ModuleNotFoundError(f"No module named {name!r} here: {ABSENT[name]}", name=name)
        return None


def _importing() -> bool:
    """Whether it is an import that asks the finder which calls this, through importlib's `_find_spec` (and not `importlib.util.find_spec`)."""
    asking = sys._getframe(2).f_back
    return asking is not None and asking.f_code.co_name == "_find_and_load_unlocked"
