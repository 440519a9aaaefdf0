"""`neuronx_distributed.utils.adamw_fp32_optim_params`: AdamW that keeps its moments in full precision when `XLA_DOWNCAST_BF16=1` makes float32 bfloat16."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from torch_bridge.optimizers.fused_step import Update

_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW_FP32OptimParams(Optimizer):
    """Adam with decoupled weight decay, which comes last: p <- p - step * m / (sqrt(v) + eps), then p <- p - lr * weight_decay * p.

    lr, betas, eps, weight_decay: as usual; eps is added to the root of the uncorrected v. correct_bias: step = lr * sqrt(1 - b2^t) / (1 - b1^t), else
    lr. no_deprecation_warning: False gives a FutureWarning. differentiable, capturable: accepted without effect. On xla the update of a group is
    recorded as one op. With `XLA_DOWNCAST_BF16=1` gradients and moments are torch.double, which then is float32 on the device. The state's `step` is an
    int.

    Raises ValueError for parameters out of range, RuntimeError for sparse gradients.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        no_deprecation_warning: bool = True,
        differentiable: bool = False,
        capturable: bool = False,
    ):
        if not no_deprecation_warning:
            warnings.warn("AdamW_FP32OptimParams is deprecated: use torch.optim.AdamW", FutureWarning, stacklevel=2)
        for name, value in (("lr", lr), ("eps", eps)):
            if value < 0.0:
                raise ValueError(f"{name}={value} must not be negative")
        for k, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"betas[{k}]={beta} must be in [0, 1)")
        self.upcast_optim_states = os.environ.get("XLA_DOWNCAST_BF16", "0") == "1"
        super().__init__(
            params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, correct_bias=correct_bias, capturable=capturable)
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which gives moments the dtype of their parameter: here they keep the precision that the optimizer gives them. (NxD's lose it.)"""
        super().load_state_dict(state_dict)
        if not self.upcast_optim_states:
            return
        numbers = [k for group in state_dict["param_groups"] for k in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for k, p in zip(numbers, params, strict=True):
            for name in _MOMENTS:
                if name in state_dict["state"].get(k, {}):
                    self.state[p][name] = state_dict["state"][k][name].to(p.device, torch.double)

    def state_dtype(self, held: torch.Tensor) -> torch.dtype:
        """The dtype of the moments of a parameter, which checkpoints load in."""
        return torch.double if self.upcast_optim_states else held.dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Returns what `closure`, which computes the loss anew, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        """Parameters on xla that had as many steps are updated by one recorded op."""
        alike: dict[int, list[torch.Tensor]] = {}
        for p in group["params"]:
            if p.grad is None:
                continue
            count = self._counted(p)
            if p.device.type == "xla":
                alike.setdefault(count, []).append(p)
            else:
                self._update(p, group)
        for count, params in alike.items():
            (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
            numbers = [beta1, 1.0 - beta1, beta2, 1.0 - beta2, group["eps"], -self._size(group, count), -lr * decay]
            states = [[self.state[p][name] for p in params] for name in _MOMENTS]
            Update("adamw_fp32", params, states, numbers, {"decay"} if decay > 0.0 else set()).record()

    def _counted(self, p: torch.Tensor) -> int:
        """Make a parameter's state if there is none, and count a step."""
        assert p.grad is not None
        if p.grad.is_sparse:
            raise RuntimeError("AdamW_FP32OptimParams does not take sparse gradients: use torch.optim.SparseAdam")
        state = self.state[p]
        if not state:
            dtype = torch.double if self.upcast_optim_states else p.grad.dtype
            state.update(step=0, exp_avg=torch.zeros_like(p, dtype=dtype), exp_avg_sq=torch.zeros_like(p, dtype=dtype))
        state["step"] += 1
        return int(state["step"])

    @staticmethod
    def _size(group: dict[str, Any], count: int) -> float:
        beta1, beta2 = group["betas"]
        corrected = math.sqrt(1.0 - beta2**count) / (1.0 - beta1**count) if group["correct_bias"] else 1.0
        return float(group["lr"] * corrected)

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        assert p.grad is not None
        grad = p.grad.double() if self.upcast_optim_states else p.grad
        state = self.state[p]
        beta1, beta2 = group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(beta1).add_(grad, alpha=1.0 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        p.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-self._size(group, state["step"]))
        if group["weight_decay"] > 0.0:
            p.add_(p, alpha=-group["lr"] * group["weight_decay"])
