"""`torch_xla.amp.grad_scaler`."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler as _TorchGradScaler

from torch_bridge.optimizers.scaled_steps import StepsTogether
from torch_bridge.optimizers.skippable import stepped_unless


class GradScaler(_TorchGradScaler):
    """`torch_xla.amp.GradScaler`: dynamic loss scaling that never waits for the device.

    torch's own asks on the host whether gradients overflowed, which would cut the graph in every step. Here the optimizer always
    steps, and on overflow every parameter and state keeps its old value. `use_zero_grad` is accepted and not needed.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        use_zero_grad: bool = False,
    ):
        super().__init__("xla", init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def _maybe_opt_step(self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        found_inf = torch.stack([f.reshape(()) for f in optimizer_state["found_inf_per_device"].values()]).sum()
        if isinstance(optimizer, StepsTogether):
            with optimizer.calling_off(found_inf):
                return optimizer.step(*args, **kwargs)
        return stepped_unless(found_inf, optimizer, optimizer.step, *args, **kwargs)
