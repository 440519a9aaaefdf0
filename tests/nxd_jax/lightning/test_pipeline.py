"""A Trainer over a pipeline: the numbers of a model that is not cut, checkpoints from one to the other, what scripts written for NxD see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm
from neuronx_distributed.lightning import NeuronHooksCallback, NeuronLTModule, NeuronXLAStrategy
from neuronx_distributed.modules.lora import LoraConfig
from neuronx_distributed.parallel_layers import parallel_state
from pytorch_lightning import Trainer, seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, Dataset

from nxd_jax.checkpoint.reading import Folder
from tests.nxd_jax.lightning import jobs
from tests.nxd_jax.pipeline.models import WORDS, Layout, Model
from torch_bridge.recorder import placed

pytestmark = [
    *jobs.MARKS,
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Tokens with labels."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, WORDS, (96, 4), generator=draw)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"ids": self.ids[index], "labels": self.ids[index].roll(-1)}


class Language(NeuronLTModule):
    """Manual optimization as NxD's examples have it, for models with and without a pipeline."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        xm.mark_step()
        self.should_print = False
        self.devices = {t.device.type for t in batch.values()}
        loss = self.model.run_train(**batch)
        strategy = self.trainer.strategy
        if strategy.pipeline_parallel_rank == strategy.pipeline_parallel_size - 1:
            self.averaged_loss += loss.detach()
        xm.mark_step()
        if (batch_idx + 1) % self.grad_accum_steps == 0:
            self.should_print = True
            mean = self.averaged_loss / (strategy.data_parallel_size * self.grad_accum_steps)
            self.loss = xm.all_reduce(xm.REDUCE_SUM, mean, groups=parallel_state.get_data_parallel_group(as_list=True)).detach()
            self.averaged_loss.zero_()
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            xm.mark_step()
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        if self.should_print:
            self.log("loss", self.loss.detach().cpu().item() if self.loss is not None else torch.zeros(1), prog_bar=True)
            self.log("lr", self.lr_schedulers().get_last_lr()[0])
            self.log("global_step", float(self.global_step))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        found = self.model.run_eval(**batch)
        self.log("val_loss", found if isinstance(found, torch.Tensor) else found[0], sync_dist=True)

    test_step = validation_step


def module(layout: Layout, kind: type[Language] = Language, **options: Any) -> Any:
    seed_everything(0, verbose=False)
    chosen: dict[str, Any] = {
        "model_fn": lambda: Model(layout.layers, layout.tied, layout.skip),
        "nxd_config": layout.config(),
        "opt_cls": torch.optim.AdamW,
        "opt_kwargs": {"lr": 0.01},
        "scheduler_cls": jobs.halving,
    }
    return kind(**{**chosen, **options})


def fit(folder: Path, layout: Layout, steps: int = 4, model: Any = None, **options: Any) -> tuple[list[float], Trainer, Any]:
    ckpt_path, val = options.pop("ckpt_path", None), options.pop("val", None)
    losses = jobs.Losses()
    made = jobs.trainer(
        folder,
        strategy=NeuronXLAStrategy(nxd_config=layout.config()),
        devices=layout.ranks,
        max_steps=steps,
        callbacks=[losses, *options.pop("callbacks", ())],
        **options,
    )
    model = module(layout) if model is None else model
    made.fit(model, DataLoader(Rows(), batch_size=8), val, ckpt_path=ckpt_path)
    return losses.losses, made, model


ONE = Layout(2, 1, 1, layers=4)


@pytest.mark.thorough(keep=2)
@pytest.mark.core(keep=1)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(4, 2, 2, "zbv", stages=2, layers=4),
        Layout(8, 2, 2, tp=2, zero1=True, layers=4),
        Layout(8, 4, 4, checkpoint=True, layers=4),
    ],
    ids=str,
)
def test_fit(layout: Layout, tmp_path: Path) -> None:
    """Losses, those of validation, and learning rates are those of a model that is not cut; a step of two batches."""
    found = {}
    for chosen in (ONE, layout):
        model = module(chosen, grad_accum_steps=2)
        losses, trainer, _ = fit(
            tmp_path, chosen, 3, model, val=DataLoader(Rows(), batch_size=8), val_check_interval=4, limit_val_batches=2
        )
        found[chosen.pp] = losses, {name: trainer.callback_metrics[name].item() for name in ("loss", "lr", "val_loss")}
        assert model.devices == {"cpu" if chosen.pp > 1 else "xla"}
        assert trainer.strategy.pipeline_parallel_rank == model.print_pp_rank == chosen.pp - 1
    assert found[layout.pp][0] == pytest.approx(found[1][0], rel=1e-4)
    assert found[layout.pp][1] == pytest.approx(found[1][1], rel=1e-4)


def keep(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "kept", save_top_k=1, monitor="global_step", mode="max", every_n_train_steps=2)


def test_resume(tmp_path: Path) -> None:
    """In the middle of an epoch, bit for bit; and without a pipeline."""
    layout = Layout(4, 2, 2, zero1=True, layers=4)
    whole, *_ = fit(tmp_path, layout, 4)
    first = keep(tmp_path)
    before, *_ = fit(tmp_path, layout, 2, callbacks=(first,))
    after, _, model = fit(tmp_path, layout, 4, ckpt_path=first.best_model_path)
    assert before + after == whole
    assert all(placed.place_of(p) is not None for p in model.parameters())
    alone, *_ = fit(tmp_path, ONE, 4, ckpt_path=first.best_model_path)
    assert alone == pytest.approx(whole[2:], rel=1e-4)


def test_evaluation_alone(tmp_path: Path) -> None:
    """validate and test without training before."""
    found = []
    for layout in (ONE, Layout(4, 2, 2, layers=4)):
        made = jobs.trainer(tmp_path, strategy=NeuronXLAStrategy(nxd_config=layout.config()), devices=layout.ranks)
        model = module(layout)
        data = DataLoader(Rows(), batch_size=8)
        found.append([made.validate(model, data, verbose=False)[0]["val_loss"], made.test(model, data, verbose=False)[0]["val_loss"]])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_adapters(tmp_path: Path) -> None:
    """A checkpoint holds the adapters alone, and training goes on from it."""
    lora = LoraConfig(lora_rank=2, target_modules=["up", "head"], lora_save_dir=str(tmp_path))
    layout = Layout(2, 2, 2, layers=2)

    def model() -> Any:
        return module(layout, nxd_config={**layout.config(), "lora_config": lora})

    whole, *_ = fit(tmp_path, layout, 4, model())
    first = keep(tmp_path)
    before, *_ = fit(tmp_path, layout, 2, model(), callbacks=(first,))
    names = Folder(Path(first.best_model_path) / "model").names()
    assert names
    assert all("lora_" in name for name in names)
    after, *_ = fit(tmp_path, layout, 4, model(), ckpt_path=first.best_model_path)
    assert before + after == whole


def test_clipping_to_another_norm(tmp_path: Path) -> None:
    """`self.clip_gradients` in training_step, over the gradients of all stages."""

    class Clipped(Language):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.clip_gradients(self.optimizers(), 0.01, "norm")
            return super().training_step(batch, batch_idx)

    found = {}
    for layout in (ONE, Layout(4, 2, 2, layers=4)):
        options = {"opt_cls": torch.optim.SGD, "opt_kwargs": {"lr": 5.0}}
        found[layout.pp] = fit(tmp_path, layout, 3, module(layout, kind=Clipped, **options))[0]
    assert found[2] == pytest.approx(found[1], rel=1e-4)
    assert found[1][0] - found[1][2] < 0.5


def test_a_loss_that_differs_by_rank(tmp_path: Path) -> None:
    """self.log takes a number of the loss as each data-parallel rank has it: rank 0's."""

    class Local(Language):
        def on_train_batch_end(self, *args: Any) -> None:
            self.log("local", self.own.item())

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.own = super().training_step(batch, batch_idx)
            return self.own

    layout = Layout(4, 2, 2, layers=2)
    config = layout.config()
    config["pipeline_config"] = {**config["pipeline_config"], "broadcast_and_average_loss": False}
    model = module(layout, kind=Local, nxd_config=config)
    losses, trainer, _ = fit(tmp_path, layout, 1, model)
    own = model.own.item().values
    assert own[0] != own[1]
    assert trainer.callback_metrics["local"].item() == pytest.approx(own[0])
    assert losses[0] == pytest.approx((own[0] + own[1]) / 2)


def test_automatic_optimization(tmp_path: Path) -> None:
    """run_train does the backward pass."""
    layout = Layout(2, 2, 2, layers=2)
    with pytest.raises(
        MisconfigurationException, match=r"Language has automatic optimization.*use manual optimization \(manual_opt=True\)"
    ):
        fit(tmp_path, layout, 1, module(layout, manual_opt=False))


def test_hooks(tmp_path: Path) -> None:
    """Each layer's files are those of the ranks of its stage, with what a model that is not cut has there."""
    settings = {"hooks": True, "target_layers": "layers.0.up,head", "enable_activation_dumps": True, "enable_grad_dumps": True}
    found: dict[int, dict[str, torch.Tensor]] = {}
    for layout in (Layout(1, 1, 1, layers=2), Layout(2, 2, 1, layers=2)):
        callback = NeuronHooksCallback({**settings, "dump_only_master_rank": layout.pp == 1})
        callback.hooks_dump_base_directory = str(tmp_path / str(layout.pp))
        fit(tmp_path, layout, 1, callbacks=(callback,))
        files = sorted((tmp_path / str(layout.pp)).rglob("*.pt"))
        found[layout.pp] = {f"{f.parts[-3]}/{f.name}": torch.load(f) for f in files}
    ranks = {"layers.0.up": "rank_0_pp0_tp0_dp0", "head": "rank_1_pp1_tp0_dp0"}
    expected = {name.replace("rank_0_pp0_tp0_dp0", ranks[name.split("/")[0]]): value for name, value in found[1].items()}
    assert set(found[2]) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[2][name], value, msg=lambda m, n=name: f"{n}: {m}")


def test_a_plain_optimizer(tmp_path: Path) -> None:
    """One of torch: gradients of all stages are averaged over data-parallel ranks."""

    class Plain(Language):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [{"scheduler": jobs.halving(optimizer)}]

    found = {layout.pp: fit(tmp_path, layout, 3, module(layout, kind=Plain))[0] for layout in (ONE, Layout(4, 2, 2, layers=4))}
    assert found[2] == pytest.approx(found[1], rel=1e-4)
