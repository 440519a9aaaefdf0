"""Checkpoints of a Trainer: what is kept, and that training goes on from them as if it had never stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd_api
import pytest
import torch
from neuronx_distributed.lightning import NeuronCheckpointIO
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

from nxd_jax.utils.full_weights import gather_full
from tests.nxd_jax.lightning import jobs
from torch_bridge.recorder import sharded

pytestmark = [
    *jobs.MARKS,
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

FOUR = {"tp": 2, "devices": 4}


def keep(folder: Path, every: int = 2, **options: Any) -> ModelCheckpoint:
    chosen = {"save_top_k": 1, "monitor": "global_step", "mode": "max", "every_n_train_steps": every, "dirpath": folder / "kept"}
    return ModelCheckpoint(**{**chosen, **options})


def kept(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "kept").iterdir())


def begin_and_resume(folder: Path, begun: dict[str, Any], loader: Any, whole: dict[str, Any], **options: Any) -> None:
    """The losses of a training that stops and is resumed are those of one that does not."""

    def fit(model: Any, ckpt_path: Any = None, callbacks: tuple[Any, ...] = (), **limits: Any) -> list[float]:
        torch.manual_seed(5)
        losses = jobs.Losses()
        made = jobs.trainer(folder, callbacks=[losses, *callbacks], **FOUR, **{**options, **limits})
        made.fit(model, loader(), jobs.loader() if options.get("limit_val_batches") else None, ckpt_path=ckpt_path)
        return losses.losses

    def model() -> Any:
        return jobs.module(tp=2, dropout=0.2)

    expected = fit(model(), **whole)
    first = keep(folder)
    before = fit(model(), callbacks=(first,), **begun)
    after = fit(model(), first.best_model_path, **whole)
    assert len(before) < len(expected)
    assert before + after == expected


class Numbers(IterableDataset):
    """Rows without a length."""

    def __iter__(self) -> Any:
        return iter([jobs.rows()[k] for k in range(jobs.ROWS)])


LOADERS = {
    "shuffled": lambda: jobs.loader(shuffle=True),
    "own sampler": lambda: jobs.loader(
        sampler=WeightedRandomSampler([1.0] * jobs.ROWS, jobs.ROWS, generator=torch.Generator().manual_seed(3))
    ),
    "iterable": lambda: DataLoader(Numbers(), batch_size=2),
}


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("name", LOADERS)
def test_in_mid_epoch(name: str, tmp_path: Path) -> None:
    begin_and_resume(tmp_path, {"max_steps": 4}, LOADERS[name], {"max_steps": 15})


def test_with_a_sampler_that_draws_from_torchs_random_state(tmp_path: Path) -> None:
    def loader() -> DataLoader:
        return DataLoader(jobs.rows(), batch_size=2, sampler=RandomSampler(jobs.rows()))

    begin_and_resume(tmp_path, {"max_steps": 4}, loader, {"max_steps": 9}, use_distributed_sampler=False)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("limits", [{"limit_train_batches": 4}, {"limit_val_batches": 2, "val_check_interval": 3}])
def test_at_the_end_of_an_epoch_and_with_validation(limits: dict[str, Any], tmp_path: Path) -> None:
    begin_and_resume(tmp_path, {"max_steps": 12}, jobs.loader, {"max_steps": 15}, **limits)


def test_in_another_layout(tmp_path: Path) -> None:
    """TP 2 without ZeRO-1 goes on as TP 4 with it."""
    first = keep(tmp_path)
    expected, _ = jobs.fit(tmp_path, batch=2, max_steps=6, tp=4, devices=4, zero1=True)
    before, _ = jobs.fit(tmp_path, batch=1, max_steps=4, callbacks=(first,), **FOUR)
    after, _ = jobs.fit(tmp_path, batch=2, max_steps=6, tp=4, devices=4, zero1=True, ckpt_path=first.best_model_path)
    assert len(before) == 4 and len(after) == 2
    assert before + after == pytest.approx(expected, rel=1e-4)


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"save_top_k": 2}, ["epoch=0-step=4.ckpt", "epoch=0-step=6.ckpt"]),
        ({"save_top_k": -1}, ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt", "epoch=0-step=6.ckpt"]),
        ({"save_last": True}, ["epoch=0-step=6.ckpt", "last.ckpt"]),
        ({"save_last": "link"}, ["epoch=0-step=6.ckpt", "last.ckpt"]),
    ],
)
@pytest.mark.parametrize("in_background", [False, True])
def test_what_is_kept(options: dict[str, Any], names: list[str], in_background: bool, tmp_path: Path) -> None:
    first = keep(tmp_path, **options)
    jobs.fit(tmp_path, max_steps=7, callbacks=(first,), plugins=[NeuronCheckpointIO(async_save=in_background)], **FOUR)
    assert kept(tmp_path) == names
    assert all((tmp_path / "kept" / name / "done").exists() for name in names)
    if options.get("save_last") == "link":
        assert os.path.islink(tmp_path / "kept" / "last.ckpt")
    losses, trainer = jobs.fit(tmp_path, max_steps=9, ckpt_path=tmp_path / "kept" / names[-1], **FOUR)
    assert len(losses) == 3 and trainer.global_step == 9


def test_best_and_last(tmp_path: Path) -> None:
    first = keep(tmp_path, monitor="loss", mode="min", save_last=True)
    model = jobs.module(tp=2)
    losses = jobs.Losses()
    trainer = jobs.trainer(tmp_path, max_steps=6, callbacks=[losses, first], **FOUR)
    trainer.fit(model, jobs.loader())
    best = trainer.validate(model, jobs.loader(), ckpt_path="best", verbose=False)
    same = trainer.validate(model, jobs.loader(), ckpt_path=first.best_model_path, verbose=False)
    last = trainer.validate(model, jobs.loader(), ckpt_path="last", verbose=False)
    assert best == same
    assert isinstance(last[0]["val_loss"], float)


class Notes(jobs.Module):
    """Adds to a checkpoint, and changes what is loaded."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = {"text": "hello", "weight": self.model.norm.weight}
        assert "opt" not in checkpoint and len(dict(checkpoint["optimizer_states"][0])) > 0

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note = checkpoint["note"]
        state = checkpoint["state_dict"]
        self.full = {name: tuple(value.shape) for name, value in state.items()}
        state["norm.bias"] = torch.full_like(state["norm.bias"], 3.0)


def test_hooks_of_the_module_see_and_change_what_is_saved(tmp_path: Path) -> None:
    first = keep(tmp_path)
    _, trainer = jobs.fit(tmp_path, model=jobs.module(Notes, tp=2), max_steps=2, callbacks=(first,), **FOUR)
    trained = {n: gather_full(p) for n, p in trainer.lightning_module.named_parameters()}
    other = jobs.module(Notes, tp=2)
    jobs.trainer(tmp_path, **FOUR).validate(other, jobs.loader(), ckpt_path=first.best_model_path, verbose=False)
    assert other.note["text"] == "hello" and other.note["weight"].device.type == "cpu"
    assert other.full["up.weight"] == (16, jobs.WIDTH)
    for name, p in other.named_parameters():
        wanted = torch.full((jobs.WIDTH,), 3.0) if name == "norm.bias" else trained[name]
        torch.testing.assert_close(gather_full(p), wanted, rtol=0, atol=0)


def test_weights_only_and_other_readers(tmp_path: Path) -> None:
    model = jobs.module(tp=2)

    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            if trainer.global_step == 3 and not (tmp_path / "small.ckpt").exists():
                trainer.save_checkpoint(tmp_path / "small.ckpt", weights_only=True)

    jobs.fit(tmp_path, model=model, max_steps=3, callbacks=(Save(),), **FOUR)
    assert not (tmp_path / "small.ckpt" / "optim").exists()
    other = nxd_api.initialize_parallel_model(jobs.config(2), jobs.Model)
    nxd_api.load_checkpoint(str(tmp_path), "small.ckpt", model=other)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for p, q in pairs for a, b in zip(sharded.shards(p.detach()), sharded.shards(q.detach()), strict=True))
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        jobs.fit(tmp_path, max_steps=5, ckpt_path=tmp_path / "small.ckpt", **FOUR)


def test_what_is_refused(tmp_path: Path) -> None:
    first = keep(tmp_path)
    _, trainer = jobs.fit(tmp_path, max_steps=2, callbacks=(first,), **FOUR)
    path = Path(first.best_model_path)
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint 'other.ckpt'; complete ones are: epoch=0-step=2.ckpt"):
        jobs.fit(tmp_path, max_steps=4, ckpt_path=path.with_name("other.ckpt"), **FOUR)
    (path / "done").unlink()
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint 'epoch=0-step=2.ckpt'; complete ones are: none"):
        jobs.fit(tmp_path, max_steps=4, ckpt_path=path, **FOUR)
    with pytest.raises(TypeError, match=r"storage_options=...\) is not supported"):
        trainer.save_checkpoint(tmp_path / "x.ckpt", storage_options={"a": 1})
    with pytest.raises(TypeError, match=r"AsyncCheckpointIO would write .*NeuronCheckpointIO\(async_save=True\)"):
        jobs.trainer(tmp_path, plugins=[AsyncCheckpointIO()], **FOUR)
    with pytest.raises(NotImplementedError, match="TorchCheckpointIO writes one file with whole tensors, but ranks hold parts"):
        jobs.fit(tmp_path, max_steps=2, callbacks=(keep(tmp_path),), plugins=[TorchCheckpointIO()], **FOUR)
    with pytest.raises(Exception, match="load_from_checkpoint: the model is made once a Trainer has laid out the ranks"):
        jobs.Module.load_from_checkpoint(path)


def test_another_checkpoint_io_where_ranks_hold_all(tmp_path: Path) -> None:
    jobs.fit(tmp_path, max_steps=2, devices=2, callbacks=(keep(tmp_path),), plugins=[TorchCheckpointIO()])
    found = torch.load(tmp_path / "kept" / "epoch=0-step=2.ckpt", weights_only=False)
    assert found["state_dict"]["up.weight"].device.type == "cpu" and found["global_step"] == 2
