"""What ranks read in a Trainer, where a training goes on, and what is said of sets that do not fit."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from nxd_jax.training.data import sets
from nxd_jax.training.lightning_modules.data.hf_data_module import HFDataModule
from tests.nxd_jax.lightning import jobs
from tests.nxd_jax.training.data import corpus
from tests.nxd_jax.training.lightning_modules.data import reading

pytestmark = [
    *jobs.MARKS,
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no"),
]

ROWS = 22


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A set of 22 rows: five steps of four, and two that are left out."""
    return corpus.save(corpus.numbers(ROWS), tmp_path / "set")


def keep(folder: Path, every: int) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=folder / "kept", every_n_train_steps=every, save_top_k=-1, filename="{step}")


def test_ranks_read_their_rows(made: Path, tmp_path: Path) -> None:
    module, data, _ = reading.read(tmp_path, reading.config(made, tp=2), devices=4)
    assert (data.dp_size, data.num_microbatches, data.compute_consumed_samples(3)) == (2, 2, 12)
    assert module.batches == [[[k, k + 2], [k + 1, k + 3]] for k in range(0, 20, 4)]
    assert module.columns == [(name, torch.int64, (2, 4)) for name in ("input_ids", "attention_mask", "labels")]
    assert data.get_batch_length({"input_ids": torch.zeros(3, 4)}) == 3
    assert data.process_global_batch({"input_ids": 1, "x": 2}, ["input_ids"]) == {"input_ids": 1}
    assert data.process_global_batch({"input_ids": 1, "x": 2}) == {"input_ids": 1, "x": 2}


WAYS: dict[str, dict[str, Any]] = {"in order": {}, "shuffled": {"shuffle": True}, "streaming": {"streaming": True}}


@pytest.mark.thorough(keep=10)
@pytest.mark.core(keep=2)
@pytest.mark.parametrize("after", [{"devices": 4}, {"devices": 1}, {"devices": 2, "gbs": 2}], ids=str)
@pytest.mark.parametrize("stop", [3, 5, 7])
@pytest.mark.parametrize("way", WAYS)
def test_a_training_that_is_resumed_reads_what_comes_next(way: str, stop: int, after: dict[str, Any], made: Path, tmp_path: Path) -> None:
    """In the middle and at the end of an epoch, at another number of ranks, with another batch size."""
    whole, _, _ = reading.read(tmp_path, reading.config(made, **WAYS[way]), devices=2, max_steps=10)
    reading.read(tmp_path, reading.config(made, **WAYS[way]), devices=2, max_steps=stop, callbacks=[keep(tmp_path, stop)])
    gbs = after.get("gbs", 4)
    begun = reading.config(made, gbs=gbs, **WAYS[way])
    steps = stop + (10 - stop) * 4 // gbs
    then, data, _ = reading.read(tmp_path, begun, after["devices"], tmp_path / "kept" / f"step={stop}.ckpt", max_steps=steps)
    wanted, found = chain(whole.samples()[stop:]), chain(then.samples())
    assert data.init_consumed_samples == stop * 4
    assert data.compute_consumed_samples(2) == stop * 4 + 2 * gbs
    if gbs == 4:
        assert found == wanted
        return
    epoch, batches = (0, stop) if stop <= 5 else (1, stop - 5)  # a smaller batch also takes the two rows that are left out else
    assert found == chain(order(way, k) for k in range(epoch, 3))[batches * 4 :][: len(found)]
    assert len(found) == len(wanted)


def chain(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain(*lists))


def order(way: str, epoch: int) -> list[int]:
    """Of all rows."""
    if way != "shuffled":
        return list(range(ROWS))
    return torch.randperm(ROWS, generator=torch.Generator().manual_seed(5 + epoch)).tolist()


def test_another_batch_size_in_short_epochs(made: Path, tmp_path: Path) -> None:
    """An epoch that has all its batches is not gone on with."""
    short = {"limit_train_batches": 3, "max_epochs": -1}
    reading.read(tmp_path, reading.config(made), max_steps=3, callbacks=[keep(tmp_path, 3)], **short)
    then, _, _ = reading.read(tmp_path, reading.config(made, gbs=2), 1, tmp_path / "kept" / "step=3.ckpt", max_steps=7, **short)
    assert then.samples() == [[0, 1], [2, 3], [4, 5], [0, 1]]


def test_shuffling_is_by_the_seed_and_anew_in_each_epoch(made: Path, tmp_path: Path) -> None:
    found = [reading.read(tmp_path, reading.config(made, shuffle=True, seed=seed), 1, max_steps=10)[0].samples() for seed in (5, 5, 6)]
    assert found[0] == found[1] != found[2]
    first, second = (chain(found[0][k : k + 5]) for k in (0, 5))
    assert first != second and len(set(first)) == len(set(second)) == 20
    source = torch.Generator().manual_seed(5)
    assert first == torch.randperm(ROWS, generator=source).tolist()[:20]
    by_data = reading.config(made, shuffle=True, seed=1)
    by_data.data.seed = 5
    assert reading.read(tmp_path, by_data, 1, max_steps=5)[0].samples() == found[0][:5]


def test_the_originals_checkpoints_go_on_by_their_name(made: Path, tmp_path: Path) -> None:
    """They say nothing of a position."""
    cfg = reading.config(made)
    trainer = reading.trainer(tmp_path, max_steps=8)
    trainer.ckpt_path = "x--step=6-consumed_samples=24.0.ckpt"
    data = HFDataModule(cfg, trainer)
    data.setup("fit")
    trainer.ckpt_path = None
    data.setup = lambda stage=None: None  # type: ignore[method-assign]
    module = reading.Reader()
    trainer.fit(module, datamodule=data)
    assert module.samples()[:5] == [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19], [0, 1, 2, 3]]


def test_validation_and_test(made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = corpus.save(corpus.numbers(8), tmp_path / "other")
    module, _, _ = reading.read(tmp_path, reading.config(made, val_dir=str(other)), 2, max_steps=5, max_epochs=None)
    assert module.checked == [4, 4]
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        module, data, trainer = reading.read(tmp_path, reading.config(made, test_dir=str(other)), 2, max_steps=5)
    assert module.checked == [] and "data.val_dir is not set: there is no validation" in caplog.text
    data.trainer = trainer
    assert len(data.test_dataloader()) == 2 and len(data._test_ds) == 8


def test_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    corpus.tokenizer().save_pretrained(str(tmp_path / "tokenizer"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": t}) + "\n" for t in corpus.TEXTS))
    rows = [row[0] for row in corpus.reference(corpus.TEXTS, 4)]
    for streaming in (False, True):
        cfg = reading.config(tmp_path / "a.jsonl", tokenizer=str(tmp_path / "tokenizer"), text_column="body", streaming=streaming, gbs=8)
        module, data, _ = reading.read(tmp_path, cfg, 2, max_steps=5)
        assert module.samples() == [rows[k : k + 8] for k in range(0, 40, 8)]
    data._build_vocab()
    assert data.padded_vocab_size == 256


def test_columns_that_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = corpus.save(corpus.numbers(8, title=["x"] * 8, url=["y"] * 8), tmp_path / "set")
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        module, _, _ = reading.read(tmp_path, reading.config(path), max_steps=2)
    assert [r.message for r in caplog.records if "left out" in r.message] == [
        f"data.train_dir={path}: the columns title, url are left out; the model takes input_ids, attention_mask, labels"
    ]
    assert len(module.columns) == 3


# -- what does not fit -------------------------------------------------------------------------------


def refused(tmp_path: Path, cfg: Any, words: str, error: type[Exception] = ValueError, devices: int = 2) -> None:
    with pytest.raises(error, match=words):
        reading.read(tmp_path, cfg, devices, max_steps=1)


def test_sets_that_do_not_fit(made: Path, tmp_path: Path) -> None:
    config = reading.config
    refused(tmp_path, config("/nothing"), "data.train_dir=/nothing: there is no /nothing.*`nxdt-data make", FileNotFoundError)
    refused(
        tmp_path,
        config(made, gbs=24),
        "data.train_dir=.*set has 22 rows, and a step needs data.global_batch_size=24: give more rows, or set",
    )
    refused(
        tmp_path,
        config(made, model={"encoder_seq_length": 8}),
        "row 0 of data.train_dir=.*set has 4 numbers in input_ids, and model.encoder_seq_length=8",
    )
    refused(
        tmp_path,
        config(made, shuffle=True, streaming=True),
        "data.shuffle=true needs the whole set, and data.streaming=true reads it from front to back",
    )
    none = config(made)
    none.data.train_dir = None
    refused(tmp_path, none, "data.train_dir is not set: it names a folder that datasets' save_to_disk wrote")
    refused(
        tmp_path,
        config(corpus.save(corpus.numbers(4).select([]), tmp_path / "none")),
        "none has no rows, and a step needs data.global_batch_size=4",
    )
    (tmp_path / "a.jsonl").write_text("\n")
    refused(tmp_path, config(tmp_path / "a.jsonl"), "data.train_dir=.*a.jsonl has no rows, and a step needs data.global_batch_size=4")
    refused(
        tmp_path,
        config(tmp_path / "a.jsonl", streaming=True),
        "data.train_dir=.*a.jsonl has no rows, and a step needs data.global_batch_size=4",
    )


def test_a_vocabulary_that_does_not_fit(made: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 10}')
    cfg = reading.config(made, model={"model_config": str(tmp_path / "config.json")})
    words = r"row 10 of data.train_dir=.*set has 10 in input_ids \(place 0\), and vocab_size in model.model_config=.*config.json is 10: ids are 0 to 9"
    with pytest.raises(ValueError, match=words):
        reading.read(tmp_path, cfg, 2, max_steps=5)
    corpus.tokenizer().save_pretrained(str(tmp_path / "tokenizer"))
    cfg.data.tokenizer = {"type": str(tmp_path / "tokenizer")}
    with pytest.raises(
        ValueError, match="data.tokenizer=.* has 256 tokens, and vocab_size in model.model_config=.* is 10: use the model's own tokenizer"
    ):
        reading.read(tmp_path, cfg, 2, max_steps=5)


def test_ranks_that_are_laid_out_otherwise(made: Path, tmp_path: Path) -> None:
    trainer = reading.trainer(tmp_path, devices=2, max_steps=1)
    data = HFDataModule(reading.config(made), trainer)
    with pytest.raises(ValueError, match="HFDataModule: ranks are not laid out yet; loaders are made when training begins"):
        data.train_dataloader()
    trainer = reading.trainer(tmp_path, tp=2, devices=2, max_steps=1)
    with pytest.raises(
        ValueError, match="distributed_strategy makes 2 data-parallel ranks, and the model laid out 1: its nxd_config must have the sizes"
    ):
        trainer.fit(reading.Reader(2), datamodule=HFDataModule(reading.config(made), trainer))


def test_a_dataset_of_a_users_subclass(made: Path, tmp_path: Path) -> None:
    """The original's `_build_dataloader(data)`."""

    class Mine(HFDataModule):
        def train_dataloader(self) -> Any:
            return self._build_dataloader(datasets.load_from_disk(self.config.data.train_dir).select(range(8, 16)))

    module, _, _ = reading.read(tmp_path, reading.config(made), 2, max_steps=2, kind=Mine)
    assert module.samples() == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert sets.HOW.startswith("`nxdt-data make")
