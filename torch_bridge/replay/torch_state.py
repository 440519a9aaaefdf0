"""Settings of torch that decide what an op records, beside its arguments: gradient mode, autocast, random axes, default dtype and the like."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torch_bridge.guards import allowed_hooks, inference_mode
from torch_bridge.mesh import random_state, world


class Ambient(NamedTuple):
    """autocast: its dtype, None if it is off. axes: mesh axes along which random ops differ. epoch: of the world of ranks. rest: what only has to be equal
    (also whether inference mode is on)."""

    grad: bool
    autocast: torch.dtype | None
    cached: bool
    axes: tuple[str, ...]
    epoch: int
    rest: tuple[Any, ...]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """As it was, but for the gradient mode. Raises RuntimeError where that is not possible."""
        present = now()
        if (present.epoch, present.rest) != (self.epoch, self.rest):
            raise RuntimeError("the world of ranks, the default dtype or an attention or determinism setting of torch is not what it was")
        before, random_state.DEFAULT.axes = random_state.DEFAULT.axes, self.axes
        try:
            with torch.autocast("xla", dtype=self.autocast, enabled=self.autocast is not None, cache_enabled=self.cached):
                yield
        finally:
            random_state.DEFAULT.axes = before


def now() -> Ambient:
    """The settings at present."""
    autocast = torch.get_autocast_dtype("xla") if torch.is_autocast_enabled("xla") else None
    grad, cached = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    return Ambient(grad, autocast, cached, random_state.DEFAULT.axes, world.current().epoch, tuple(setting() for setting in _SETTINGS))


_SETTINGS = (
    torch.get_default_dtype,
    torch.are_deterministic_algorithms_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_overrideable_sdp_enabled,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    inference_mode.on,
)


def observed() -> bool:
    """Whether somebody else follows single operations: a torch mode, functorch, forward-mode derivatives, saved-tensor hooks (also those of activation
    checkpoints), hooks on all modules, a profiler or tracer, a transformers model that collects its layers' results; or inference mode is on
    (and not left)."""
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    return (
        bool(modes)
        or torch.is_inference_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        or any(_HOOKS_ON_ALL)
        or sys.getprofile() is not None
        or sys.gettrace() is not None
        or allowed_hooks.collecting()
    )


_HOOKS_ON_ALL = (
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_backward_hooks,
    torch.nn.modules.module._global_backward_pre_hooks,
)
