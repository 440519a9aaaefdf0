"""Callbacks of an experiment: step times, a limit of time, the end by SIGTERM, no validation right after a resume."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import Timer
from pytorch_lightning.utilities.exceptions import _TunerExitException
from pytorch_lightning.utilities.rank_zero import rank_zero_info

from nxd_jax.training.utils.model_checkpoint import NeMoModelCheckpoint
from torch_bridge.mesh import world
from torch_bridge.torch_xla.core import xla_model as xm


class StatelessTimer(Timer):
    """`nemo.utils.exp_manager.StatelessTimer`: ends each run after a time of its own, with a checkpoint. (Lightning's Timer adds up the time of all runs.)

    duration: "DD:HH:MM:SS", a timedelta, or a dict such as {"minutes": 10}.
    """

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a resumed run has all its time."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""

    def _check_time_remaining(self, trainer: Trainer) -> None:
        assert self._duration is not None
        if not trainer.strategy.broadcast(self.time_elapsed() >= self._duration):
            return
        rank_zero_info(f"The run's time ({self._duration:.0f} s) is over at step {trainer.global_step}: it ends with a checkpoint.")
        save_now(trainer)
        raise _TunerExitException  # Lightning ends quietly


def save_now(trainer: Trainer) -> None:
    """Have every checkpoint callback of ours save the present step, if it has not."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, NeMoModelCheckpoint):
            callback.save_now(trainer)


class PreemptionCallback(Callback):
    """SIGTERM: the batch under way is finished, a checkpoint saved, and Lightning ends with SIGTERMException.

    Several processes end after the same batch: one that gets the signal waits until all have heard of it.
    """

    def __init__(self) -> None:
        self._lightnings: Any = None
        self._received = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if world.process_count() > 1 and threading.current_thread() is threading.main_thread():
            self._received = False
            self._lightnings = signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self._received = True

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if self._agreed(trainer):
            save_now(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._agreed(trainer)

    def _agreed(self, trainer: Trainer) -> bool:
        """Whether some process has got the signal; from then on, all have."""
        received = trainer.strategy.reduce_boolean_decision(self._received or trainer.received_sigterm, all=False)
        if received and not trainer.received_sigterm:
            trainer._signal_connector.received_sigterm = True
            if self._received and callable(self._lightnings):
                self._lightnings(signal.SIGTERM, None)
        return received

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._give_back()
        if trainer.received_sigterm and type(exception).__name__ == "SIGTERMException":
            save_now(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._give_back()

    def _give_back(self) -> None:
        if self._lightnings is not None:
            signal.signal(signal.SIGTERM, self._lightnings)
            self._lightnings = None


class TimingCallback(Callback):
    """Logs `train_step_timing`, `validation_step_timing`, `test_step_timing` and `train_backward_timing`, in seconds.

    A step is timed as it is recorded and handed over; the device may be at work on it still, and is waited for if sync_cuda is True. reduction: "mean" over
    the last buffer_size steps, or "sum". Raises ValueError for another.
    """

    def __init__(self, reduction: str = "mean", sync_cuda: bool = False, buffer_size: int = 1):
        if reduction not in ("mean", "sum"):
            raise ValueError(f"exp_manager.step_timing_kwargs.reduction must be 'mean' or 'sum', got {reduction!r}")
        self.reduction = reduction
        self.wait = sync_cuda
        self.buffer_size = buffer_size
        self._began: dict[str, float] = {}
        self._times: dict[str, deque[float]] = {}

    def _begin(self, name: str) -> None:
        if self.wait:
            xm.wait_device_ops()
        self._began[name] = time.perf_counter()

    def _end(self, name: str, module: LightningModule) -> None:
        if name not in self._began:
            return
        if self.wait:
            xm.wait_device_ops()
        times = self._times.setdefault(name, deque(maxlen=self.buffer_size))
        times.append(time.perf_counter() - self._began.pop(name))
        value = sum(times) / (len(times) if self.reduction == "mean" else 1)
        module.log(name, value, on_step=True, on_epoch=False, batch_size=1, rank_zero_only=True)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._begin("train_step_timing")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._end("train_step_timing", pl_module)

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._begin("validation_step_timing")

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._end("validation_step_timing", pl_module)

    def on_test_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._begin("test_step_timing")

    def on_test_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._end("test_step_timing", pl_module)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        self._begin("train_backward_timing")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end("train_backward_timing", pl_module)


def skip_validation_on_resume(trainer: Trainer) -> None:
    """`exp_manager.disable_validation_on_resume`: what is resumed trains first, also where the checkpoint was saved just before a validation, or in one. A
    validation that is due after the first batch is run. (The original leaves it out.)"""
    loop: Any = trainer.fit_loop.epoch_loop
    should: Callable[..., bool] = loop._should_check_val_fx
    resumed_at: int | None = None

    def after_a_resume(*args: Any) -> bool:
        nonlocal resumed_at
        if not loop.restarting:
            resumed_at = None
            return should(*args)
        ready = loop.batch_progress.total.ready
        if resumed_at is None:  # Lightning asks before the first batch, too
            resumed_at = ready
        return ready != resumed_at and should(*args)

    loop._should_check_val_fx = after_a_resume
