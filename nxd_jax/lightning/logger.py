"""`neuronx_distributed.lightning.NeuronTensorBoardLogger`: TensorBoard scalars at a step that `training_step` may choose."""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities.rank_zero import rank_zero_only

_PAUSE = 1.0
"""Seconds between two times that scalars are written out."""


class NeuronTensorBoardLogger(TensorBoardLogger):
    """`neuronx_distributed.lightning.NeuronTensorBoardLogger`: Lightning's TensorBoardLogger with `print_step`.

    save_dir: the folder to write to, as `<save_dir>/<name>/version_<n>`. log_rank0: kept, without effect. (NxD writes on a rank of the last pipeline
    stage without it.) Other arguments are TensorBoardLogger's.

    Only the process that hosts rank 0 writes. Scalars, hyperparameters and graphs arrive without further ado, at Lightning's own steps. (NxD writes
    nothing before `print_step` is set.)
    """

    def __init__(self, save_dir: str | Path, log_rank0: bool = False, **kwargs: Any):
        if isinstance(save_dir, bool):
            raise TypeError(
                f"NeuronTensorBoardLogger: save_dir must be a folder, got {save_dir}; pass log_rank0 by name: (save_dir=..., log_rank0={save_dir})"
            )
        super().__init__(save_dir, **kwargs)
        self.log_rank0 = log_rank0
        self._print_step: int | None = None
        self._saved = -_PAUSE

    @property
    def print_step(self) -> int:
        """The step of all scalars from now on; negative: they are not written. -1 until it is set, and Lightning's steps count until then.

        Raises TypeError for what is no whole number.
        """
        return -1 if self._print_step is None else self._print_step

    @print_step.setter
    def print_step(self, value: int) -> None:
        try:
            self._print_step = operator.index(value)
        except TypeError:
            raise TypeError(f"print_step must be a whole number, the step to log at (or negative, to log nothing), got {value!r}") from None

    def should_print(self) -> bool:
        """Whether this process writes the scalars that are logged now: it hosts rank 0, and `print_step` was not set to a negative step."""
        return getattr(rank_zero_only, "rank", 0) == 0 and (self._print_step is None or self._print_step >= 0)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write scalars at `print_step` if it was ever set, else at `step`."""
        if self._print_step is None:
            super().log_metrics(metrics, step)
        elif self._print_step >= 0:
            super().log_metrics(metrics, self._print_step)

    def save(self) -> None:
        """Write out what was logged, at most once a second: Lightning asks after every batch. (`finalize` always does.)"""
        now = time.monotonic()
        if now - self._saved >= _PAUSE:
            self._saved = now
            super().save()

    def finalize(self, status: str) -> None:
        self._saved = -_PAUSE
        super().finalize(status)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Record hyperparameters, and metrics that belong to them, whatever `print_step` is. The arguments are TensorBoardLogger's."""
        chosen, self._print_step = self._print_step, None
        try:
            super().log_hyperparams(params, *args, **kwargs)
        finally:
            self._print_step = chosen
