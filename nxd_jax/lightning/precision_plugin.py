"""`neuronx_distributed.lightning.NeuronXLAPrecisionPlugin`: the step of an optimizer, with gradients that are right for the ranks there are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pytorch_lightning.plugins import XLAPrecision
from pytorch_lightning.utilities import GradClipAlgorithmType
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from nxd_jax.tensor_parallel import grads
from nxd_jax.trainer.optimizer import NxDOptimizer, reduce_gradients
from torch_bridge.optimizers.zero1 import ZeroRedundancyOptimizer
from torch_bridge.runtime import steps


class NeuronXLAPrecisionPlugin(XLAPrecision):
    """`neuronx_distributed.lightning.NeuronXLAPrecisionPlugin`: `optimizer.step()` on optimizers from `initialize_parallel_optimizer`, which reduce and clip
    gradients themselves; for any other, gradients are averaged over data-parallel ranks first.

    mixed_precision_enabled is accepted without effect: the precision of parameters is that of the model, master weights are the optimizer's
    (`mixed_precision_config`). precision: as `Trainer(precision=...)`; "bf16-true" and "16-true" set XLA_USE_BF16 and XLA_USE_F16 as Lightning does.
    """

    def __init__(self, mixed_precision_enabled: bool = False, precision: Any = "32-true"):
        super().__init__(precision)
        self._begin(mixed_precision_enabled, ends_step=False)

    def _begin(self, mixed_precision_enabled: bool, ends_step: bool) -> None:
        self.mixed_precision_enabled = mixed_precision_enabled
        self.ends_step = ends_step
        self._to_clip: dict[torch.optim.Optimizer, Callable[[], Any]] = {}
        self._reduced: torch.optim.Optimizer | None = None

    @classmethod
    def in_place_of(cls, plugin: XLAPrecision) -> NeuronXLAPrecisionPlugin:
        """For Lightning's own plugin, which a `Trainer` without plugins has: it also ends the step (`xm.mark_step()`) after the optimizer's."""
        found = cls.__new__(cls)
        found.__dict__.update(vars(plugin))
        found._begin(False, ends_step=True)
        return found

    def optimizer_step(self, optimizer: torch.optim.Optimizer, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:  # type: ignore[override]
        """One step. With automatic optimization `closure` computes loss and gradients; Lightning's hooks around the step are called where they would be."""
        result = optimizer.step(closure=partial(self._prepared, model, optimizer, closure), **kwargs)
        if self.ends_step or model.automatic_optimization:
            steps.mark()
        if model.automatic_optimization and result is None and not getattr(model, "runs_backward", False):
            raise MisconfigurationException(
                "training_step returned None: with XLA a step cannot be left out, for other ranks wait in its collectives. Return a loss of 0 times "
                "something that needs gradients, or use manual optimization"
            )
        return result

    def _prepared(self, model: Any, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Any:
        """Loss and gradients, the latter reduced and clipped unless the optimizer does it."""
        result = closure()
        reduces = isinstance(optimizer, (NxDOptimizer, ZeroRedundancyOptimizer))
        if not reduces:
            reduce_gradients(optimizer)
        self._to_clip.pop(optimizer, _nothing)()
        self._reduced = optimizer
        try:
            self._after_closure(model, optimizer)
        finally:
            self._reduced = None
        return result

    def clip_gradients(
        self,
        optimizer: torch.optim.Optimizer,
        clip_val: float | int = 0.0,
        gradient_clip_algorithm: Any = GradClipAlgorithmType.NORM,
    ) -> None:
        """`Trainer(gradient_clip_val=...)`, and `LightningModule.clip_gradients` in manual optimization: before the coming step, gradients are clipped once
        they are reduced over ranks. An optimizer from `initialize_parallel_optimizer` clips to this norm in its steps from now on, in place of `max_grad_norm`.

        Raises MisconfigurationException for clipping by value with such an optimizer.
        """
        if clip_val is None or clip_val <= 0:
            return
        optimizer = getattr(optimizer, "_optimizer", optimizer)  # in manual optimization, Lightning's wrapper is given
        if isinstance(optimizer, (NxDOptimizer, ZeroRedundancyOptimizer)):
            _clip_in_step(optimizer, float(clip_val), gradient_clip_algorithm)
            return
        by_value = gradient_clip_algorithm == GradClipAlgorithmType.VALUE
        clip = partial(self.clip_grad_by_value if by_value else _clip_norm, optimizer, float(clip_val))
        if self._reduced is optimizer:
            clip()
        else:
            self._to_clip[optimizer] = clip


def _nothing() -> None:
    """No clipping was asked for."""


def _clip_norm(optimizer: torch.optim.Optimizer, norm: float) -> None:
    grads.clip_grad_norm([p for group in optimizer.param_groups for p in group["params"]], norm)


def _clip_in_step(optimizer: NxDOptimizer | ZeroRedundancyOptimizer, norm: float, algorithm: Any) -> None:
    if algorithm == GradClipAlgorithmType.VALUE:
        raise MisconfigurationException(
            "gradient_clip_algorithm='value' comes before gradients are reduced over ranks, and an optimizer from initialize_parallel_optimizer reduces "
            "them in its step: use 'norm', or a plain torch optimizer"
        )
    if isinstance(optimizer, NxDOptimizer):
        optimizer.clip_to(norm)
    else:
        optimizer.grad_clipping, optimizer.max_norm = True, norm
