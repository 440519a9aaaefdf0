"""What errors say of Neuron's modules that are not here, and that asking for them otherwise gives a plain no."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch_neuronx  # noqa: F401  (any module of ours will do)

from torch_bridge.device import absent

IMPORTS = {
    "import neuronxcc.nki as nki": "No module named 'neuronxcc' here: NKI kernels .* neuronx_distributed.kernels.flash_attn",
    "from neuronxcc.nki.language import nc": "NKI kernels",
    "from torch_neuronx.pyhlo import hlo_pb2": "No module named 'torch_neuronx.pyhlo' here: programs are StableHLO",
    "from torch_neuronx.xla_impl import structure": "No module named 'torch_neuronx.xla_impl.structure' here",
    "from torch_neuronx.xla_impl.trace import get_torch_dtype": "No module named 'torch_neuronx.xla_impl.trace' here",
    "from libneuronxla.neuron_cc_cache import CacheUrl": "NEURON_COMPILE_CACHE_URL",
    "from neuronx_distributed_inference.models.config import NeuronConfig": "nxd-generate",
    "import torch_xla.distributed.xla_dist": "torchrun",
    "import torch_xla.nothing": "No module named 'torch_xla.nothing'$",
}


@pytest.mark.parametrize("code", IMPORTS)
def test_imports(code: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=IMPORTS[code]):
        exec(code)


def test_asking_what_there_is() -> None:
    for name in absent.ABSENT:
        assert importlib.util.find_spec(name) is None
    absent.install()
    assert sum(isinstance(f, absent._Finder) for f in sys.meta_path) == 1
