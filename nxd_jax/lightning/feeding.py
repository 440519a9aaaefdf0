"""The loaders of a Trainer: made, stopped, and brought to where a training that is resumed goes on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxd_jax.checkpoint import saving, writing
from nxd_jax.lightning.loaders import NeuronDeviceLoader, of_this_process, states_of_loaders

if TYPE_CHECKING:
    from torch.types import Device


class Feeding:
    """What a strategy knows of its loaders. trainer(): the Trainer at work."""

    def __init__(self, trainer: Callable[[], Any]):
        self._trainer = trainer
        self._made: weakref.WeakSet[NeuronDeviceLoader] = weakref.WeakSet()
        self._folder: str | None = None
        self._positions: list[dict[str, Any]] = []

    def loader(self, loader: Any, device: Device) -> NeuronDeviceLoader:
        """A loader's batches on a device."""
        self._restore_random()
        made = NeuronDeviceLoader(loader, device, self._is_within_epoch, self._unused)
        self._made.add(made)
        if self._positions and self._trainer().training:  # Lightning brings them itself only in the middle of an epoch
            made.load_state_dict(self._positions.pop(0))
        return made

    def resume(self, folder: str | None, checkpoint: Mapping[str, Any]) -> None:
        """The training that begins goes on from a checkpoint, whose loaders' states become those of this process. folder: where its random states are."""
        self._folder = folder
        self._positions = states_of_loaders(checkpoint)
        if folder is not None and self._positions:
            self._positions = of_this_process(self._positions, Path(folder) / writing.RANDOM)
            checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = list(self._positions)

    def begin(self) -> None:
        """Training starts: with the random states that it is resumed with; where loaders have drawn from them already, with what that left."""
        if not self._fetched():
            self._restore_random()
        self._folder, self._positions = None, []

    def close(self) -> None:
        """Nothing is read ahead any more."""
        self._folder, self._positions = None, []
        for loader in self._made:
            loader.close()

    def _restore_random(self) -> None:
        if self._folder is not None:
            saving.restore_random(Path(self._folder))

    # -- what Lightning's loops say -------------------------------------------------------------------

    def _is_within_epoch(self) -> bool:
        """Whether what is resumed was in the middle of an epoch."""
        progress = self._trainer().fit_loop.epoch_loop.batch_progress
        return progress.current.ready > 0 and not progress.is_last_batch

    def _unused(self) -> int:
        """Batches that Lightning has taken and not trained on: that of the step under way, and those fetched ahead."""
        progress = self._trainer().fit_loop.epoch_loop.batch_progress.current
        return progress.ready - progress.processed + self._fetched()

    def _fetched(self) -> int:
        return len(getattr(self._trainer().fit_loop._data_fetcher, "batches", ()))
