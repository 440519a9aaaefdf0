"""`nn.Module.to("xla")` keeps each parameter the same Python object, so ties and optimizers made before it stay valid.

torch itself replaces parameters whose tensor type changes. Conversions that touch xla tensors, on either side, keep identity here; modules that
stay on other devices take torch's unchanged path.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils.weight_norm import WeightNorm

from torch_bridge.device import lazy_modules
from torch_bridge.replay import replay_policy

Convert = Callable[[torch.Tensor], torch.Tensor]

_original_apply = torch.nn.Module._apply
_PAYLOAD = ("_storage", "_layout")


def install() -> None:
    """Put the identity-keeping `nn.Module._apply` in place (once)."""
    if torch.nn.Module._apply is _original_apply:
        torch.nn.Module._apply = _apply  # type: ignore[method-assign]


def _apply(self: torch.nn.Module, fn: Convert, recurse: bool = True) -> torch.nn.Module:
    if replay_policy.MOVING.inside:
        return _converted(self, fn, recurse)
    with replay_policy.moved(self):
        return _converted(self, fn, recurse)


def _converted(self: torch.nn.Module, fn: Convert, recurse: bool) -> torch.nn.Module:
    if recurse:
        for module in self.children():
            module._apply(fn)
    if not _touches_xla(self, fn):
        return _original_apply(self, fn, recurse=False)
    computed = [hook for hook in self._forward_pre_hooks.values() if isinstance(hook, WeightNorm)]
    for hook in computed:  # its graph holds the parameters; it is computed anew before each forward pass
        setattr(self, hook.name, None)
    scripted = isinstance(self, torch.jit.ScriptModule)
    for name, parameter in self._parameters.items():
        if parameter is not None:
            if scripted:
                parameter = self._parameters[name] = _another(parameter, fn)
            else:
                _convert(parameter, fn, f"{type(self).__name__}.{name}")
            if parameter.device.type == "xla":
                from torch_bridge.passes import check_replicas

                check_replicas.own(self, name, parameter)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = lazy_modules.converted(buffer, fn) if is_lazy(buffer) else fn(buffer)
    for hook in computed:
        setattr(self, hook.name, hook.compute_weight(self))
    return self


def _touches_xla(module: torch.nn.Module, fn: Convert) -> bool:
    """True if a parameter (or a buffer without a shape) is on xla, or torch's own conversion (`.to`, `.to_empty`, ...) would put it there."""
    held = (*module._parameters.values(), *(b for b in module._buffers.values() if b is not None and is_lazy(b)))
    parameter = next((p for p in held if p is not None), None)
    if parameter is None:
        return False
    if parameter.device.type == "xla":
        return True
    if getattr(fn, "__module__", "") != torch.nn.Module.__module__:
        return False
    with torch.no_grad():
        return fn(torch.empty(0, dtype=parameter.dtype, device=parameter.device)).device.type == "xla"


def _convert(parameter: torch.nn.Parameter, fn: Convert, name: str) -> None:
    """Convert one parameter (and its gradient) in place."""
    if is_lazy(parameter):
        return _swap(parameter, lazy_modules.converted(parameter, fn), name)
    grad = parameter.grad
    with torch.no_grad():
        applied = fn(parameter)
        grad_applied = None if grad is None else fn(grad)
    if applied is parameter:
        return
    if applied.device == parameter.device:
        _keep_spec(parameter, applied)
        parameter.data = applied
        if grad is not None:
            parameter.grad = None
            parameter.grad = grad_applied
        return
    parameter.grad = None
    del grad
    _swap(parameter, applied, name)
    parameter.grad = grad_applied


def _another(parameter: torch.nn.Parameter, fn: Convert) -> torch.nn.Parameter:
    """A converted parameter of TorchScript's, whose own tensor holds on to the first one: as in torch, it is another one."""
    grad = parameter.grad
    with torch.no_grad():
        new = torch.nn.Parameter(fn(parameter), parameter.requires_grad)
        new.grad = None if grad is None else fn(grad)
    return new


def _keep_spec(parameter: torch.nn.Parameter, applied: torch.Tensor) -> None:
    """A converted parameter lies among the ranks as it did before."""
    old, new = (getattr(t, "_storage", None) for t in (parameter, applied))
    if old is not None and new is not None:
        new.lie_as(old)


def _swap(parameter: torch.nn.Parameter, applied: torch.Tensor, name: str) -> None:
    """Move a parameter to another device, keeping its identity and the attributes that users put on it."""
    attributes = {k: v for k, v in parameter.__dict__.items() if k not in _PAYLOAD and k != "_is_param"}
    new = applied if is_lazy(applied) else torch.nn.Parameter(applied.detach(), parameter.requires_grad)
    try:
        torch.utils.swap_tensors(parameter, new)
    except RuntimeError as error:
        raise RuntimeError(
            f"cannot move parameter {name} to {applied.device} now: {error}. Move the module before the forward pass or after backward, "
            "when no autograd graph and no weak reference holds the parameter."
        ) from error
    parameter.__dict__.update(attributes)
