"""A run that is killed again and again, each time started anew with the same configuration: ZeRO-1, a pipeline, saves in the background.

    python -m tests.nxd_jax.training.utils.kills FOLDER KILL...

KILL is when SIGKILL comes: a number, that of the file operation (of Python) in the folder; or seconds after training began, such as 0.3s. Then one more life
ends by itself, and another run, in another folder, is never killed. Prints as JSON what each life trained: [step, loss] pairs, and the weights at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch_xla  # noqa: F401  (imported before processes fork; JAX starts in each of them)
from pytorch_lightning import Callback

from nxd_jax.utils.full_weights import gather_full
from tests.nxd_jax.checkpoint.pipeline_kills import kill_at
from tests.nxd_jax.training import small
from tests.nxd_jax.training.utils import runs

LEAST = 8
LAYOUT = ("trainer.devices=4", "distributed_strategy.pipeline_model_parallel_size=2", "exp_manager.async_checkpointing=True")


class Module(small.Module):
    """Tells the parent each loss."""

    channel = -1

    def log_metrics(self, *args: Any) -> None:
        super().log_metrics(*args)
        self.tell([self.seen[-1]["step"], float(self.seen[-1]["loss"]).hex()])

    def tell(self, what: Any) -> None:
        os.write(self.channel, f"{json.dumps(what)}\n".encode())


class Killed(Callback):
    """when: as above; None: never. Steps take a moment, so that saves in the background are under way while it trains."""

    def __init__(self, folder: Path, when: str | None):
        self.folder, self.when = folder, when

    def on_train_start(self, *args: Any) -> None:
        if self.when is not None:
            kill_at(self.folder, self.when)

    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(0.4)


def train(folder: Path, when: str | None, steps: int) -> None:
    words = runs.words(folder, *LAYOUT, f"trainer.max_steps={steps}", every=1)
    _, model = runs.run(*words, callbacks=(Killed(folder / "small" / "checkpoints", when),), module=Module)
    digest = hashlib.sha256()
    for _, p in model.named_parameters():
        digest.update(gather_full(p).detach().cpu().numpy().tobytes())
    model.tell(digest.hexdigest())


def life(folder: Path, when: str | None, steps: int) -> list[Any]:
    """Fork a child; what it told."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        Module.channel = write
        code = 1
        try:
            train(folder, when, steps)
            code = 0
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        found = [json.loads(line) for line in pipe if line.endswith("\n")]
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if not killed and status != 0:
        raise SystemExit(f"a life that was to be killed at {when} failed by itself")
    return found


def main(arguments: list[str]) -> None:
    root, kills = Path(arguments[0]), arguments[1:]
    steps = max(LEAST, 2 * len(kills))
    lives = [life(root / "killed", when, steps) for when in [*kills, None]]
    sys.stdout.write(f"\n{json.dumps({'lives': lives, 'whole': life(root / 'whole', None, steps)})}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
