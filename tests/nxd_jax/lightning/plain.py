"""A tiny job for Lightning's Trainer on the CPU, under Lightning's own strategies."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader


class Module(LightningModule):
    """Two layers; logs `loss`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.model(batch["x"]).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Ranks(SingleDeviceStrategy):
    """One device that says it is one of 4 data-parallel ranks."""

    data_parallel_size = 4


def batches(count: int = 3) -> DataLoader:
    """Of 5 samples each."""
    return DataLoader([{"x": torch.randn(5, 3)} for _ in range(count)], batch_size=None)  # type: ignore[arg-type]


def fit(folder: Path, module: LightningModule | None = None, data: Any = None, **options: Any) -> Trainer:
    """Train on some batches, without what tests do not look at."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers")
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)  # Lightning with torch 2.13
        chosen = {"max_epochs": 1, "log_every_n_steps": 1, "logger": False, "enable_checkpointing": False, "enable_model_summary": False}
        trainer = Trainer(accelerator="cpu", default_root_dir=folder, **{"enable_progress_bar": False, **chosen, **options})
        trainer.fit(module or Module(), batches() if data is None else data)
    return trainer
