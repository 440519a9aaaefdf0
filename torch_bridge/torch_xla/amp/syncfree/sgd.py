"""`torch_xla.amp.syncfree.sgd`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_bridge.optimizers.skippable import stepped_unless


class SGD(torch.optim.SGD):
    """`torch_xla.amp.syncfree.SGD`: `torch.optim.SGD`, whose step changes nothing if `found_inf` (a tensor on the device) is not 0."""

    def step(self, closure: Callable[[], Any] | None = None, found_inf: torch.Tensor | None = None) -> Any:
        """One step; called off on the device if `found_inf` is given and not 0."""
        return self._step(closure) if found_inf is None else stepped_unless(found_inf, self, self._step, closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """torch's step. With dampening, the first gradient enters the momentum whole, and as only the device knows whether a step was called off, only it
        knows which gradient is the first: 0-d `momentum_made` in the state tells it, 0 as long as all were called off."""
        dampened = [(group, p) for group in self.param_groups if group["momentum"] and group["dampening"] for p in group["params"]]
        new = [p for _, p in dampened if self.state[p].get("momentum_buffer") is None]
        unsure = [(group, p, p.detach().clone()) for group, p in dampened if "momentum_made" in self.state[p]]
        result = super().step(closure)
        with torch.no_grad():
            for p in new:
                if p.grad is not None:
                    self.state[p]["momentum_made"] = torch.ones((), device=p.device)
            for group, p, before in unsure:
                if p.grad is not None:
                    self._start_unless_made(group, p, before)
        return result

    def _start_unless_made(self, group: dict[str, Any], p: torch.Tensor, before: torch.Tensor) -> None:
        """Put what a first step gives in place of what torch's step gave."""
        state = self.state[p]
        made = state["momentum_made"] != 0
        assert p.grad is not None
        grad = (-p.grad if group["maximize"] else p.grad) + group["weight_decay"] * before
        update = grad + group["momentum"] * grad if group["nesterov"] else grad
        p.copy_(torch.where(made, p, before - group["lr"] * update))
        state["momentum_buffer"].copy_(torch.where(made, state["momentum_buffer"], grad))
        state["momentum_made"].fill_(1)
