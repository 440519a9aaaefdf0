"""`neuronx_distributed_training.lightning_modules.model.base_orpo`: odds ratio preference optimization (ORPO)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import DictConfig

from nxd_jax.training.lightning_modules.model.base_dpo import DPOBaseModel
from nxd_jax.training.models import preference_losses
from nxd_jax.training.utils.utils import get_attribute_from_cfg


class ORPOBaseModel(DPOBaseModel):
    """`model_alignment_strategy.orpo`: the chosen answer's loss, and how much likelier it is than the rejected one. There is no reference model."""

    name = "orpo"

    def _beta(self, cfg: DictConfig) -> float:
        return float(get_attribute_from_cfg(cfg, "model_alignment_strategy.orpo.beta", 0.01))

    def _extra(self) -> tuple[str, ...]:
        return ()

    def on_train_start(self) -> None:
        """Nothing is to be computed before."""

    def model_fwd_calc_loss(self, batch: Mapping[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        chosen, rejected = self.logps(batch, average=True)
        loss = preference_losses.orpo_loss(chosen, rejected, self.beta)
        return loss, self._metrics(chosen.detach(), rejected.detach())
