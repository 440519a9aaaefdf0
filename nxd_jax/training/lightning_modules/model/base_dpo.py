"""`neuronx_distributed_training.lightning_modules.model.base_dpo`: direct preference optimization (DPO)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import DictConfig

from nxd_jax import _progress
from nxd_jax.tensor_parallel import casting, parallel_groups
from nxd_jax.training.data.alignment.preferences import CHOSEN, REJECTED, ROW, PreferenceRows
from nxd_jax.training.data.loaders import SetLoader
from nxd_jax.training.models import preference_losses
from nxd_jax.training.utils.utils import get_attribute_from_cfg
from torch_bridge.collectives import functional
from torch_bridge.runtime import steps

logger = logging.getLogger("nxd_jax")

COLUMNS = tuple(f"{side}_{name}" for side in (CHOSEN, REJECTED) for name in ("input_ids", "attention_mask", "labels"))
"""Of a batch, beside `row`."""


class DPOBaseModel:
    """What a model module learns by, in the place of next tokens: `model_alignment_strategy.dpo`.

    Before the first step the model scores all rows (`on_train_start`), and checkpoints keep that. `model_fwd_calc_loss` gives the loss of a micro-batch and
    the metrics chosen_rewards, rejected_rewards, reward_margins and reward_accuracies, means over rows. (The original has the first two.)

    module: a `BaseHfModel`. Raises ValueError for layouts that cannot: pipelines and context parallelism.
    """

    name = "dpo"

    def __init__(self, module: Any):
        self.module = module
        for kind in ("pipeline_model", "context"):
            if (size := module._size(f"{kind}_parallel_size")) > 1:
                raise ValueError(
                    f"distributed_strategy.{kind}_parallel_size={size} with model_alignment_strategy.{self.name}: a rank needs the logits of whole answers. "
                    "Set it to 1, and tensor_model_parallel_size higher"
                )
        self.beta = self._beta(module.config)
        self._table: torch.Tensor | None = None

    def _beta(self, cfg: DictConfig) -> float:
        return float(get_attribute_from_cfg(cfg, "model_alignment_strategy.dpo.kl_beta", 0.01))

    # -- batches --------------------------------------------------------------------------------------

    def process_global_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The columns that the loss takes. Raises ValueError for rows of another length than `model.encoder_seq_length`."""
        self.module._check_length(batch["chosen_input_ids"].shape[1])
        return {name: batch[name] for name in (*COLUMNS, *self._extra()) if name in batch}

    def _extra(self) -> tuple[str, ...]:
        return (ROW,)

    def logps(self, batch: Mapping[str, Any], average: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-probabilities [rows] of the chosen and of the rejected answers, from one forward pass of both."""
        ids, mask, labels = (
            torch.cat([batch[f"{side}_{name}"] for side in (CHOSEN, REJECTED)]) for name in ("input_ids", "attention_mask", "labels")
        )
        found = preference_losses.answer_logps(self.module.logits(ids, mask), labels, average)
        chosen, rejected = found.chunk(2)
        return chosen, rejected

    # -- the loss -------------------------------------------------------------------------------------

    def model_fwd_calc_loss(self, batch: Mapping[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(loss, metrics) of a micro-batch."""
        assert self._table is not None
        chosen, rejected = self.logps(batch)
        before = self._table[batch[ROW]]
        loss = preference_losses.dpo_loss(chosen, rejected, before[:, 0], before[:, 1], self.beta)
        return loss, self._metrics(chosen.detach() - before[:, 0], rejected.detach() - before[:, 1])

    def _metrics(self, chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, torch.Tensor]:
        better = (chosen > rejected).to(chosen.dtype)
        return {
            "chosen_rewards": self.beta * chosen.mean(),
            "rejected_rewards": self.beta * rejected.mean(),
            "reward_margins": self.beta * (chosen - rejected).mean(),
            "reward_accuracies": better.mean(),
        }

    # -- the reference --------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Score all rows with the model as it is, unless the checkpoint that training goes on from has it."""
        data = self.module.trainer.datamodule
        if not hasattr(data, "keep_reference"):
            raise ValueError(
                f"model_alignment_strategy.{self.name} needs rows with a chosen and a rejected answer: {type(data).__name__} is no ModelAlignmentDataModule"
            )
        for split, rows in data.data_sets.items():
            if rows is not None and not data.has_reference(split):
                if step := self.module.trainer.global_step:
                    logger.warning(
                        "%s was not there when training began: its reference values are those of the model at step %d, and not comparable with others",
                        rows.source,
                        step,
                    )
                data.keep_reference(split, self._scored(rows))
        self._table = data.reference_values().to(casting.wide_dtype()).to(self.module.trainer.strategy.root_device)

    def _scored(self, rows: PreferenceRows) -> torch.Tensor:
        """What the model makes of all rows, [rows, 2] on the CPU. Data-parallel ranks share the work."""
        dp, size = parallel_groups.size("dp"), int(self.module.config.data.micro_batch_size)
        device = self.module.trainer.strategy.root_device
        loader = SetLoader(_WholeBatches(rows, dp * size), dp, parallel_groups.rank("dp"), dp * size)
        was_training = self.module.model.training
        self.module.model.eval()
        found = []
        with torch.no_grad(), self.module._autocast():
            for batch in _progress.bar(loader, f"reference values of {rows.source}", 2):
                own = torch.stack(self.logps({name: batch[name].to(device) for name in COLUMNS}), dim=1)  # [size, 2]
                if dp > 1:  # rank r has rows r, r + dp, ...
                    own = functional.all_gather(own.unsqueeze(1), 1, parallel_groups.group("dp")).flatten(0, 1)
                steps.mark()
                found.append(own.cpu().float())
        self.module.model.train(was_training)
        return torch.cat(found)[: len(rows)]


class _WholeBatches:
    """Rows, with the first ones again at the end, so that the last batch is whole."""

    def __init__(self, rows: PreferenceRows, batch: int):
        self.rows = rows
        self.source = rows.source
        self.count = -(-len(rows) // batch) * batch

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index % len(self.rows)]
