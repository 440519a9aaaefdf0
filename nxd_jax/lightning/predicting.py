"""What `Trainer.predict` reads: as many batches on every rank, and which rows they hold.

Lightning gives ranks different numbers of rows if these do not divide. Ranks compute together here, so the first rows are read again at the end by the ranks
that would have fewer. The first rank never does: what it predicts is what it would predict alone.
"""

from __future__ import annotations

from typing import Any

from pytorch_lightning.overrides.distributed import UnrepeatedDistributedSampler, _IndexBatchSamplerWrapper


def prepare(loader: object, rank: Any) -> None:
    """Let a loader that Lightning has made for predicting give every rank as many batches. rank: among those with different batches."""
    batches = getattr(loader, "batch_sampler", None)
    if not isinstance(batches, _IndexBatchSamplerWrapper):
        return
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, UnrepeatedDistributedSampler):
        each = -(-len(sampler.dataset) // sampler.num_replicas)  # type: ignore[arg-type]
        sampler.num_samples, sampler.total_size = each, each * sampler.num_replicas
        sampler.dataset = _Again(sampler.dataset, sampler.total_size)  # type: ignore[assignment]
        loader.__dict__["batch_sampler"] = _Seen(batches, rank)


class _Again:
    """Items, with the first ones again at the end until there are `count`."""

    def __init__(self, items: Any, count: int):
        self._items = items
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._items[index % len(self._items)]

    def reset(self) -> None:
        """Lightning's samplers begin a pass with this."""
        self._items.reset()


class _Seen(_IndexBatchSamplerWrapper):
    """Keeps the indices of the first hosted rank's batches, which `BasePredictionWriter` asks for. Copies for other ranks share the list and leave it alone."""

    def __init__(self, batches: _IndexBatchSamplerWrapper, rank: Any):
        self.__dict__.update(vars(batches))
        self.seen_batch_indices: list[list[int]] = []
        self._is_first = rank == int(rank)

    def __iter__(self) -> _Seen:
        self._iterator = iter(self._batch_sampler)
        if self._is_first:
            self.seen_batch_indices.clear()
        return self

    def __next__(self) -> list[int]:
        assert self._iterator is not None
        batch = next(self._iterator)
        if self._is_first:
            self.seen_batch_indices.append(batch)
        return batch
