"""A small job for Lightning's Trainer: parallel layers, dropout, a scheduler, gradient accumulation."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd
import pytest
import torch
import torch_xla.core.xla_model as xm
from neuronx_distributed.lightning import NeuronLTModule, NeuronXLAStrategy
from neuronx_distributed.parallel_layers import ColumnParallelLinear, RowParallelLinear, parallel_state
from pytorch_lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from nxd_jax.lightning.stored import load_full

ROWS, WIDTH = 48, 8

MARKS = [
    pytest.mark.usefixtures("ranks"),
    *(
        pytest.mark.filterwarnings(f"ignore:{text}")
        for text in (
            ".*does not have many workers",
            ".*isinstance.treespec, LeafSpec.. is deprecated:FutureWarning",  # how Lightning uses torch 2.13
            "You defined a `validation_step` but have no `val_dataloader`",
            "Using `DistributedSampler` with the dataloaders",
            "It is recommended to use `self.log.*sync_dist=True",
            "You called `self.log.*needs to be floating",
            "Checkpoint directory .* exists and is not empty",
        )
    ),
]
"""`pytestmark` of files whose tests train: ranks are undone, and Lightning's advice is no error."""


class Model(nn.Module):
    """Row and column parallel layers with dropout between them."""

    def __init__(self, parallel: bool = True, dropout: float = 0.0):
        super().__init__()
        if parallel:
            self.up: Any = ColumnParallelLinear(WIDTH, 16, gather_output=False)
            self.down: Any = RowParallelLinear(16, WIDTH, input_is_parallel=True)
        else:
            self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x + self.dropout(self.down(torch.tanh(self.up(x))))))


def first_weights() -> dict[str, torch.Tensor]:
    """What all modules start with."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Model(parallel=False).state_dict()


class Module(NeuronLTModule):
    """Manual optimization as the guide has it, from `first_weights()`."""

    def setup(self, stage: str | None = None, include_buffers: bool = False) -> None:
        made = self.model is None
        super().setup(stage, include_buffers)
        if made and self.model_fn is Model:
            load_full(self, first_weights(), strict=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y) / self.grad_accum_steps
        loss.backward()
        self.averaged_loss += loss.detach()
        xm.mark_step()
        self.should_print = (batch_idx + 1) % self.grad_accum_steps == 0
        if self.should_print:
            mean = self.averaged_loss / self.trainer.strategy.data_parallel_size
            self.loss = xm.all_reduce(xm.REDUCE_SUM, mean, groups=parallel_state.get_data_parallel_group(as_list=True)).detach()
            self.averaged_loss.zero_()
            self.optimizers().step()
            self.optimizers().zero_grad()
            if self.lr_schedulers() is not None:
                self.lr_schedulers().step()
            xm.mark_step()
        return loss

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self.should_print:
            self.log("loss", self.loss.float(), prog_bar=True)
            self.log("global_step", float(self.global_step))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.model(x), y), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(batch[0])


class Automatic(Module):
    """The same with Lightning's automatic optimization."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.log("loss", loss, sync_dist=True)  # over all ranks
        return loss

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.log("global_step", float(self.global_step))


class Plain(LightningModule):
    """Automatic optimization in plain PyTorch, with what is Lightning's own in `Automatic`."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__()
        self.model = Model(parallel=False)
        self.model.load_state_dict(first_weights())
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.model(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(batch[0])

    on_train_batch_end = Automatic.on_train_batch_end

    def configure_optimizers(self) -> Any:
        if self.optimizer is not None:
            return self.optimizer(self.parameters())
        optimizer = torch.optim.AdamW(NeuronLTModule.get_param_groups_by_weight_decay(self), lr=0.01)
        return [optimizer], [{"scheduler": halving(optimizer), "interval": "step"}]


class Losses(Callback):
    """Collects the losses of optimizer steps (with automatic optimization, of batches)."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if module.automatic_optimization:
            self.losses.append(trainer.callback_metrics["loss"].item())
        elif module.should_print:
            self.losses.append(module.loss.item())


def rows(seed: int = 0) -> TensorDataset:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, generator=source)
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def loader(batch: int = 2, **options: Any) -> DataLoader:
    return DataLoader(rows(), batch_size=batch, **options)


def whole_loader(batch: int = 4) -> DataLoader:
    """The batches that all data-parallel ranks together get from Lightning's sampler."""
    return loader(batch, sampler=DistributedSampler(rows(), 1, 0, seed=0))


def config(tp: int = 1, zero1: bool = False, clip: float | None = 1.0, **options: Any) -> dict[str, Any]:
    chosen = {"zero_one_enabled": zero1, "grad_clipping": clip is not None, **({"max_grad_norm": clip} if clip else {})}
    return nxd.neuronx_distributed_config(tensor_parallel_size=tp, optimizer_config=chosen, **options)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))


def module(kind: type[NeuronLTModule] = Module, tp: int = 1, zero1: bool = False, dropout: float = 0.0, **options: Any) -> Any:
    seed_everything(0, verbose=False)
    chosen: dict[str, Any] = {
        "model_fn": Model,
        "model_kwargs": {"dropout": dropout},
        "nxd_config": config(tp, zero1),
        "opt_cls": torch.optim.AdamW,
        "opt_kwargs": {"lr": 0.01},
        "scheduler_cls": halving,
    }
    return kind(**{**chosen, **options})


def automatic(kind: type[NeuronLTModule] = Automatic, tp: int = 2, zero1: bool = False, **options: Any) -> Any:
    """A module with automatic optimization that clips nothing unless the Trainer says so."""
    return module(kind, tp, zero1, **{"nxd_config": config(tp, zero1, clip=None), "manual_opt": False, **options})


def close(found: Any, wanted: Any) -> None:
    """Compare numbers, to float32 rounding."""
    a, b = (torch.as_tensor(x).detach().cpu().double() for x in (found, wanted))
    torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)


def trainer(folder: Path, tp: int = 1, zero1: bool = False, devices: Any = "auto", **options: Any) -> Trainer:
    """A quiet Trainer."""
    chosen: dict[str, Any] = {
        "strategy": options.get("strategy") or NeuronXLAStrategy(nxd_config=config(tp, zero1)),
        "devices": devices,
        "max_epochs": -1 if "max_steps" in options else 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any("ModelCheckpoint" in type(c).__name__ for c in options.get("callbacks", ())),
        "default_root_dir": folder,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Trainer(**{**chosen, **options})


def plain_trainer(folder: Path, **options: Any) -> Trainer:
    """The same for the CPU, under Lightning's own strategy."""
    return trainer(folder, strategy="auto", accelerator="cpu", **options)


def plain_fit(folder: Path, *, batch: int = 4, model: Any = None, callbacks: tuple[Any, ...] = (), data: Any = None, **options: Any) -> Any:
    """Train `Plain`; (losses of batches, the Trainer)."""
    seed_everything(0, verbose=False)
    losses = Losses()
    made = plain_trainer(folder, callbacks=[losses, *callbacks], **options)
    made.fit(model if model is not None else Plain(), whole_loader(batch) if data is None else data)
    return losses.losses, made


def fit(
    folder: Path,
    *,
    model: Any = None,
    ckpt_path: Any = None,
    callbacks: tuple[Any, ...] = (),
    batch: int = 2,
    data: Any = None,
    val: Any = None,
    **options: Any,
) -> Any:
    """Train; (losses of the steps, the Trainer)."""
    sizes = {name: options[name] for name in ("tp", "zero1") if name in options}
    losses = Losses()
    made = trainer(folder, callbacks=[losses, *callbacks], **options)
    made.fit(model if model is not None else module(**sizes), loader(batch) if data is None else data, val, ckpt_path=ckpt_path)
    return losses.losses, made
