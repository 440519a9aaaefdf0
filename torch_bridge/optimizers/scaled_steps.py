"""Gradient scalers where ranks hold parts of one model, or where an optimizer's step reduces gradients itself (ZeRO-1, `NxDOptimizer`).

A scaler looks for inf before the step, so each rank sees its own gradients only. Ranks must agree: one that steps while another skips waits for it for ever, or
takes its inf in, or goes on with another scale. So `found_inf` is reduced over the ranks that step together, which those who divide parameters name (`ask`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from torch_bridge.collectives import functional
from torch_bridge.mesh import groups
from torch_bridge.mesh.groups import GroupLike
from torch_bridge.optimizers.skippable import stepped_unless

Found = dict[torch.device, torch.Tensor]
Together = Callable[[torch.optim.Optimizer], Iterable[GroupLike]]
"""Of an optimizer the groups of ranks that must step or skip together."""

_asked: list[Together] = []


class StepsTogether:
    """A base class of optimizers whose step has collectives in it."""

    _found_inf: torch.Tensor | None = None

    def stepping_together(self) -> Sequence[GroupLike]:
        """The groups of ranks that a step communicates in."""
        return (None,)

    def calling_off(self, found_inf: torch.Tensor) -> AbstractContextManager[None]:
        """Steps in here have all their collectives, and change nothing if `found_inf`, which the host need not know, is not 0."""
        return self._calling_off(found_inf)

    @contextmanager
    def _calling_off(self, found_inf: torch.Tensor) -> Iterator[None]:
        self._found_inf = found_inf
        try:
            yield
        finally:
            self._found_inf = None

    def _step_inside(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> Any:
        """Have an optimizer update what it holds, unless the step is called off."""
        if self._found_inf is None:
            return optimizer.step(**kwargs)
        return stepped_unless(self._found_inf, optimizer, optimizer.step, **kwargs)


class _MainGradients:
    """What a scaler reads of an optimizer, for gradients that are added up in `main_grad`."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        held = (getattr(p, "main_grad", None) for group in optimizer.param_groups for p in group["params"])
        self.param_groups = [{"params": [_with_gradient(grad) for grad in held if grad is not None]}]


def _with_gradient(grad: torch.Tensor) -> torch.Tensor:
    holder = torch.nn.Parameter(grad.detach())
    holder.grad = grad
    return holder


def ask(together: Together) -> None:
    """Have scalers ask also this function which groups of ranks an optimizer's step concerns. It must give the same groups on all ranks of a group."""
    if together not in _asked:
        _asked.append(together)


def stepping_with(optimizer: torch.optim.Optimizer) -> list[GroupLike]:
    """The groups of ranks that step or skip together with an optimizer, each once."""
    own = optimizer.stepping_together() if isinstance(optimizer, StepsTogether) else ()
    every = [*own, *(group for together in _asked for group in together(optimizer))]
    return list({groups.resolve(group).loose_text: group for group in every}.values())


def _of_all_ranks(unscale: Callable[..., Found]) -> Callable[..., Found]:
    @functools.wraps(unscale)
    def unscale_and_agree(
        self: GradScaler, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> Found:
        found = unscale(self, optimizer, inv_scale, found_inf, allow_fp16)
        if isinstance(optimizer, StepsTogether):
            found.update(unscale(self, _MainGradients(optimizer), inv_scale, found_inf, allow_fp16))  # both mark the same tensor
        over = stepping_with(optimizer)
        if over and not found:
            found = {found_inf.device: found_inf}  # the others wait for this rank, too, where it has no gradient
        for group in over:
            found = {device: functional.all_reduce("max", t, groups=group) for device, t in found.items()}
        return found

    return unscale_and_agree


def install() -> None:
    """Have torch's scalers, and those made from them, ask all ranks."""
    GradScaler._unscale_grads_ = _of_all_ranks(GradScaler._unscale_grads_)  # type: ignore[method-assign]


install()  # no optimizer that needs it can be made before this module is imported
