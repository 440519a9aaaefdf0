"""`neuronx_distributed_training.lightning_modules.data.base`: the data module that others derive from."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from pytorch_lightning import LightningDataModule

from nxd_jax.checkpoint import reading, writing
from nxd_jax.tensor_parallel import parallel_groups
from nxd_jax.training.batch_sizes import BatchSizes

logger = logging.getLogger("nxd_jax")

CONSUMED = "consumed_samples"
"""In names of checkpoints, and in what they hold."""


class BaseDataModule(LightningDataModule):
    """`BaseDataModule(cfg, trainer)`: subclasses write `train_dataloader`, `val_dataloader` and `test_dataloader`, and `get_batch_length`.

    cfg: the whole configuration. A loader gives the rows of one data-parallel rank: `global_batch_size / dp_size` of them in a batch, which stays on the CPU.

    Attributes: `config` (cfg), `trainer`, `dp_size`, `num_microbatches`, `init_consumed_samples` (samples that were trained on before the checkpoint that
    training goes on from; `setup` sets it, so overrides call `super().setup(stage)`), `padded_vocab_size` after `_build_vocab()`.

    Raises ValueError for batch sizes that do not fit the ranks. (The original rounds down.)
    """

    trainer: Any

    def __init__(self, cfg: DictConfig, trainer: Any):
        super().__init__()
        self.config = cfg
        self.trainer = trainer
        self.batch_sizes = BatchSizes.of(cfg, trainer.world_size)
        self.dp_size = self.batch_sizes.dp_size
        self.num_microbatches = self.batch_sizes.num_microbatches
        self.init_consumed_samples = 0
        self.resumed: dict[str, int] | None = None
        self.tokenizer: Any = None

    def setup(self, stage: str | None = None) -> None:
        """Say how many samples were trained on before."""
        super().setup(stage or "")
        path = getattr(self.trainer, "ckpt_path", None)
        io: Any = getattr(getattr(self.trainer, "strategy", None), "checkpoint_io", None)
        if path and hasattr(io, "takes_weights_only") and io.takes_weights_only(path):
            path = None
        self.init_consumed_samples = self._extract_consumed_samples_from_ckpt(path) if path else 0

    def _extract_consumed_samples_from_ckpt(self, ckpt_path: Any) -> int:
        """How many samples were trained on before a checkpoint was written; for subclasses whose checkpoints say it otherwise than `consumed_samples_of`."""
        return consumed_samples_of(ckpt_path)

    def _data(self, name: str, default: Any = None) -> Any:
        """A key of `data`; the default where it is missing or null."""
        found = self.config.data.get(name)
        return default if found is None else found

    # -- samples --------------------------------------------------------------------------------------

    def compute_consumed_samples(self, steps_since_resume: int = 0) -> int:
        """Samples that were trained on after so many steps more."""
        return self.init_consumed_samples + int(steps_since_resume) * self.batch_sizes.global_batch_size

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps: consumed_samples and global_batch_size."""
        steps = self.trainer.global_step - getattr(self.trainer.lightning_module, "init_global_step", 0)
        return {CONSUMED: self.compute_consumed_samples(steps), "global_batch_size": self.batch_sizes.global_batch_size}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint keeps."""
        self.resumed = {name: int(state_dict[name]) for name in (CONSUMED, "global_batch_size")}
        self.init_consumed_samples = self.resumed[CONSUMED]

    def data_parallel_rank(self) -> Any:
        """Which rows are this rank's; a number for each rank in a process that hosts several. Raises ValueError before ranks are laid out as cfg says."""
        if not parallel_groups.initialized():
            raise ValueError(
                f"{type(self).__name__}: ranks are not laid out yet; loaders are made when training begins, after the model module"
            )
        if parallel_groups.size("dp") != self.dp_size:
            raise ValueError(
                f"distributed_strategy makes {self.dp_size} data-parallel ranks, and the model laid out {parallel_groups.size('dp')}: its nxd_config must "
                "have the sizes of distributed_strategy"
            )
        return parallel_groups.rank("dp")

    # -- for subclasses -------------------------------------------------------------------------------

    def train_dataloader(self) -> Any:
        raise NotImplementedError(self._missing("train_dataloader"))

    def val_dataloader(self) -> Any:
        raise NotImplementedError(self._missing("val_dataloader"))

    def test_dataloader(self) -> Any:
        raise NotImplementedError(self._missing("test_dataloader"))

    def get_batch_length(self, batch: Any) -> int:
        """Rows of a batch."""
        raise NotImplementedError(self._missing("get_batch_length"))

    def process_global_batch(self, global_batch: Any, global_batch_size: int | None = None) -> Any:
        """A batch as the model takes it."""
        raise NotImplementedError(self._missing("process_global_batch"))

    def _missing(self, name: str) -> str:
        return f"{type(self).__name__} must override {name}()"

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """As it is: micro-batches go to the device one by one."""
        return batch

    # -- vocabulary -----------------------------------------------------------------------------------

    def _build_vocab(self) -> None:
        """Set `padded_vocab_size` from `self.tokenizer.vocab_size`."""
        self.padded_vocab_size = self._vocab_size_with_padding(
            orig_vocab_size=self.tokenizer.vocab_size,
            make_vocab_size_divisible_by=self.config.model.get("make_vocab_size_divisible_by", 128),
            tensor_model_parallel_size=self.config.distributed_strategy.get("tensor_model_parallel_size", 1),
        )

    def _vocab_size_with_padding(self, orig_vocab_size: int, make_vocab_size_divisible_by: int, tensor_model_parallel_size: int) -> int:
        """The next multiple of make_vocab_size_divisible_by * tensor_model_parallel_size."""
        unit = make_vocab_size_divisible_by * tensor_model_parallel_size
        padded = -(-orig_vocab_size // unit) * unit
        logger.info("vocabulary: %d, with padding %d", orig_vocab_size, padded)
        return padded


def consumed_samples_of(path: Any) -> int:
    """How many samples were trained on before a checkpoint was written: as it says, else as its name does (`consumed_samples=512.0`), else 0 with a warning.

    The original's names have the number that was logged last, which is too small where `log_every_n_steps` is above 1.
    """
    place = Path(os.fspath(path))
    file = place / writing.USER
    if file.is_file():
        kept = reading.load_object(file, weights_only=False)
        for part in kept.values() if isinstance(kept, Mapping) else ():
            if isinstance(part, Mapping) and CONSUMED in part and "global_batch_size" in part:
                return int(part[CONSUMED])
    found = re.findall(rf"{CONSUMED}=([0-9]+(?:\.[0-9]+)?)", os.fspath(path))
    if found:
        return int(float(found[-1]))
    logger.warning("%s says nothing of the samples that were trained on before it: they are counted from 0", place)
    return 0
