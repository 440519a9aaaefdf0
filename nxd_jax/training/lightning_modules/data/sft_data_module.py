"""`neuronx_distributed_training.lightning_modules.data.sft_data_module`: the data module of first releases for fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from nxd_jax.training.lightning_modules.data.model_alignment_data_module import ModelAlignmentDataModule, strategy_of

__all__ = ["SFTDataModule"]


class SFTDataModule(ModelAlignmentDataModule):
    """`ModelAlignmentDataModule` for fine-tuning, also of files without `model_alignment_strategy`: there `data.packing` says whether rows are packed.

    (In the original's first releases `data.use_sft_style_data_module: True` chooses it.) Raises ValueError for DPO and ORPO.
    """

    SRC_NAME = "input"
    DST_NAME = "output"

    def _strategy(self, cfg: DictConfig) -> str:
        said = strategy_of(cfg)
        if said not in (None, "sft"):
            raise ValueError(
                f"SFTDataModule reads rows for fine-tuning, and the file has model_alignment_strategy.{said}: use ModelAlignmentDataModule"
            )
        return "sft"

    def _sft(self) -> Mapping[str, Any]:
        return super()._sft() if strategy_of(self.config) is not None else {"packing": bool(self._data("packing", False))}
