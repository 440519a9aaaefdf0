"""When and what is saved: callbacks, hooks, states of other objects, LoRA; where training goes on; and what cannot be loaded. See also test_resume.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd
import pytest
import torch
from neuronx_distributed.lightning import NeuronCheckpointIO, NeuronXLAStrategy
from neuronx_distributed.modules.lora import LoraConfig
from neuronx_distributed.parallel_layers import checkpointing
from neuronx_distributed.trainer import initialize_parallel_optimizer
from pytorch_lightning import Callback, LightningDataModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from pytorch_lightning.plugins.io import TorchCheckpointIO
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from nxd_jax.utils.full_weights import gather_full
from tests.nxd_jax.lightning import jobs

pytestmark = [
    *jobs.MARKS,
    pytest.mark.filterwarnings("ignore:.*is not resumable"),
    pytest.mark.filterwarnings("ignore:`.fit.ckpt_path=None.` was called without a model"),
    pytest.mark.filterwarnings("ignore:.fit.ckpt_path=.last.. is set, but there is no last checkpoint"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

FOUR: dict[str, Any] = {"tp": 2, "devices": 4}


class Fresh(jobs.Model):
    """Begins with other weights than `jobs.Model` gets."""


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


class SaveAt(Callback):
    """Calls `trainer.save_checkpoint` in a hook, the first time at a step."""

    def __init__(self, hook: str, step: int, path: Any, **options: Any):
        self.step, self.path, self.options, self.saved = step, path, options, False
        setattr(self, hook, self.save)

    def save(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step and not self.saved:
            self.saved = True
            trainer.save_checkpoint(self.path, **self.options)


# -- ModelCheckpoint ---------------------------------------------------------------------------------


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(
    "options",
    [
        {"monitor": "val_loss", "filename": "{epoch}-{val_loss:.3f}", "save_top_k": 2},
        {"monitor": "val_loss", "mode": "max", "save_last": True},
        {"every_n_epochs": 2, "save_top_k": -1, "save_on_train_epoch_end": True},
        {"save_on_train_epoch_end": False, "save_top_k": -1, "save_weights_only": True},
        {"save_top_k": 0, "save_last": True},
        {"save_top_k": 0},
        {"every_n_train_steps": 5, "save_top_k": -1, "filename": "{step:03d}", "auto_insert_metric_name": False},
    ],
    ids=" ".join,
)
def test_the_same_are_kept_as_elsewhere(tmp_path: Path, options: dict[str, Any]) -> None:
    ours, plain = (ModelCheckpoint(dirpath=tmp_path / name, **options) for name in ("ours", "plain"))
    settings: dict[str, Any] = {"max_epochs": 3, "limit_train_batches": 6}
    jobs.fit(tmp_path, model=jobs.automatic(), callbacks=(ours,), val=jobs.loader(2), **settings, **FOUR)
    jobs.plain_trainer(tmp_path, callbacks=[plain], **settings).fit(jobs.Plain(), jobs.whole_loader(4), jobs.loader(4))
    assert names(tmp_path / "ours") == names(tmp_path / "plain")
    for path in ("best_model_path", "last_model_path"):
        assert os.path.basename(getattr(ours, path)) == os.path.basename(getattr(plain, path))
    if ours.best_model_score is not None:
        jobs.close(ours.best_model_score, plain.best_model_score)
    assert all((folder / "done").exists() for folder in (tmp_path / "ours").glob("*.ckpt"))
    if options.get("save_weights_only"):
        assert names(next((tmp_path / "ours").iterdir())) == ["checkpoint", "done", "model", "random", "user_content.pt"]


def test_after_an_error(tmp_path: Path) -> None:
    """OnExceptionCheckpoint in the middle of a step: that step is done again."""

    class Broken(jobs.Automatic):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 5:
                raise ValueError("broken")
            return super().training_step(batch, batch_idx)

    keep = OnExceptionCheckpoint(tmp_path, "crash")
    with pytest.raises(ValueError, match="broken"):
        jobs.fit(tmp_path, model=jobs.automatic(Broken), callbacks=(keep,), enable_checkpointing=True, **FOUR)
    whole, _ = jobs.fit(tmp_path, model=jobs.automatic(), **FOUR)
    rest, _ = jobs.fit(tmp_path, model=jobs.automatic(), ckpt_path=tmp_path / "crash.ckpt", **FOUR)
    assert rest == whole[5:]


# -- going on ----------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    """Rows without a length, in an order that torch's random state gives."""

    def __iter__(self) -> Iterator[Any]:
        rows = jobs.rows()
        return (rows[k] for k in torch.randperm(len(rows)).tolist())


class Keeping:
    """A loader that keeps its own position, and shuffles by epoch."""

    def __init__(self) -> None:
        self.epoch = self.taken = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.taken = state["epoch"], state["taken"]

    def __iter__(self) -> Iterator[Any]:
        x, y = jobs.rows().tensors
        for k in range(self.taken, 12):
            at = 4 * ((k * 5 + self.epoch) % 12)
            self.epoch, self.taken = (self.epoch + 1, 0) if k == 11 else (self.epoch, k + 1)
            yield x[at : at + 4], y[at : at + 4]


class Own(RandomSampler):
    """A sampler that Lightning does not know."""


LOADERS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "ours": (lambda: jobs.loader(2), {}),
    "torch": (lambda: jobs.loader(4, shuffle=True), {"use_distributed_sampler": False}),
    "generator": (lambda: jobs.loader(4, shuffle=True, generator=torch.Generator().manual_seed(5)), {"use_distributed_sampler": False}),
    "sampler": (lambda: jobs.loader(2, sampler=Own(jobs.rows())), {}),
    "stream": (lambda: DataLoader(Stream(), 4), {}),
    "keeping": (Keeping, {}),
}


@pytest.mark.thorough(keep=5)
@pytest.mark.parametrize(
    ("loader", "hook", "step", "settings"),
    [
        ("ours", "on_train_batch_start", 5, {}),
        ("torch", "on_train_batch_end", 5, {"val": True}),
        ("torch", "on_train_epoch_end", 10, {"limit_train_batches": 10}),
        ("generator", "on_train_batch_end", 5, {}),
        ("generator", "on_train_epoch_end", 12, {}),
        ("sampler", "on_train_batch_end", 12, {}),
        ("sampler", "on_validation_end", 8, {"val": True}),
        ("stream", "on_train_start", 0, {}),
        ("stream", "on_train_batch_start", 5, {"limit_train_batches": 10}),
        ("stream", "on_train_epoch_end", 12, {"val": True}),
        ("stream", "on_train_end", 24, {"max_epochs": 3}),
        ("keeping", "on_train_batch_start", 5, {}),
        ("keeping", "on_train_epoch_end", 12, {}),
    ],
)
def test_hooks_of_all_kinds_save(tmp_path: Path, loader: str, hook: str, step: int, settings: dict[str, Any]) -> None:
    """What goes on has the losses of what never stopped: batches, shuffles and dropout."""
    make, options = LOADERS[loader]
    options = {"max_epochs": 2, **options, **settings}
    if options.pop("val", False):
        options |= {"val_check_interval": 4, "limit_val_batches": 2}

    def fit(seed: int, *callbacks: Any, ckpt_path: Any = None, **other: Any) -> list[float]:
        model = jobs.module(tp=2, dropout=0.5)
        torch.manual_seed(seed)
        val = jobs.loader(4) if "val_check_interval" in options else None
        chosen = {"data": make(), "val": val, "callbacks": callbacks, "ckpt_path": ckpt_path, **options, **other, **FOUR}
        return jobs.fit(tmp_path, model=model, **chosen)[0]

    saving = SaveAt(hook, step, tmp_path / "x.ckpt")
    if hook == "on_train_end":
        options["max_epochs"] = 2
        fit(0, saving)
        options["max_epochs"] = 3
        saving.saved = True
    whole = fit(0, saving)
    rest = fit(11, ckpt_path=tmp_path / "x.ckpt")
    assert saving.saved and len(rest) == len(whole) - step
    assert rest == whole[step:]


class TwoOptimizers(jobs.Module):
    """Each with a scheduler."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.loss, self.should_print = self.trainer.strategy.reduce(loss.detach()), True

    def configure_optimizers(self) -> Any:
        named = dict(self.model.named_parameters())
        parts = [[p for name, p in named.items() if ("up" in name) is first] for first in (True, False)]
        made = [initialize_parallel_optimizer(self.nxd_config, torch.optim.AdamW, part, lr=0.01) for part in parts]
        return made, [jobs.halving(optimizer) for optimizer in made]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("zero1", [False, True])
def test_two_optimizers(tmp_path: Path, zero1: bool) -> None:
    """With ZeRO-1, and then without; and the other way round."""
    saving = SaveAt("on_train_batch_end", 10, tmp_path / "x.ckpt")
    whole, _ = jobs.fit(tmp_path, model=jobs.module(TwoOptimizers, tp=2, zero1=zero1), zero1=zero1, callbacks=(saving,), **FOUR)
    assert {"optim", "optim_1", "scheduler.pt"} <= set(names(tmp_path / "x.ckpt"))
    for now in (zero1, not zero1):
        module = jobs.module(TwoOptimizers, tp=2, zero1=now)
        rest, _ = jobs.fit(tmp_path, model=module, zero1=now, ckpt_path=tmp_path / "x.ckpt", **FOUR)
        jobs.close(rest, whole[5:])
    with pytest.raises(ValueError, match=r"states of 2 optimizer\(s\), but configure_optimizers returned 1. .* load them by trainer"):
        jobs.fit(tmp_path, model=jobs.module(tp=2), ckpt_path=tmp_path / "x.ckpt", **FOUR)


def test_training_goes_on_while_a_save_is_written(tmp_path: Path) -> None:
    """Nothing of what follows is in it; removing waits for its turn."""
    keep = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=2, monitor="global_step", mode="max")
    background = [NeuronCheckpointIO(async_save=True)]
    whole, _ = jobs.fit(tmp_path, model=jobs.automatic(), callbacks=(keep,), plugins=background, **FOUR)
    assert names(tmp_path) == ["epoch=0-step=11.ckpt", "epoch=0-step=12.ckpt"]
    rest, _ = jobs.fit(tmp_path, model=jobs.automatic(), ckpt_path=tmp_path / "epoch=0-step=11.ckpt", **FOUR)
    assert rest == whole[11:]


def test_a_save_that_fails_in_the_background(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    saving = SaveAt("on_train_batch_end", 2, tmp_path / "file" / "x.ckpt")
    with pytest.raises(OSError, match="file"):
        jobs.fit(tmp_path, model=jobs.automatic(), callbacks=(saving,), plugins=[NeuronCheckpointIO(async_save=True)], **FOUR)
    assert len(jobs.fit(tmp_path, model=jobs.automatic(), max_steps=2, **FOUR)[0]) == 2


# -- what else is in a checkpoint --------------------------------------------------------------------


class Remembering(Callback):
    """A callback with a state, and with entries of its own."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"number": 3, "ranks": torch.zeros(2, device="xla") + torch.distributed.get_rank()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen["state"] = state

    def on_save_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["extra"] = [1, 2]

    def on_load_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        self.seen["extra"] = checkpoint["extra"]


class Data(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = None

    def train_dataloader(self) -> Any:
        return jobs.loader(2)

    def state_dict(self) -> dict[str, int]:
        return {"shard": 7}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state


class WithHyperparameters(jobs.Automatic):
    def __init__(self, width: int = 3, **options: Any):
        super().__init__(**options)
        self.save_hyperparameters("width", "opt_cls")


def test_states_of_others(tmp_path: Path) -> None:
    """Of callbacks and the data module (tensors as rank 0 has them), and hyperparameters."""
    before, path = Remembering(), tmp_path / "x.ckpt"
    made = jobs.trainer(tmp_path, max_steps=2, callbacks=[before], **FOUR)
    made.fit(jobs.automatic(WithHyperparameters, width=5), datamodule=Data())
    made.save_checkpoint(path)
    found = made.strategy.load_checkpoint(path)
    assert found["hyper_parameters"] == {"width": 5, "opt_cls": torch.optim.AdamW} and found["global_step"] == 2
    after, data = Remembering(), Data()
    jobs.trainer(tmp_path, max_steps=3, callbacks=[after], **FOUR).fit(jobs.automatic(), datamodule=data, ckpt_path=path)
    assert data.seen == {"shard": 7} and after.seen["extra"] == [1, 2]
    assert after.seen["state"]["number"] == 3 and after.seen["state"]["ranks"].tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"holds torch.optim.adamw.AdamW, which weights_only=True does not read: pass weights_only=False"):
        NeuronCheckpointIO(weights_only=True).load_checkpoint(path)


@pytest.mark.parametrize("master_dp_only", [True, False])
def test_nxds_second_argument(tmp_path: Path, master_dp_only: bool) -> None:
    """By name and by place it changes nothing: files say themselves who wrote them."""
    made = jobs.trainer(tmp_path, max_steps=1, **FOUR)
    made.fit(jobs.automatic(), jobs.loader())
    made.save_checkpoint(tmp_path / "x.ckpt")
    io = NeuronCheckpointIO()
    for found in (
        io.load_checkpoint(tmp_path / "x.ckpt", master_dp_only),
        io.load_checkpoint(tmp_path / "x.ckpt", master_dp_only=master_dp_only),
    ):
        assert found["global_step"] == 1 and len(found["state_dict"]) == len(made.lightning_module.state_dict())
    checkpointing.save({"state_dict": {"w": torch.ones(2)}, "epoch": 4}, tmp_path / "theirs", master_dp_only=master_dp_only)
    found = io.load_checkpoint(tmp_path / "theirs", master_dp_only=not master_dp_only)
    assert found["epoch"] == 4 and torch.equal(found["state_dict"]["w"], torch.ones(2))


def test_plain_data_alone(tmp_path: Path) -> None:
    """`weights_only=True` reads a checkpoint of which nobody asked more, in the middle of an epoch too."""
    saving = SaveAt("on_train_batch_end", 5, tmp_path / "x.ckpt")
    whole, _ = jobs.fit(tmp_path, model=jobs.automatic(), callbacks=(saving,), **FOUR)
    plugins = [NeuronCheckpointIO(weights_only=True)]
    rest, _ = jobs.fit(tmp_path, model=jobs.automatic(), ckpt_path=tmp_path / "x.ckpt", plugins=plugins, **FOUR)
    assert rest == whole[5:]


class Renaming(jobs.Automatic):
    """Leaves out a weight and adds another in `on_load_checkpoint`."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        assert "norm.bias" in state and "StoredWeights(8 tensors in " in repr(state)
        del state["norm.bias"]
        state["other"] = torch.zeros(1)
        with pytest.raises(KeyError):
            state["norm.bias"]
        with pytest.raises(KeyError):
            del state["norm.bias"]


class Larger(jobs.Model):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.more = torch.nn.Linear(2, 2)


def test_other_names(tmp_path: Path) -> None:
    """An error, unless the module's `strict_loading` is off."""
    _, made = jobs.fit(tmp_path, model=jobs.automatic(), max_steps=2, **FOUR)
    made.save_checkpoint(tmp_path / "x.ckpt")
    for make, said in (
        (lambda: jobs.automatic(Renaming), r'Missing key\(s\) in state_dict: ".*norm.bias"'),
        (lambda: jobs.automatic(model_fn=Larger), r"missing in the checkpoint: more.weight, more.bias. strict=False ignores"),
    ):
        module = make()
        with pytest.raises(RuntimeError, match=said):
            jobs.trainer(tmp_path, **FOUR).validate(module, jobs.loader(8), ckpt_path=tmp_path / "x.ckpt", verbose=False)
        module = make()
        module.strict_loading = False
        jobs.trainer(tmp_path, **FOUR).validate(module, jobs.loader(8), ckpt_path=tmp_path / "x.ckpt", verbose=False)
        weights = [dict(m.named_parameters())["up.weight"] for m in (module, made.lightning_module)]
        assert torch.equal(*(gather_full(w) for w in weights))  # type: ignore[arg-type]


def test_adapters(tmp_path: Path) -> None:
    """LoRA: adapters alone are saved, and training goes on with them."""

    folder = str(tmp_path / "adapter")
    lora = LoraConfig(lora_rank=2, lora_alpha=4, target_modules=["up", "down", "head"], bias="none", lora_save_dir=folder)

    def fit(*callbacks: Any, **options: Any) -> Any:
        config = jobs.config(2, clip=None, lora_config=lora)
        model = jobs.automatic(model_fn=Fresh, nxd_config=config)
        return jobs.fit(tmp_path, model=model, strategy=NeuronXLAStrategy(config), devices=4, callbacks=callbacks, **options)

    whole, made = fit(SaveAt("on_train_batch_end", 5, tmp_path / "x.ckpt"))
    saved = made.strategy.load_checkpoint(tmp_path / "x.ckpt")["state_dict"]
    assert sorted(saved) == sorted(f"{layer}.lora_{part}.weight" for layer in ("up", "down", "head") for part in "AB")
    assert fit(ckpt_path=tmp_path / "x.ckpt")[0] == whole[5:]


# -- other readers and writers -----------------------------------------------------------------------


def test_saved_without_training(tmp_path: Path) -> None:
    """After `validate`, and read by `predict` and by NxD's own `load_checkpoint`; there is no optimizer to train on with."""
    model, made = jobs.automatic(), jobs.trainer(tmp_path, **FOUR)
    made.validate(model, jobs.loader(8), verbose=False)
    made.save_checkpoint(tmp_path / "x.ckpt")
    other = jobs.automatic(model_fn=Fresh)
    found = made.predict(other, jobs.loader(8), ckpt_path=tmp_path / "x.ckpt")
    jobs.close(found[0], made.predict(model, jobs.loader(8))[0])
    third = nxd.initialize_parallel_model(jobs.config(2), jobs.Model)
    assert nxd.load_checkpoint(str(tmp_path), "x.ckpt", model=third)["global_step"] == 0
    jobs.close(third(jobs.rows().tensors[0].to("xla")), model(jobs.rows().tensors[0].to("xla")))
    with pytest.raises(ValueError, match=r"has the states of 0 optimizer\(s\), but configure_optimizers returned 1"):
        made.fit(model, jobs.loader(), ckpt_path=tmp_path / "x.ckpt")


def test_files_of_other_strategies(tmp_path: Path) -> None:
    """Weights load in any layout; an optimizer's state where ranks hold all of it."""
    plain, model, path = jobs.plain_trainer(tmp_path, max_steps=3), jobs.Plain(), tmp_path / "plain.ckpt"
    plain.fit(model, jobs.whole_loader(4))
    plain.save_checkpoint(path)
    wanted = plain.validate(model, jobs.loader(4), verbose=False)[0]["val_loss"]

    def trainer(tp: int, **options: Any) -> Trainer:
        strategy = NeuronXLAStrategy(jobs.config(tp), checkpoint_io=TorchCheckpointIO())
        return jobs.trainer(tmp_path, strategy=strategy, devices=2 * tp, **options)

    for tp in (1, 2):
        module = jobs.automatic(tp=tp, model_fn=Fresh)
        jobs.close(trainer(tp).validate(module, jobs.loader(2), ckpt_path=path, verbose=False)[0]["val_loss"], wanted)
    made = trainer(1, max_steps=4)
    made.fit(jobs.automatic(tp=1), jobs.loader(2), ckpt_path=path)
    assert made.global_step == 4
    with pytest.raises(ValueError, match=r"exp_avg of shape \[16, 8\] for a parameter of shape \[8, 8\]: ranks hold parts of it"):
        trainer(2, max_steps=4).fit(jobs.automatic(), jobs.loader(2), ckpt_path=path)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    _, made = jobs.fit(tmp_path, model=jobs.automatic(), max_steps=1, **FOUR)
    made.save_checkpoint(tmp_path / "a" / "one.ckpt")
    made.save_checkpoint(f"file://{tmp_path}/a/two.ckpt/")
    (tmp_path / "file.ckpt").write_text("")
    with pytest.raises(FileNotFoundError, match=r"/a is no checkpoint but holds some, pass one of them as ckpt_path: one.ckpt, two.ckpt"):
        made.fit(jobs.automatic(), jobs.loader(), ckpt_path=tmp_path / "a")
    with pytest.raises(FileNotFoundError, match=r"/b has no complete checkpoint 'x.ckpt'; complete ones are: none"):
        made.fit(jobs.automatic(), jobs.loader(), ckpt_path=tmp_path / "b" / "x.ckpt")
    with pytest.raises(NotADirectoryError, match=r"file.ckpt is a file, and .* reads folders .*checkpoint_io=TorchCheckpointIO\(\)"):
        made.fit(jobs.automatic(), jobs.loader(), ckpt_path=tmp_path / "file.ckpt")
    with pytest.raises(NotADirectoryError, match=r"file.ckpt is a file, and checkpoints are folders: remove it or choose another path"):
        made.save_checkpoint(tmp_path / "file.ckpt")
    assert names(tmp_path / "a") == ["one.ckpt", "two.ckpt"]
