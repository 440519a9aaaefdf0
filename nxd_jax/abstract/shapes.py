"""What the tensors of a training script take on one core, by what they are for: seen through torch's own hooks on modules and optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_bridge.mesh import spmd
from torch_bridge.mesh.abstract_arrays import AbstractArray
from torch_bridge.recorder import placed
from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.runtime.abstract import Standing

KINDS = ("parameter", "buffer", "gradient", "master weight", "optimizer state")


class Witness:
    """Holds the modules that are called and the optimizers that step, from `start()` to `stop()`."""

    def __init__(self) -> None:
        self._modules: dict[torch.nn.Module, None] = {}
        self._optimizers: dict[torch.optim.Optimizer, None] = {}
        self._gradients: dict[int, int] = {}
        self._hooks: list[Any] = []
        self._some: dict[Any, Callable[[], torch.Tensor | None]] = {}

    def start(self) -> None:
        """Begin to look."""
        self._hooks = [register_module_forward_pre_hook(self._called), register_optimizer_step_pre_hook(self._stepping)]

    def stop(self) -> None:
        """Look no longer, and let go of them."""
        for hook in self._hooks:
            hook.remove()
        self._modules.clear()
        self._optimizers.clear()
        self._some.clear()

    def _called(self, module: torch.nn.Module, args: Any) -> None:
        self._modules[module] = None

    def _stepping(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers[optimizer] = None
        parameters = {id(p) for p in self._of_modules()}
        for p in (p for group in optimizer.param_groups for p in group["params"] if id(p) in parameters):
            held = p.grad if p.grad is not None else getattr(p, "main_grad", None)
            if held is not None:
                self._gradients[id(p)] = _gradient_bytes(p, held)

    def _of_modules(self) -> Iterator[torch.Tensor]:
        for module in self._modules:
            yield from (p for p in module._parameters.values() if p is not None)

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes on one core for each of `KINDS`. Gradients: those of the last step of each parameter."""
        seen: set[int] = set()
        tops = list(self._modules)
        found = dict.fromkeys(KINDS, 0)
        found["parameter"] = _total((p for m in tops for p in m.parameters()), seen)
        found["buffer"] = _total((b for m in tops for b in m.buffers()), seen)
        found["gradient"] = sum(self._gradients.values())
        found["master weight"] = _total((p for o in self._optimizers for g in o.param_groups for p in g["params"]), seen)
        found["optimizer state"] = _total(self._states(), seen)
        return found

    def _states(self) -> Iterator[Any]:
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                yield from state.values() if isinstance(state, dict) else ()

    # -- what comes into being (`torch_bridge.runtime.abstract.Training`) ------------------------------

    def standing(self, mesh: Any) -> Standing:
        """Whether an optimizer has state by now, and a parameter at the place with this mesh a gradient."""
        some = self._some.get(mesh)
        if some is None or some() is None:
            found = next((p for p in self._of_modules() if p.requires_grad and _mesh(p) == mesh), None)
            some = self._some[mesh] = (lambda: None) if found is None else weakref.ref(found)
        p = some()
        return Standing(any(optimizer.state for optimizer in self._optimizers), p is not None and _has_gradient(p))

    def state_bytes(self, mesh: Any) -> int:
        """Bytes of the optimizers' state on a core of the mesh of a place, with what lies on all cores."""
        found: dict[Any, int] = {}
        seen: set[int] = set()
        for t in self._states():
            if isinstance(t, XLATensor) and id(t._storage) not in seen:
                seen.add(id(t._storage))
                found[_mesh(t)] = found.get(_mesh(t), 0) + _bytes(t)
        return found.get(mesh, 0) + (found.get(None, 0) if mesh is not None else 0)


def _mesh(t: torch.Tensor) -> Any:
    """That of the place at which a tensor lies; None on the whole mesh."""
    place = placed.place_of(t) if isinstance(t, XLATensor) else None
    return None if place is None else place.mesh


def _has_gradient(p: torch.Tensor) -> bool:
    held = p.grad if p.grad is not None else getattr(p, "main_grad", None)
    return isinstance(held, XLATensor) and not held._storage.constant


def _total(tensors: Iterable[Any], seen: set[int]) -> int:
    """Bytes of the storages of xla tensors that were not seen before."""
    total = 0
    for t in tensors:
        if isinstance(t, XLATensor) and id(t._storage) not in seen:
            seen.add(id(t._storage))
            total += _bytes(t)
    return total


def _bytes(t: Any) -> int:
    """What a core holds of a tensor's storage: a rank's, or of an annotated tensor a device's."""
    if not isinstance(t, XLATensor):
        return t.numel() * t.element_size()
    of, held = t._storage.layout, t._storage.held
    if spmd.active() and isinstance(held, AbstractArray):
        return held.core_bytes
    return of.numel * of.dtype.itemsize


def _gradient_bytes(p: torch.Tensor, grad: torch.Tensor) -> int:
    """Of a parameter's gradient. How XLA lays an annotated one is not known while it waits: it counts as its parameter lies."""
    return _bytes(p) * grad.element_size() // p.element_size() if spmd.active() else _bytes(grad)
