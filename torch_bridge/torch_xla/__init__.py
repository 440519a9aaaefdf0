"""`torch_xla` on JAX: the names that PyTorch/XLA and Neuron training scripts import. Importing it registers device "xla" and starts
nothing.

`__version__` is the torch_xla release whose names these are ("2.9.0": names that later releases removed still work), not a version of this
project.
"""

import importlib
from typing import Any

from torch_bridge.device import aliasing

aliasing.refuse_original("torch_xla")
aliasing.install("torch_xla", __name__)

from torch_bridge.config import environment  # noqa: E402
from torch_bridge.device import registration as _device  # noqa: E402
from torch_bridge.mesh import world as _world  # noqa: E402

environment.prepare()
_device.register()
_world.expect_ranks()

from torch_bridge.torch_xla import _XLAC, runtime  # noqa: E402
from torch_bridge.torch_xla import _spmd_ops as _spmd_ops  # noqa: E402
from torch_bridge.torch_xla.core import xla_env_vars, xla_model  # noqa: E402
from torch_bridge.torch_xla.core import xla_model as xm  # noqa: E402
from torch_bridge.torch_xla.distributed import xla_backend, xla_multiprocessing  # noqa: E402
from torch_bridge.torch_xla.torch_xla import compile, device, device_count, devices, launch, manual_seed, real_devices, step, sync  # noqa: E402
from torch_bridge.torch_xla.version import __version__  # noqa: E402

_SUBPACKAGES = ("amp", "backends", "core", "debug", "distributed", "experimental", "stablehlo", "test", "utils")

__all__ = [
    "_XLAC",
    "__version__",
    "compile",
    "device",
    "device_count",
    "devices",
    "launch",
    "manual_seed",
    "real_devices",
    "runtime",
    "step",
    "sync",
    "xla_backend",
    "xla_env_vars",
    "xla_model",
    "xla_multiprocessing",
    "xm",
]


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'torch_xla' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBPACKAGES})
