"""torch's autograd engine counts devices once, at the first backward of the process. A device registered later has no queue in it.

The `torch.backends` entry point registers ours at `import torch`, so this concerns only a checkout that is on the path but not installed.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch


class _Probe(torch.Tensor):
    """A tensor on xla whose ops all give another one."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _probe()


def _probe(requires_grad: bool = False) -> torch.Tensor:
    return torch.Tensor._make_wrapper_subclass(_Probe, (1,), device="xla:0", requires_grad=requires_grad)  # type: ignore[attr-defined]


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _probe()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


def knows_xla() -> bool:
    """Whether a backward of xla tensors can run in this process."""
    x = _probe(requires_grad=True)
    try:
        torch.autograd.grad(_Identity.apply(x), [x], [_probe()])
    except RuntimeError as error:
        if "device_ready_queues_" in str(error):
            return False
        raise
    return True


def check() -> None:
    """Warn if the engine was started before the device was registered. Costs nothing where no autograd graph has been built yet."""
    if torch._C._autograd._get_sequence_nr() and not knows_xla():
        warnings.warn(
            "torch ran a backward pass before device 'xla' was registered, and its autograd engine counts devices only once: in this process backward() on xla "
            "tensors will fail with an internal assertion (device_ready_queues_). Install nxd_jax (pip install nxd-jax, or pip install -e . in a checkout): "
            "then `import torch` registers the device. Or import torch_xla (or torch_bridge) before the first backward().",
            RuntimeWarning,
            stacklevel=3,
        )
