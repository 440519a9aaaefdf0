"""Stand-ins for the few torch_xla names that the examples use, so that DISABLE_XLA=1 runs them in plain PyTorch on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace

import torch


def _optimizer_step(optimizer: torch.optim.Optimizer, barrier: bool = False) -> None:
    optimizer.step()


def _add_step_closure(closure: Callable[..., None], args: tuple = ()) -> None:
    closure(*args)


def _device_loader(loader: Iterable, device: torch.device, **_: object) -> Iterable:
    return loader


xm = SimpleNamespace(
    mark_step=lambda: None,
    optimizer_step=_optimizer_step,
    add_step_closure=_add_step_closure,
    save=torch.save,
)
torch_xla = SimpleNamespace(device=lambda: torch.device("cpu"), sync=lambda: None)
pl = SimpleNamespace(MpDeviceLoader=_device_loader)
