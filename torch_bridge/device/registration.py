"""Makes `"xla"` a real torch device. Cheap: imports neither JAX nor the recorder.

`autoload` runs at `import torch` (entry point `torch.backends`) so that the device exists before the first backward of the process, when torch's
autograd engine counts devices for good. The facades call `register` again; it does nothing the second time.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from torch_bridge.device import aliasing
from torch_bridge.mesh import rank_numbers
from torch_bridge.recorder import autograd_engine
from torch_bridge.runtime import backend

_registered = False
_libraries: list[Any] = []


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    """What torch's core asks about the backend."""

    def is_available(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class _Guard(torch._C._acc.DeviceGuard):
    """One device, always current."""

    type_ = autograd_engine.GUARD_TYPE


def real_torch_xla() -> bool:
    """True if the original torch_xla is installed in this environment."""
    return aliasing.original("torch_xla") is not None


def autoload() -> None:
    """The `torch.backends` entry point: register unless the original torch_xla owns the device; never raises."""
    if not real_torch_xla():
        register()


def _start() -> None:
    from torch_bridge.device import startup  # noqa: F401


def _per_rank_hooks() -> Any:
    from torch_bridge.per_rank import hooks

    return hooks


def register() -> None:
    """Register device `xla` with torch. Idempotent."""
    global _registered
    if _registered:
        return
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", "xla"):
        raise RuntimeError(
            f"torch's one slot for an external device is already taken by '{name}' in this process, so 'xla' cannot be added. "
            "Import nxd_jax (or torch_xla) in a process that does not import the other backend."
        )
    from torch_bridge.device import (
        accelerator,
        autocast,
        data_parallel,
        default_group,
        device_module,
        factories,
        lazy_modules,
        module_to,
        pinning,
        serialization,
        torch_compile,
    )
    from torch_bridge.mesh import generators
    from torch_bridge.optimizers import fused_step
    from torch_bridge.recorder import cpu_attention
    from torch_bridge.runtime import step_hints

    backend.start_with(_start)
    rank_numbers.hooks_from(_per_rank_hooks)
    torch.utils.rename_privateuse1_backend("xla")
    torch._register_device_module("xla", device_module)
    sys.modules.setdefault("torch.xla", device_module)
    torch._C._acc.register_python_privateuseone_hook(_Hooks())
    torch._C._acc.register_python_privateuseone_device_guard(_Guard())
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    autograd = torch.library.Library("aten", "IMPL", "AutogradPrivateUse1")
    factories.install(library, autograd)
    cpu = torch.library.Library("aten", "IMPL", "CPU")
    cpu_attention.install(cpu)
    pinning.install(cpu)
    _libraries.extend((library, autograd, cpu))
    autocast.install()
    generators.install()
    module_to.install()
    data_parallel.install()
    accelerator.install()
    default_group.install()
    lazy_modules.install()
    fused_step.install()
    step_hints.install()
    autograd_engine.install(_Guard)
    serialization.install()
    torch_compile.install()
    _registered = True
