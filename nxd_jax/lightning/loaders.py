"""The loader that the strategy gives Lightning: batches on the device ahead of time, and a position that a checkpoint keeps.

Lightning saves and restores the `state_dict()` of loaders. With it, training that is resumed in the middle of an epoch goes on with the batch that would
have come next, shuffled as it was: batches that were taken before are left out by their indices, without being read.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from torch_bridge import rank_data
from torch_bridge.torch_xla.distributed.parallel_loader import MpDeviceLoader, ParallelLoader


class NeuronDeviceLoader(MpDeviceLoader):
    """An `MpDeviceLoader` (which it is for `isinstance`) that knows its position.

    going_on: whether an epoch that is resumed was in its middle; if not, the first pass begins at the beginning. read_ahead: batches that were given out
    but not used yet. A loader with `state_dict` and `load_state_dict` of its own (torchdata) is asked for its own position.
    """

    def __init__(
        self,
        loader: Any,
        device: Any,
        going_on: Callable[[], bool] = lambda: True,
        read_ahead: Callable[[], int] = lambda: 0,
        **kwargs: Any,
    ):
        super().__init__(loader, device, **kwargs)
        self.dataset = getattr(loader, "dataset", None)
        self.batch_sampler = getattr(loader, "batch_sampler", None)
        self._going_on = going_on
        self._read_ahead = read_ahead
        self._resumed: dict[str, Any] | None = None
        self._own = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._taken = 0
        self._begin: Any = None
        self._states: list[Any] = []

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        source = _Source(self)
        passing = ParallelLoader(source, [self._device], **self._parallel_loader_kwargs).per_device_loader(self._device)
        return _Pass(self, passing)

    def state_dict(self) -> dict[str, Any]:
        """How many batches of this pass were used, and the random state that it began with; or the loader's own state."""
        used = max(self._taken - self._read_ahead(), 0)
        if self._own:
            return {"loader": self._states[used] if used < len(self._states) else self._loader.state_dict()}
        return {"batches": used, "random": self._begin}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin the next pass where another ended."""
        self._resumed = dict(state_dict)

    def _take_resumed(self) -> dict[str, Any] | None:
        resumed, self._resumed = self._resumed, None
        return resumed if resumed is not None and self._going_on() else None


class _Pass(Iterator[Any]):
    """One pass over a loader's batches."""

    def __init__(self, loader: NeuronDeviceLoader, batches: Any):
        self._loader = loader
        self._batches = batches
        self._started = False

    def __next__(self) -> Any:
        if not self._started:
            self._started = True
            self._loader._taken, self._loader._states = 0, []
        batch, position = next(self._batches)
        self._loader._taken = position.number
        if position.state is not None:
            self._loader._states[position.number :] = [position.state]
        return batch

    def close(self) -> None:
        """Stop reading ahead."""
        self._batches.close()


class _Position:
    """Comes with a batch: its number in the pass, counted from 1, and the loader's own state after it. Opaque to what moves tensors."""

    def __init__(self, number: int, state: Any):
        self.number = number
        self.state = state


class _Source:
    """The batches of one pass, each with its position."""

    def __init__(self, loader: NeuronDeviceLoader):
        self._of = loader

    def __iter__(self) -> Iterator[Any]:
        loader, resumed = self._of._loader, self._of._take_resumed()
        if self._of._own:
            if resumed is not None:
                loader.load_state_dict(resumed["loader"])
            for number, batch in enumerate(loader, 1):
                yield batch, _Position(number, copy.deepcopy(loader.state_dict()))
            return
        taken = resumed["batches"] if resumed is not None else 0
        states = _Random(loader)
        now = states.get()
        begin = resumed["random"] if resumed is not None else now
        self._of._begin = begin
        states.set(begin)
        batches = iter(_without(loader, taken))
        first = next(batches, _END)
        if resumed is not None:  # training goes on with the random state that it was resumed with
            states.set(now)
        if first is _END:
            return
        for number, batch in enumerate(itertools.chain([first], batches), taken + 1):
            yield batch, _Position(number, None)

    def __len__(self) -> int:
        return len(self._of._loader)


_END = object()


class _Random:
    """The random states that a loader may draw from when a pass begins."""

    def __init__(self, loader: Any):
        self._torch = rank_data.RandomStates(loader)

    def get(self) -> dict[str, Any]:
        return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": self._torch.get()}

    def set(self, states: dict[str, Any]) -> None:
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        self._torch.set(states["torch"])


def _without(loader: Any, count: int) -> Any:
    """A loader that leaves out its first batches: by their indices where it has indices, else by reading them."""
    if count == 0:
        return loader
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return itertools.islice(iter(loader), count, None)
    later = copy.copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    later.__dict__.update({name: _Later(getattr(loader, name), count), "_iterator": None})
    return later


class _Later:
    """What a sampler gives after its first `count`."""

    def __init__(self, sampler: Any, count: int):
        self.sampler = sampler
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.sampler), self.count, None)

    def __len__(self) -> int:
        return max(len(self.sampler) - self.count, 0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "sampler":
            raise AttributeError(name)
        return getattr(self.sampler, name)
