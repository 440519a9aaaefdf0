"""A DataLoader for each data-parallel rank that says at which sample it is, and goes on there, also with another number of ranks or another batch size.

Step k trains on samples k * global_batch_size and on of the set (or of its shuffled order), of which rank r reads every dp-th: r, r + dp, ... That is
torch's DistributedSampler with drop_last, for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from nxd_jax.training.data.rows import too_few
from nxd_jax.training.data.streams import Pass, Stream


class Order(DistributedSampler[Any]):
    """DistributedSampler's order, in whole global batches, from sample `begin` on. `set_epoch` shuffles anew."""

    def __init__(self, rows: Any, replicas: int, rank: Any, global_batch_size: int, shuffle: bool = False, seed: int = 0):
        super().__init__(rows, num_replicas=replicas, rank=rank, shuffle=shuffle, seed=seed, drop_last=True)
        self.begin = 0
        self.global_batch_size = global_batch_size

    def batches(self) -> int:
        """From `begin` to the end of the pass."""
        return max(len(self.dataset) - self.begin, 0) // self.global_batch_size  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        count = len(self.dataset)  # type: ignore[arg-type]
        begin = self.begin
        end = begin + self.batches() * self.global_batch_size
        if not self.shuffle:
            return iter(range(begin + self.rank, end, self.num_replicas))
        source = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(count, generator=source)[begin:end]
        return iter(order[self.rank :: self.num_replicas].tolist())

    def __len__(self) -> int:
        return self.batches() * self.global_batch_size // self.num_replicas


class SampleLoader(DataLoader[Any]):
    """A DataLoader that counts its batches: `state_dict` and `load_state_dict` have the position in the pass."""

    global_batch_size: int
    _first = 0
    """The sample that the pass begins with."""
    _taken = 0
    _begun = _told = False

    def begin(self, samples: int) -> None:
        """Begin the next pass behind this many samples; a state of another batch size that is loaded later does not change that."""
        self._set(samples)
        self._told = True

    def state_dict(self) -> dict[str, int]:
        """The position, after the batch that was given out last."""
        return {"samples": self._first + self._taken * self.global_batch_size, "global_batch_size": self.global_batch_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin the next pass there, at its first sample if that one had ended."""
        if not self._told or state["global_batch_size"] == self.global_batch_size:
            self._set(0 if self._ended(state) else state["samples"])

    def _ended(self, state: dict[str, int]) -> bool:
        return False

    def _set(self, samples: int) -> None:
        self._first, self._taken, self._begun = samples, 0, False

    def _passing(self, batches: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """A pass begins, behind where the last one did only if it was told so."""
        if self._begun:
            self._set(0)
        self._begun, self._taken = True, 0
        self._now = now = object()
        return self._counted(batches(), now)

    def _counted(self, batches: Iterator[Any], now: object) -> Iterator[Any]:
        for batch in batches:
            if self._now is now:  # what was read ahead for an earlier pass may still come
                self._taken += 1
            yield batch


class SetLoader(SampleLoader):
    """Batches of `global_batch_size / replicas` rows for one data-parallel rank of `replicas`.

    rows: dicts of tensors, with the set's name in `source`. rank: a number for each rank in a process that hosts several.

    Raises ValueError for a set with fewer rows than a step needs.
    """

    def __init__(self, rows: Any, replicas: int, rank: Any, global_batch_size: int, shuffle: bool = False, seed: int = 0):
        if len(rows) < global_batch_size:
            raise ValueError(too_few(rows.source, len(rows), global_batch_size))
        order = Order(rows, replicas, rank, global_batch_size, shuffle, seed)
        super().__init__(rows, batch_size=global_batch_size // replicas, sampler=order, drop_last=True)
        self.global_batch_size = global_batch_size
        self.order = order
        self.count = len(rows)

    def _ended(self, state: dict[str, int]) -> bool:
        return self.count - state["samples"] < state["global_batch_size"]

    def __iter__(self) -> Any:
        return self._passing(self._begin)

    def _begin(self) -> Iterator[Any]:
        self.order.begin = self._first
        return super().__iter__()

    def __len__(self) -> int:
        """Batches in a whole pass."""
        return self.count // self.global_batch_size


class StreamLoader(SampleLoader):
    """As `SetLoader`, for rows that are read from front to back; without a length."""

    def __init__(self, stream: Stream, replicas: int, rank: Any, global_batch_size: int):
        super().__init__(_StreamRows(stream, replicas, rank), batch_size=global_batch_size // replicas, drop_last=True)
        self.global_batch_size = global_batch_size
        self.stream = stream

    def __iter__(self) -> Any:
        return self._passing(self._begin)

    def _begin(self) -> Iterator[Any]:
        self.stream.begin(self._first, self.global_batch_size)
        return super().__iter__()


class _StreamRows(IterableDataset[Any]):
    """One rank's rows of a stream. Ranks of one process share the stream, and each row is read once."""

    def __init__(self, stream: Stream, replicas: int, rank: Any):
        self.stream = stream
        self.replicas = replicas
        self.rank = rank

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        passing = self.stream.passing
        assert passing is not None
        return self._rows(passing)

    def _rows(self, passing: Pass) -> Iterator[dict[str, torch.Tensor]]:
        number = 0
        while (batch := passing.batch(number)) is not None:
            yield from batch[self.rank :: self.replicas]
            number += 1
