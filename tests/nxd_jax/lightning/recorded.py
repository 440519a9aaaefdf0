"""Runs a Lightning script as `__main__` and keeps what it trained on: `python recorded.py script.py folder`.

Each process writes `<folder>/<rank>.pt`: weights before and after, the batches of its rank, and the loss that was logged in each step.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import neuronx_distributed.lightning  # noqa: F401  (before Lightning, as the scripts do)
import pytorch_lightning
import torch

from torch_bridge.mesh import world


class Recorder(pytorch_lightning.Callback):
    def __init__(self, folder: Path):
        self.folder = folder
        self.found: dict[str, Any] = {"batches": [], "logged": []}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.found["before"] = {name: p.detach().cpu() for name, p in module.named_parameters()}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.found["batches"].append(batch[0].cpu())
        self._log(trainer)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._log(trainer)
        self.found["after"] = {name: p.detach().cpu() for name, p in module.named_parameters()}
        self.found["steps"] = trainer.global_step
        torch.save(self.found, self.folder / f"{world.first()}.pt")

    def _log(self, trainer: Any) -> None:
        if "loss" in trainer.logged_metrics:
            self.found["logged"].append(float(trainer.logged_metrics["loss"]))


def main() -> None:
    script, folder = sys.argv[1], Path(sys.argv[2])
    fit = pytorch_lightning.Trainer.fit

    def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        self.callbacks.append(Recorder(folder))
        fit(self, *args, **kwargs)

    pytorch_lightning.Trainer.fit = recorded
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
