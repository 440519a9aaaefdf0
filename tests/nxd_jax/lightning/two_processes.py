"""What `test_torchrun` runs in two processes: python -m torch.distributed.run --nproc_per_node=2 two_processes.py <directory>."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning import Callback, LightningDataModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, Subset

from tests.nxd_jax.lightning import jobs


class Data(LightningDataModule):
    """Prepared by one process while the other waits."""

    def __init__(self, folder: Path):
        super().__init__()
        self.file = folder / "prepared.pt"

    def prepare_data(self) -> None:
        torch.save(jobs.rows().tensors, self.file)

    def setup(self, stage: str) -> None:
        self.rows = torch.utils.data.TensorDataset(*torch.load(self.file))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.rows, 2, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.rows, 2)


def fit(folder: Path, module: Any, *callbacks: Any, ckpt_path: Any = None, **options: Any) -> tuple[list[float], Trainer]:
    losses = jobs.Losses()
    made = jobs.trainer(folder, callbacks=[losses, *callbacks], **options)
    made.fit(module, datamodule=Data(folder), ckpt_path=ckpt_path)
    return losses.losses, made


def train(folder: Path) -> dict[str, Any]:
    """Numbers that do not depend on how many processes there are."""
    found: dict[str, Any] = {}
    keep = ModelCheckpoint(dirpath=folder / "kept", every_n_train_steps=4, save_top_k=-1)
    whole: dict[str, Any] = {"zero1": True, "max_epochs": 2, "limit_train_batches": 6}
    found["losses"], made = fit(folder, jobs.module(zero1=True), keep, **whole)
    found["val_loss"] = made.callback_metrics["val_loss"].item()
    found["kept"] = sorted(p.name for p in (folder / "kept").iterdir())
    found["gathered"] = [t.tolist() for t in (made.lightning_module.all_gather(made.global_rank * 10.0), made.strategy.reduce(3.0))]
    found["resumed"], _ = fit(folder, jobs.module(zero1=True), ckpt_path=folder / "kept" / "epoch=0-step=4.ckpt", **whole)
    last = folder / "kept" / "epoch=1-step=12.ckpt"
    evaluating, few = jobs.trainer(folder, tp=2), Subset(jobs.rows(), range(5))
    module = jobs.module(tp=2)  # from ranks with other rows to ranks with other parts of the model
    found["validated"] = evaluating.validate(module, datamodule=Data(folder), ckpt_path=last, verbose=False)[0]["val_loss"]
    found["predicted"] = torch.cat(jobs.trainer(folder).predict(jobs.module(), DataLoader(few, 1), ckpt_path=last)).flatten().tolist()
    return found


class Stopping(jobs.Automatic):
    """The last process alone has no patience with a metric of its own."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mine", float(self.current_epoch if dist.get_rank() == 0 else -self.current_epoch), on_epoch=True)


class Failing(Callback):
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if dist.get_rank() == 1 and trainer.global_step == 2:
            raise RuntimeError("in one process")


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    found = train(folder)
    stop = EarlyStopping("mine", mode="max", patience=1)
    _, made = fit(folder, jobs.automatic(Stopping, tp=1), stop, max_epochs=6, limit_train_batches=2, limit_val_batches=1)
    found["epochs"] = made.current_epoch
    (folder / f"found_{dist.get_rank()}.json").write_text(json.dumps(found))
    fit(folder, jobs.automatic(Stopping, tp=1), Failing(), limit_val_batches=0)
    raise AssertionError("the other process failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
