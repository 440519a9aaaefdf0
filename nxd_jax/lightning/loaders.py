"""The loader that the strategy gives Lightning: batches on the device ahead of time, and a position that a checkpoint keeps.

Lightning saves and restores the `state_dict()` of loaders. With it, training that is resumed in the middle of an epoch goes on with the batch that would
have come next, shuffled as it was: batches that were taken before are left out by their indices, without being read.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from nxd_jax.checkpoint import random_states
from torch_bridge.per_rank import host_random_states, rank_loaders
from torch_bridge.torch_xla.distributed.parallel_loader import MpDeviceLoader, ParallelLoader


class NeuronDeviceLoader(MpDeviceLoader):
    """An `MpDeviceLoader` (which it is for `isinstance`) that knows its position.

    going_on: whether an epoch that is resumed was in its middle; if not, the first pass begins at the beginning. unused: batches that were given out but not
    used yet. A loader with `state_dict` and `load_state_dict` of its own (torchdata) is asked for its own position.
    """

    def __init__(
        self,
        loader: Any,
        device: Any,
        going_on: Callable[[], bool] = lambda: True,
        unused: Callable[[], int] = lambda: 0,
        **kwargs: Any,
    ):
        super().__init__(loader, device, **kwargs)
        self.dataset = getattr(loader, "dataset", None)
        self.batch_sampler = getattr(loader, "batch_sampler", None)
        self._going_on = going_on
        self._unused = unused
        self._resumed: dict[str, Any] | None = None
        self._own = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._taken = 0
        self._begin: Any = None
        self._states: list[Any] = []
        self._count: int | None = None
        self._passes: weakref.WeakSet[_Pass] = weakref.WeakSet()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        source = _Source(self)
        passing = ParallelLoader(source, [self._device], **self._parallel_loader_kwargs).per_device_loader(self._device)
        made = _Pass(self, passing)
        self._passes.add(made)
        return made

    def close(self) -> None:
        """End all passes; nothing is read ahead any more."""
        for one in list(self._passes):
            one.close()

    def state_dict(self) -> dict[str, Any]:
        """How many batches of this pass were used, the random state that it began with and that of the loader's generators now; or the loader's own state."""
        used = max(self._taken - self._unused(), 0)
        if not self._own:
            return {"batches": used, "random": self._begin, "generators": [*map(_saved, _Random(self._loader).of_generators())]}
        ended = used == self._count
        return {"batches": used, "ended": ended, "loader": self._loader.state_dict() if ended or not self._states else self._states[used]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin the next pass where another ended."""
        self._resumed = dict(state_dict)

    def _take_resumed(self) -> dict[str, Any] | None:
        """Where the pass that begins is to begin, if not at the beginning."""
        resumed, self._resumed = self._resumed, None
        if resumed is None or self._going_on():
            return resumed
        if self._own:
            return resumed if resumed["ended"] or not resumed["batches"] else None
        if not resumed["batches"] and resumed["random"] is not None:
            return resumed
        _Random(self._loader).set_generators(resumed["generators"])
        return None


class _Pass(Iterator[Any]):
    """One pass over a loader's batches."""

    def __init__(self, loader: NeuronDeviceLoader, batches: Any):
        self._loader = loader
        self._batches = batches
        self._started = False

    def __next__(self) -> Any:
        if not self._started:
            self._started = True
            self._loader._taken, self._loader._states, self._loader._count = 0, [], None
        batch, position = next(self._batches)
        self._loader._taken = position.number
        self._loader._states += position.states
        return batch

    def close(self) -> None:
        """Stop reading ahead."""
        self._batches.close()


class _Position:
    """Comes with a batch: its number in the pass, counted from 1, and the loader's own state after it, with the first batch also that before it. Opaque to what
    moves tensors."""

    def __init__(self, number: int, *states: Any):
        self.number = number
        self.states = states


class _Source:
    """The batches of one pass, each with its position."""

    def __init__(self, loader: NeuronDeviceLoader):
        self._of = loader

    def __iter__(self) -> Iterator[Any]:
        loader, resumed = self._of._loader, self._of._take_resumed()
        if self._of._own:
            if resumed is not None:
                loader.load_state_dict(resumed["loader"])
            yield from self._with_states(loader)
            return
        taken = resumed["batches"] if resumed is not None else 0
        drawing = _Random(loader)
        now = drawing.get()
        begin = _live(resumed["random"]) if resumed is not None else now
        self._of._begin = _savable(begin)
        drawing.set(begin)
        batches = iter(_without(loader, taken))
        first = next(batches, _END)
        if (
            resumed is not None
        ):  # training goes on with the random state that it was resumed with; the loader's generators have come as far as they were
            drawing.set({**now, "torch": [now["torch"][0], *drawing.of_generators()]})
        if first is _END:
            return
        for number, batch in enumerate(itertools.chain([first], batches), taken + 1):
            yield batch, _Position(number)

    def _with_states(self, loader: Any) -> Iterator[Any]:
        states, number = [copy.deepcopy(loader.state_dict())], 0
        for number, batch in enumerate(loader, 1):
            yield batch, _Position(number, *states, copy.deepcopy(loader.state_dict()))
            states = []
        self._of._count = number

    def __len__(self) -> int:
        return len(self._of._loader)


_END = object()


class _Random:
    """The random states that a loader may draw from when a pass begins."""

    def __init__(self, loader: Any):
        self._torch = rank_loaders.TorchStates(loader)

    def get(self) -> dict[str, Any]:
        return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": self._torch.get()}

    def set(self, states: dict[str, Any]) -> None:
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        self._torch.set(states["torch"])

    def of_generators(self) -> list[torch.Tensor]:
        """Of those that the loader was given."""
        return self._torch.get()[1:]

    def set_generators(self, states: list[torch.Tensor]) -> None:
        now = self._torch.get()
        if len(now) == 1 + len(states):  # the loader may be another one
            self._torch.set([now[0], *map(_joined, states)])


def _savable(states: dict[str, Any]) -> dict[str, Any]:
    """As files keep them: lists where ranks have states of their own, and no arrays of NumPy's, which `torch.load` does not trust."""
    numpy = [(kind, np.asarray(keys).tolist(), *rest) for kind, keys, *rest in host_random_states.each(states["numpy"])]
    return {"python": _saved(states["python"]), "numpy": _of_one(numpy), "torch": [*map(_saved, states["torch"])]}


def _live(states: dict[str, Any]) -> dict[str, Any]:
    """The other way round."""
    return {"python": _joined(states["python"]), "numpy": _joined(states["numpy"]), "torch": [*map(_joined, states["torch"])]}


def _saved(state: Any) -> Any:
    return _of_one(host_random_states.each(state))


def _of_one(states: list[Any]) -> Any:
    return states[0] if len(states) == 1 else states


def _joined(state: Any) -> Any:
    return host_random_states.joined(state) if isinstance(state, list) else state


def of_this_process(states: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The states of a checkpoint's loaders as the ranks of this process had them. states: as rank 0 had them; folder: of the random states.

    Where a loader keeps its own state (torchdata), or ranks were not there, rank 0's.
    """
    found = random_states.saved(folder)
    own = [] if found is None else found.own.get(LOADERS, [])
    if found is None or len(own) != len(states):  # of before
        return states
    return [_of_ranks(found, k, state) for k, state in enumerate(own)]


def states_of_loaders(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of the loaders that training reads, in what Lightning saves."""
    return list(checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader", ()))


LOADERS = "loaders"
"""What a process's loaders' states are called among its random states."""


def _of_ranks(found: random_states.Saved, k: int, state: dict[str, Any]) -> dict[str, Any]:
    if "random" not in state:
        return state

    def each(*path: Any) -> list[Any]:
        return found.host(lambda states: functools.reduce(operator.getitem, path, states[LOADERS][k]))

    begin = state["random"] and {
        **{name: each("random", name) for name in ("python", "numpy")},
        "torch": [each("random", "torch", n) for n in range(len(state["random"]["torch"]))],
    }
    return {"batches": state["batches"], "random": begin, "generators": [each("generators", n) for n in range(len(state["generators"]))]}


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
