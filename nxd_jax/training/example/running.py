"""The training of `nxdt-train --example`: begun, stopped half way, and gone on with by the same command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nxd_jax.training.config import loading
from nxd_jax.training.data import making
from nxd_jax.training.example import curves, files

_PATIENCE = 120.0
"""Seconds that a training may take to save and end when it is told to."""


def run_example(out: str | Path, overrides: Sequence[str] = ()) -> int:
    """Write an example to a folder and train it; returns the exit status. overrides: words that change keys of its configuration.

    Exits with a line for a folder that holds something already.
    """
    try:
        where, made = files.write(Path(out))
    except FileExistsError as error:
        raise SystemExit(f"nxdt-train --example: {error}") from None
    cfg = loading.load(where.config, overrides)
    steps = int(cfg.trainer.max_steps)
    _say(_written(where, made))
    command = [sys.executable, "-m", "nxd_jax.training", str(where.config), *overrides]
    shown = " ".join(["nxdt-train", str(where.config), *overrides])
    _say(f"\n1. {shown}      (and SIGTERM half way, as a machine that is taken away sends)\n")
    status, told = _until(command, lambda: (newest(where.experiments) or 0) >= steps // 2)
    stopped = newest(where.experiments)
    if stopped is None or not told:
        _say(f"nxdt-train --example: the training ended with status {status} before it could be stopped; its words are above")
        return status or 1
    _say(f"\n2. It was stopped; its newest checkpoint is of step {stopped}. The same command goes on there:\n   {shown}\n")
    status = subprocess.run(command, check=False).returncode
    if status:
        _say(f"nxdt-train --example: the training ended with status {status}; its words are above")
        return status
    _say(_ended(where, stopped, shown))
    return 0


def newest(experiments: Path) -> int | None:
    """The step of the newest complete checkpoint. Another process may be writing there: folders come and go."""
    steps = []
    for folder, inside, names in os.walk(experiments):  # it passes over folders that are gone
        if folder.endswith(".ckpt"):
            inside.clear()
            found = re.search(r"step=(\d+)", os.path.basename(folder))
            steps += [int(found[1])] if found and "done" in names else []
    return max(steps, default=None)


def _until(command: Sequence[str], reached: Callable[[], bool]) -> tuple[int, bool]:
    """Run a command, and tell it to end as soon as something is reached: (its exit status, whether it was told)."""
    process = subprocess.Popen(command)
    told = False
    try:
        while process.poll() is None and not reached():
            time.sleep(0.2)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            told = True
        return process.wait(_PATIENCE), told
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _written(where: files.Files, made: dict[str, making.Made]) -> str:
    rows = {use: f"{one.rows:,} rows of {one.length} ids" for use, one in made.items()}
    return "\n".join(
        [
            f"nxdt-train --example: what it trains on is in {where.folder}",
            f"  {where.config.name}  what to train, in the shape of NxD Training's files",
            f"  {where.model.name}                the model's sizes",
            f"  {where.text.name}/                       Python's documentation, which this machine has",
            f"  {where.tokenizer.name}/                  {files.VOCABULARY} tokens (nxdt-data tokenizer)",
            f"  {where.data.name}/train, {where.data.name}/val       {rows['train']}, {rows['val']} (nxdt-data make)",
        ]
    )


def _ended(where: files.Files, stopped: int, shown: str) -> str:
    values = curves.losses(where.experiments)
    last = max(values)
    lines = [
        f"\nreduced_train_loss, stopped and resumed at step {stopped} (:)\n",
        curves.text(values, stopped),
        f"\nstep {min(values)}: {values[min(values)]:.3f}, step {last}: {values[last]:.3f} nats per token",
    ]
    if curves.picture(values, where.curve, stopped):
        lines.append(f"picture:       {where.curve}")
    lines += [
        f"checkpoints:   {next(iter(where.experiments.rglob('checkpoints')))}",
        f"TensorBoard:   tensorboard --logdir {where.experiments}",
        f"train longer:  {shown} trainer.max_steps=300",
        f"look at data:  nxdt-data show {where.data / 'train'} --tokenizer {where.tokenizer}",
        f"check:         nxdt-train --check {where.config}",
    ]
    return "\n".join(lines)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
