"""`neuronx_distributed.trainer.optimizer`: an optimizer whose step also reduces and clips gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from nxd_jax._wrapper import Wrapper
from nxd_jax.tensor_parallel import grads
from nxd_jax.trainer import config
from torch_bridge.optimizers.scaled_steps import StepsTogether


def reduce_gradients(optimizer: torch.optim.Optimizer, average: bool = True) -> None:
    """Make gradients what one rank alone would have for the whole batch: over context-parallel ranks, of sequence-parallel parameters, then (if `average`)
    over data-parallel ranks; experts over those that hold the same ones.
    """
    grads.allreduce_context_parallel_gradients(optimizer)
    grads.allreduce_sequence_parallel_gradients(optimizer)
    if average:
        grads.average_over_data_parallel_ranks(p for group in optimizer.param_groups for p in group["params"])


def _gradients(optimizer: torch.optim.Optimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradients of an optimizer's parameters (`grad`, or `main_grad` where that collects them): of those that are no experts, and of experts."""
    others: list[torch.Tensor] = []
    experts: list[torch.Tensor] = []
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        grad = grads.gradient(p)
        if grad is not None:
            (experts if grads.is_expert(p) else others).append(grad)
    return others, experts


class NxDOptimizer(Wrapper, StepsTogether, torch.optim.Optimizer):
    """`neuronx_distributed.trainer.optimizer.NxDOptimizer`: a `torch.optim.Optimizer` around one, for schedulers and loops as they are.

    `step()`: average gradients over context-parallel ranks, add up those of sequence-parallel parameters, then average over data-parallel ranks and clip to
    `max_grad_norm` (ZeRO-1 does these two itself), and step. `optimizer`: the one inside, whose `state`, `param_groups` and `defaults` these are.
    `grad_norm`: the norm at the last step before clipping, shape [1]; None without clipping.

    Raises RuntimeError for precision options that need ZeRO-1, if it is not enabled.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, nxd_config: dict[str, Any]):
        config.check_precision(nxd_config)
        self.optimizer = optimizer
        self.nxd_config = nxd_config
        options = nxd_config["optimizer_config"]
        self.zero_enabled = bool(options["zero_one_enabled"])
        self.grad_clipping = bool(options["grad_clipping"])
        self.max_grad_norm = options.get("max_grad_norm")
        self._norm: torch.Tensor | None = None
        self._wrapped = False
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        self._wrapped = True

    # -- the optimizer inside -------------------------------------------------------------------------

    def _nxd_inner(self) -> torch.optim.Optimizer:
        return self.optimizer

    @property
    def state(self) -> Any:
        """The state of the optimizer inside, by parameter. Under ZeRO-1 that of this rank's parts is `optimizer.base_optimizer.state`."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        if getattr(self, "_wrapped", False):
            self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of parameters with their options, which schedulers change."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        if getattr(self, "_wrapped", False):
            self.optimizer.param_groups = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The options that groups have unless they say otherwise."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, value: Any) -> None:
        if getattr(self, "_wrapped", False):
            self.optimizer.defaults = value

    @property
    def params(self) -> list[torch.Tensor]:
        """All parameters, in order."""
        return [p for group in self.param_groups for p in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. The state of the others stays."""
        if not self._wrapped:
            return
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    # -- a step ---------------------------------------------------------------------------------------

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients at the last step, before clipping."""
        return self.optimizer.grad_norm if self.zero_enabled else self._norm  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; zeros with set_to_none=False. (NxD's default is zeros; torch's, and ours, is None: a parameter that a later step does not
        use is then left alone.)"""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce and clip gradients, then update. Returns what `closure`, which computes the loss anew, returns; it runs first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        reduce_gradients(self, average=False)
        if not self.zero_enabled:
            grads.average_gradients(*self._fetch_gradients())
        if not self.zero_enabled and self.grad_clipping:
            assert self.max_grad_norm is not None
            self._norm = grads.clip_grad_norm(self.params, self.max_grad_norm)
        self._step_inside(self.optimizer)
        return loss

    def calling_off(self, found_inf: torch.Tensor) -> AbstractContextManager[None]:
        """Steps in here change nothing if `found_inf` is not 0 (`torch_xla.amp.GradScaler`)."""
        return self.optimizer.calling_off(found_inf) if isinstance(self.optimizer, StepsTogether) else super().calling_off(found_inf)

    def _fetch_gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The gradients that a step reduces (`grad`, or `main_grad` where that collects them): of parameters that are no experts, and of experts."""
        return _gradients(self)

    def clip_to(self, norm: float) -> None:
        """From now on clip gradients to this norm in every step."""
        self.grad_clipping, self.max_grad_norm = True, norm
        if self.zero_enabled:
            self.optimizer.grad_clipping, self.optimizer.max_norm = True, norm  # type: ignore[attr-defined]

    # -- deprecated -----------------------------------------------------------------------------------

    def save_state_dict(self, output_dir: str, num_workers_per_step: int = 8) -> None:
        """Deprecated by NxD: `neuronx_distributed.save_checkpoint(dir, tag, optimizer=self)`."""
        from nxd_jax.optimizer import sharded_states

        sharded_states.save(self.state_dict(), output_dir)

    def load_state_dict_from(self, output_dir: str, num_workers_per_step: int = 8) -> None:
        """Deprecated by NxD: `neuronx_distributed.load_checkpoint(dir, tag, optimizer=self)`."""
        from nxd_jax.optimizer import sharded_states

        self.load_state_dict(sharded_states.load(output_dir))
