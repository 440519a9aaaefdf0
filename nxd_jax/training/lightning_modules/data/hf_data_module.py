"""`neuronx_distributed_training.lightning_modules.data.hf_data_module`: sets of Hugging Face's `datasets`."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from typing import Any

from nxd_jax.training.data import making, sets, tokenizing
from nxd_jax.training.data.loaders import SampleLoader, SetLoader, StreamLoader
from nxd_jax.training.data.rows import Rows, Rules
from nxd_jax.training.data.streams import Stream
from nxd_jax.training.lightning_modules.data.base import BaseDataModule

logger = logging.getLogger("nxd_jax")


class HFDataModule(BaseDataModule):
    """Reads `data.train_dir`, `val_dir` and `test_dir`: folders of `Dataset.save_to_disk`, or files (.jsonl, .parquet, .arrow) with the columns input_ids[,
    attention_mask, labels], or with text. Batches are dicts of int64 tensors [rows, width] with these three columns.

    | key of `data` | default | |
    |---|---|---|
    | `train_dir`, `val_dir`, `test_dir` | | a path, or a list of them |
    | `shuffle`, `seed` | false, `seed` of the file | shuffle `train_dir` anew in each epoch |
    | `streaming` | false | read from front to back, tokenising meanwhile |
    | `tokenizer` | | a folder, for text; rows are as wide as `model.encoder_seq_length` |
    | `text_column` | text | where the text is |

    (All but the three folders are not in the original.) Rank r of dp reads rows r, r + dp, ...; what fills no global batch at the end is left out. A
    training that is resumed goes on with the next samples, also with other numbers of ranks or another batch size. (The original begins at the first again.)

    Raises FileNotFoundError and ValueError for sets that are not there, too small, of another width or another vocabulary.
    """

    shifted_labels = False
    """A label stands at its token's own place; models shift them."""

    _gone_on = False

    def setup(self, stage: str | None = None) -> None:
        """Load the tokenizer, if there is one; leave validation out, if there is no set. Raises ValueError for one larger than the model's vocabulary."""
        super().setup(stage)
        if stage == "fit" and self._data("val_dir") is None and self.trainer.limit_val_batches != 0:
            logger.warning("data.val_dir is not set: there is no validation (trainer.limit_val_batches=0.0 says so without this warning)")
            self.trainer.limit_val_batches = 0
        name = self._data("tokenizer")
        if name is not None and not isinstance(name, str):
            name = name.get("type")  # as alignment has it
        if name is None:
            return
        self.tokenizer = tokenizing.load_tokenizer(name, "data.tokenizer")
        size = sets.vocab_size_of(self.config)
        if size is not None and len(self.tokenizer) > size:
            raise ValueError(
                f"data.tokenizer={name} has {len(self.tokenizer)} tokens, and vocab_size in model.model_config={self.config.model.model_config} is {size}: use "
                f"the model's own tokenizer, or set vocab_size to {len(self.tokenizer)} at least"
            )

    def train_dataloader(self) -> Any:
        self._train_ds, loader = self._open("train_dir", "train")
        self._go_on(loader)
        return loader

    def val_dataloader(self) -> Any:
        self._validation_ds, loader = self._open("val_dir", "val")
        return loader

    def test_dataloader(self) -> Any:
        self._test_ds, loader = self._open("test_dir", "test")
        return loader

    def get_batch_length(self, batch: Any) -> int:
        return len(batch["input_ids"])

    def process_global_batch(  # type: ignore[override]  # the original's own order
        self, global_batch: Mapping[str, Any], input_names: Collection[str] | None = None, global_batch_size: int | None = None
    ) -> dict[str, Any]:
        """The columns that a model takes. input_names: them; None: all."""
        return {name: values for name, values in global_batch.items() if input_names is None or name in input_names}

    # -- loaders --------------------------------------------------------------------------------------

    def _open(self, name: str, use: str) -> tuple[Any, Any]:
        """A set and its loader."""
        key, value = f"data.{name}", self._data(name)
        if value is None:
            raise ValueError(
                f"{key} is not set: it names a folder that datasets' save_to_disk wrote, or files with the column input_ids. {sets.HOW}"
            )
        length = self.config.model.get("encoder_seq_length")
        wanted = sets.Wanted(
            key,
            value,
            use,
            self.batch_sizes.global_batch_size,
            length=None if length is None else int(length),
            tokenizer=self.tokenizer,
            column=self._data("text_column", "text"),
        )
        if not self._data("streaming", False):
            data = sets.open_set(wanted)
            return data, self._build_dataloader(data, wanted)
        if self._data("shuffle", False):
            raise ValueError(
                "data.shuffle=true needs the whole set, and data.streaming=true reads it from front to back: set one of them to false"
            )
        stream = Stream(sets.open_stream(wanted), self._rules(wanted))
        return stream, StreamLoader(stream, self.dp_size, self.data_parallel_rank(), self.batch_sizes.global_batch_size)

    def _build_dataloader(self, data: Any, wanted: sets.Wanted | None = None) -> Any:
        """The loader of a `datasets.Dataset`. wanted: where it is from."""
        wanted = wanted or sets.Wanted("data", str(self._data("train_dir", "")))
        others = sorted(set(data.column_names) - set(making.COLUMNS))
        if others:
            logger.warning(
                "%s: the columns %s are left out; the model takes %s", wanted.source, ", ".join(others), ", ".join(making.COLUMNS)
            )
        shuffle = wanted.use == "train" and bool(self._data("shuffle", False))
        return SetLoader(
            Rows(data, self._rules(wanted)),
            self.dp_size,
            self.data_parallel_rank(),
            self.batch_sizes.global_batch_size,
            shuffle,
            int(self._data("seed", self.config.get("seed") or 0)),
        )

    def _rules(self, wanted: sets.Wanted) -> Rules:
        size = sets.vocab_size_of(self.config)
        return Rules(wanted.source, wanted.length, size, f"vocab_size in model.model_config={self.config.model.get('model_config')}")

    def _go_on(self, loader: SampleLoader) -> None:
        """Begin behind the samples that were trained on, once, where the checkpoint does not say it to the loader itself."""
        if self._gone_on:
            return
        self._gone_on = True
        if self.resumed is None:
            if self.init_consumed_samples and not self.config.model.get("weight_init_only"):
                loader.begin(self._within_epoch(loader, self.init_consumed_samples))
            return
        if self.resumed["global_batch_size"] != loader.global_batch_size:
            self._count_again(loader, self.resumed["global_batch_size"])

    def _count_again(self, loader: SampleLoader, before: int) -> None:
        """Have Lightning count the batches of the epoch under way in their new size. before: the size that they had."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        current, read = progress.current, progress.current.ready
        samples = read * before
        if not read or read >= self._most_batches(loader):
            return
        for name in ("ready", "started", "processed", "completed"):
            setattr(current, name, samples // loader.global_batch_size + getattr(current, name) - read)
        progress.is_last_batch = False
        loader.begin(samples)

    def _most_batches(self, loader: SampleLoader) -> float:
        """In an epoch, by `trainer.limit_train_batches`."""
        limit = self.trainer.limit_train_batches
        if isinstance(limit, int):
            return limit
        return math.inf if limit is None or limit == 1.0 or not isinstance(loader, SetLoader) else int(len(loader) * limit)

    def _within_epoch(self, loader: SampleLoader, samples: int) -> int:
        """Of the samples of all passes, those of the last one."""
        if not isinstance(loader, SetLoader):
            return samples
        return samples % (len(loader) * loader.global_batch_size)
