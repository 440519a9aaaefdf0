"""`neuronx_distributed_training.lightning_modules.data.megatron.data_module`: Megatron sets (`.bin` and `.idx` files)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from nxd_jax.training.config.loading import plain
from nxd_jax.training.data.megatron import tokenizers
from nxd_jax.training.data.megatron.loader import MegatronLoader
from nxd_jax.training.data.megatron.opening import KEYS, Source
from nxd_jax.training.data.megatron.samplers import (
    MegatronBatchSampler,
    MegatronPretrainingBatchSampler,
    MegatronPretrainingRandomBatchSampler,
)
from nxd_jax.training.data.megatron.samples import COLUMNS, Rules
from nxd_jax.training.data.rows import too_few
from nxd_jax.training.lightning_modules.data.base import BaseDataModule

logger = logging.getLogger("nxd_jax")

SAMPLES = "train_samples"
"""In checkpoints: how many samples the training's order was made for."""


class MegatronDataModule(BaseDataModule):
    """Reads the sets of `data.data_prefix`. Batches are dicts with tokens, labels, position_ids (int64) and loss_mask (float32), each [rows, seq_length], and
    attention_mask (bool [rows, 1]: attention is causal).

    | key of `data` | default | |
    |---|---|---|
    | `data_prefix` | | [PREFIX], [WEIGHT, PREFIX, ...], or a dict of such lists: train, validation, test |
    | `splits_string` | | shares of documents for training, validation and test |
    | `seq_length` | | tokens of a sample; `model.encoder_seq_length` |
    | `index_mapping_dir` | beside the data | where index maps are kept |
    | `tokenizer` | | as `tokenizers.load` takes it |
    | `dataloader_type` | | single (in order) or cyclic (each rank shuffles a part) |
    | `reset_position_ids`, `eod_mask_loss` | false | positions begin anew, no loss behind the end of a document |
    | `no_seqlen_plus_one_input_tokens` | false | samples do not share a token; the last label has no loss |
    | `validation_drop_last`, `pad_samples_to_global_batch_size` | true, false | the last batch of validation |
    | `drop_last` | true | of cyclic; nothing else is possible |

    `num_workers`, `skip_warmup` have no effect: files are mapped to memory, and batches read ahead. A training that is resumed goes on behind the samples that
    the checkpoint counts.

    Raises FileNotFoundError and ValueError for sets that are not there, damaged, or do not go with the keys; ValueError for `fine_tuning`,
    `reset_attention_mask` and any `data_impl` but mmap.
    """

    _train_ds: Any = None
    _validation_ds: Any = None
    _test_ds: Any = None

    def setup(self, stage: str | None = None) -> None:
        """Load the tokenizer, pad its vocabulary (`padded_vocab_size`), open the sets that the stage reads."""
        super().setup(stage)
        self._refuse()
        self._build_tokenizer()
        self._build_vocab()
        self._check_config()
        self._open(stage)

    def state_dict(self) -> dict[str, int]:
        return {**super().state_dict(), SAMPLES: self._train_samples()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        before = state_dict.get(SAMPLES)
        if before is not None and before != self._train_samples():
            logger.warning(
                "the order of samples was made for %d of them before, and now for %d (trainer.max_steps times data.global_batch_size): what comes next may "
                "have been trained on already",
                before,
                self._train_samples(),
            )

    # -- loaders --------------------------------------------------------------------------------------

    def train_dataloader(self) -> Any:
        return self.build_pretraining_data_loader(self._needed("train"), self.init_consumed_samples)

    def val_dataloader(self) -> Any:
        drop_last = self._data("validation_drop_last", True)
        return self.build_pretraining_data_loader(
            self._needed("valid"), 0, "validation", bool(drop_last), bool(self._data("pad_samples_to_global_batch_size", False))
        )

    def test_dataloader(self) -> Any:
        return self.build_pretraining_data_loader(self._needed("test"), 0, "test")

    def predict_dataloader(self) -> Any:
        """The test set."""
        return self.test_dataloader()

    def build_pretraining_data_loader(
        self,
        dataset: Any,
        consumed_samples: int,
        dataset_type: str | None = None,
        drop_last: bool = True,
        pad_samples_to_global_batch_size: bool = False,
    ) -> MegatronLoader:
        """A loader of this rank's batches. dataset_type: None for training, which a further pass goes on with; "validation" and "test" begin anew.

        Raises ValueError for a set with fewer samples than a step needs, and a `data.dataloader_type` that is neither single nor cyclic.
        """
        size, use = self.batch_sizes.global_batch_size, dataset_type or "train"
        if len(dataset) < size and (drop_last or not pad_samples_to_global_batch_size):
            raise ValueError(too_few(f"data.data_prefix for {use}", len(dataset), size))
        kind = self._data("dataloader_type")
        kinds: dict[Any, type[MegatronBatchSampler]] = {
            "single": MegatronPretrainingBatchSampler,
            "cyclic": MegatronPretrainingRandomBatchSampler,
        }
        if kind not in kinds:
            raise ValueError(f"data.dataloader_type={kind} must be single or cyclic")
        batches = kinds[kind](
            len(dataset),
            consumed_samples,
            self.batch_sizes.micro_batch_size,
            size,
            self.data_parallel_rank(),
            self.dp_size,
            bool(self._data("drop_last", True)) if kind == "cyclic" else drop_last,
            pad_samples_to_global_batch_size,
        )
        return MegatronLoader(dataset, batches, self._consumed if dataset_type is None else None)

    def _consumed(self) -> int:
        return self.compute_consumed_samples(self.trainer.global_step - getattr(self.trainer.lightning_module, "init_global_step", 0))

    def get_batch_length(self, batch: Any) -> int:
        return len(batch["tokens"])

    def process_global_batch(self, global_batch: Mapping[str, Any], global_batch_size: int | None = None) -> list[Any]:
        """The columns in the order in which a model takes them: tokens, labels, loss_mask, attention_mask, position_ids."""
        return [global_batch[name] for name in COLUMNS]

    # -- sets -----------------------------------------------------------------------------------------

    def _build_tokenizer(self) -> None:
        """Set `self.tokenizer`, which has `vocab_size` and `eos_id`. Override it for one of your own."""
        self.tokenizer = tokenizers.load(plain(self._data("tokenizer")))

    def build_train_valid_test_datasets(self) -> tuple[Any, Any, Any]:
        """The sets for training, validation and test; None for one that has no documents."""
        self._open(None)
        return self._train_ds, self._validation_ds, self._test_ds

    def _open(self, stage: str | None) -> None:
        needed = {use: self._samples(use) for use in _STAGES.get(stage or "", tuple(_ATTRIBUTES))}
        if stage == "fit" and self.trainer.limit_val_batches == 0:
            del needed["valid"]
        found = self._source().open(needed)
        for use, name in _ATTRIBUTES.items():
            if use in found:
                setattr(self, name, found[use])
        if "train" in found and self._train_ds is None:
            raise ValueError(f"data.splits_string={self._data('splits_string')} leaves no documents for training in data.data_prefix")
        if stage == "fit" and "valid" in found and self._validation_ds is None:
            logger.warning("there are no documents for validation (data.splits_string=%s): there is none", self._data("splits_string"))
            self.trainer.limit_val_batches = 0

    def _needed(self, use: str) -> Any:
        found = getattr(self, _ATTRIBUTES[use])
        if found is None:
            raise ValueError(f"data.data_prefix and data.splits_string={self._data('splits_string')} leave no documents for {KEYS[use]}")
        return found

    def _samples(self, use: str) -> int | None:
        """How many are needed; None for one pass, where a part of the batches is to be read (a limit that is no whole number)."""
        if use == "train":
            return self._train_samples()
        size, steps = self.batch_sizes.global_batch_size, int(self.trainer.max_steps)
        limit = self.trainer.limit_val_batches if use == "valid" else self.trainer.limit_test_batches
        if not isinstance(limit, int):
            return None
        return (self._validations(steps) if use == "valid" else 1) * limit * size

    def _train_samples(self) -> int:
        return int(self.trainer.max_steps) * self.batch_sizes.global_batch_size

    def _validations(self, steps: int) -> int:
        every = self.trainer.val_check_interval
        return steps // every + 1 if isinstance(every, int) else math.ceil(1 / (every or 1.0)) + 1

    def _source(self) -> Source:
        mapping = self._data("index_mapping_dir")
        return Source(
            plain(self._data("data_prefix")),
            self._data("splits_string"),
            self._rules(),
            int(self.config.get("seed") or 0),
            None if mapping is None else str(mapping),
            {"valid": bool(self._data("validation_drop_last", True))},
        )

    def _rules(self) -> Rules:
        return Rules(
            int(self._data("seq_length")),
            self.tokenizer.eos_id,
            bool(self._data("reset_position_ids", False)),
            bool(self._data("eod_mask_loss", False)),
            0 if self._data("no_seqlen_plus_one_input_tokens", False) else 1,
            self.padded_vocab_size,
        )

    # -- keys -----------------------------------------------------------------------------------------

    def _refuse(self) -> None:
        """What is not supported."""
        if self._data("fine_tuning", False):
            raise ValueError("data.fine_tuning: True is not supported; model_alignment_strategy.sft is what fine-tunes")
        if self._data("reset_attention_mask", False):
            raise ValueError("data.reset_attention_mask: True is not supported: attention goes over the ends of documents; set it to False")
        if (impl := self._data("data_impl", "mmap")) != "mmap":
            raise ValueError(f"data.data_impl={impl} must be mmap: `nxdt-data megatron` makes such sets")

    def _check_config(self) -> None:
        for name in ("data_prefix", "seq_length"):
            if self._data(name) is None:
                raise ValueError(f"data.{name} is missing: Megatron's data module reads it")
        seq, model = int(self._data("seq_length")), self.config.model.get("encoder_seq_length")
        if model is not None and int(model) != seq:
            raise ValueError(f"data.seq_length={seq} must be model.encoder_seq_length={model}")
        if int(self.trainer.max_steps) < 1:
            raise ValueError(
                f"trainer.max_steps={self.trainer.max_steps}: samples are cut for the whole training, so it must say how many steps there are"
            )
        for name in ("limit_val_batches", "limit_test_batches"):
            limit = getattr(self.trainer, name)
            if isinstance(limit, float) and limit > 1.0:
                raise ValueError(f"trainer.{name}={limit} must be a whole number of batches, or a part of at most 1.0")


_STAGES = {"fit": ("train", "valid"), "validate": ("valid",), "test": ("test",), "predict": ("test",)}
_ATTRIBUTES = {"train": "_train_ds", "valid": "_validation_ds", "test": "_test_ds"}
