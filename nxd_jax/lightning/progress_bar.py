"""`neuronx_distributed.lightning.NeuronTQDMProgressBar`: a progress bar that says how long steps take and how much the whole job gets through."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pytorch_lightning.callbacks import TQDMProgressBar

from nxd_jax.lightning._pace import Pace, amount_of, described

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

_PAUSE = 0.1
"""Seconds between two drawings: a redrawn line costs more than Lightning's other work on a batch."""


class NeuronTQDMProgressBar(TQDMProgressBar):
    """`neuronx_distributed.lightning.NeuronTQDMProgressBar`: Lightning's TQDMProgressBar, and more to read.

    The arguments are those of the installed TQDMProgressBar (refresh_rate=1, process_position=0, leave=False).

    After what was logged with `prog_bar=True` it shows `step_time`, the time of a batch, and `tokens/s` or `samples/s`, what all data-parallel ranks
    together get through: averages over the last 10 batches. "compiling" stands there while the first batch is under way. All of it comes from clocks
    and shapes; nothing is read from the device. It is drawn
    at most ten times a second. Only the process that hosts rank 0 shows it. Under a strategy that does not know its
    `data_parallel_size` (any but NeuronXLAStrategy) it is Lightning's bar and no more.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._pace = Pace()
        self._drawn = 0.0
        self._waiting = False

    def on_train_start(self, trainer: Trainer, *args: object) -> None:
        super().on_train_start(trainer, *args)
        self._pace = Pace()

    def on_train_epoch_start(self, trainer: Trainer, *args: object) -> None:
        super().on_train_epoch_start(trainer, *args)
        self._pace.pause()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._know_total(trainer)
        if not self._pace.begun:
            self._say(trainer, "compiling")
        self._pace.batch_starts(time.perf_counter())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._pace.begun:
            self._say(trainer, "")
        now = time.perf_counter()
        self._pace.batch_ends(now, amount_of(batch))
        self._waiting = now - self._drawn < _PAUSE and not trainer.is_last_batch
        if not self._waiting:
            self._drawn = now
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._waiting and self.is_enabled:
            self._waiting = False
            self.train_progress_bar.n = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        super().on_train_epoch_end(trainer, pl_module)

    def _know_total(self, trainer: Trainer) -> None:
        """In an epoch that is resumed in its middle, which Lightning does not say has begun."""
        bar, total = self.train_progress_bar, self.total_train_batches
        if self.is_enabled and bar.total is None and total != float("inf"):
            bar.total = int(total)
            bar.set_description(f"Epoch {trainer.current_epoch}")

    def _say(self, trainer: Trainer, text: str) -> None:
        """Show a word in place of metrics."""
        if self.is_enabled and _ranks(trainer) is not None:
            self.train_progress_bar.set_postfix_str(text)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        self._pace.pause()

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """What the bar shows: what was logged for it, then the time of a step and the rate (unless something of that name was logged)."""
        shown = dict(super().get_metrics(trainer, pl_module))
        version = getattr(trainer.logger, "version", None)
        if isinstance(version, str) and "v_num" in shown:
            shown["v_num"] = version  # Lightning's: its last four letters
        ranks = _ranks(trainer)
        for name, text in {} if ranks is None else described(self._pace, ranks).items():
            shown.setdefault(name, text)
        return shown


def _ranks(trainer: Trainer) -> int | None:
    """The data-parallel ranks of the job; None under a strategy that does not say."""
    return getattr(trainer.strategy, "data_parallel_size", None)
