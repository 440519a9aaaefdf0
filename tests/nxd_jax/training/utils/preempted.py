"""What `test_preemption` runs in two processes: python -m torch.distributed.run --nproc_per_node=2 preempted.py <directory> <step or "never">."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, Trainer
from pytorch_lightning.utilities.exceptions import SIGTERMException

from tests.nxd_jax.training.utils import runs
from torch_bridge.mesh import termination


class Signal(Callback):
    """SIGTERM for the second process in a step; the first one hears of it from that, and gets its own later."""

    def __init__(self, step: str):
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if str(trainer.global_step) == self.step and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)

    def on_save_checkpoint(self, *args: Any) -> None:
        if os.environ["RANK"] == "0" and self.step != "never":
            os.kill(os.getpid(), signal.SIGTERM)


def main(folder: Path, step: str) -> None:
    warnings.simplefilter("ignore")
    result: dict[str, Any] = {"ended": "by itself"}
    keep: list[Any] = []

    class Seen(Callback):
        def on_train_start(self, trainer: Trainer, module: Any) -> None:
            keep.append((trainer, module))

    try:
        runs.run(*runs.words(folder, "trainer.devices=2", every=100), "trainer.max_steps=6", callbacks=(Signal(step), Seen()))
    except SIGTERMException:
        result["ended"] = "SIGTERM"
    trainer, module = keep[0]
    result["same"] = signal.getsignal(signal.SIGTERM) is termination.on_terminate
    result |= {"step": trainer.global_step, "losses": runs.losses(module), "kept": runs.kept(folder)}
    (folder / f"found_{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
