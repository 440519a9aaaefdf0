"""The data module that users derive from."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nxd_jax.training.lightning_modules.data.base import BaseDataModule, consumed_samples_of
from tests.nxd_jax.lightning import jobs
from tests.nxd_jax.training.lightning_modules.data import reading

pytestmark = jobs.MARKS


def module(world_size: int = 4, ckpt_path: Any = None, **options: Any) -> BaseDataModule:
    return BaseDataModule(reading.config("x", **options), SimpleNamespace(world_size=world_size, ckpt_path=ckpt_path))


def test_sizes() -> None:
    made = module(8, tp=2, gbs=16, mbs=2)
    assert (made.dp_size, made.num_microbatches, made.init_consumed_samples) == (4, 2, 0)
    made.setup()
    assert made.compute_consumed_samples() == 0 and made.compute_consumed_samples(3) == 48
    with pytest.raises(
        ValueError, match="data.global_batch_size=18 must be a multiple of data.micro_batch_size=2 times 4 data-parallel ranks"
    ):
        module(8, tp=2, gbs=18, mbs=2)


def test_what_subclasses_must_write() -> None:
    made = module()
    for name, arguments in {
        "train_dataloader": (),
        "val_dataloader": (),
        "test_dataloader": (),
        "get_batch_length": (0,),
        "process_global_batch": (0,),
    }.items():
        with pytest.raises(NotImplementedError, match=rf"BaseDataModule must override {name}\(\)"):
            getattr(made, name)(*arguments)
    batch = {"input_ids": torch.ones(2)}
    assert made.transfer_batch_to_device(batch, torch.device("xla"), 0) is batch


def test_padded_vocabularies() -> None:
    made = module(tp=2)
    assert [made._vocab_size_with_padding(size, 8, 2) for size in (1, 16, 17)] == [16, 16, 32]
    made.tokenizer = SimpleNamespace(vocab_size=257)
    made._build_vocab()
    assert made.padded_vocab_size == 512
    made.config.model.make_vocab_size_divisible_by = 1
    made._build_vocab()
    assert made.padded_vocab_size == 258


def test_samples_that_a_checkpoint_has_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As it says, else as its name says."""
    name = "m--step=3-consumed_samples=12.0.ckpt"
    assert consumed_samples_of(f"/data/consumed_samples=5/{name}") == 12
    assert consumed_samples_of("x-consumed_samples=7") == 7
    made = module(ckpt_path=name)
    made.setup("fit")
    assert made.compute_consumed_samples(1) == 16
    folder = tmp_path / name
    folder.mkdir()
    torch.save({"epoch": 0, "Mine": {"consumed_samples": 24, "global_batch_size": 8}}, folder / "user_content.pt")
    assert consumed_samples_of(folder) == 24
    torch.save({"epoch": 0, "Mine": {"x": 1}}, folder / "user_content.pt")
    assert consumed_samples_of(folder) == 12
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        assert consumed_samples_of("a.ckpt") == 0
    assert "a.ckpt says nothing of the samples that were trained on before it: they are counted from 0" in caplog.text


def test_checkpoints_that_say_it_in_another_way() -> None:
    class Own(BaseDataModule):
        def _extract_consumed_samples_from_ckpt(self, ckpt_path: Any) -> int:
            return int(str(ckpt_path).rpartition("-")[2])

    made = module(ckpt_path="seen-42")
    own = Own(made.config, made.trainer)
    own.setup("fit")
    assert own.init_consumed_samples == 42


def test_what_a_checkpoint_keeps() -> None:
    made = module(gbs=8)
    made.trainer.global_step = 5
    made.trainer.lightning_module = SimpleNamespace(init_global_step=2)
    made.load_state_dict({"consumed_samples": 100, "global_batch_size": 50})
    assert made.state_dict() == {"consumed_samples": 124, "global_batch_size": 8}
