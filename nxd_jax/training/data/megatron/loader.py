"""A loader that begins behind the samples that were trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from nxd_jax.training.data.loaders import SampleLoader
from nxd_jax.training.data.megatron.samplers import MegatronBatchSampler


class MegatronLoader(SampleLoader):
    """Batches of samples for one data-parallel rank: dicts of tensors [rows, ...], read in the process itself.

    consumed: how many samples were trained on before a further pass begins; None (validation): each pass begins with the first one.
    """

    batch_sampler: MegatronBatchSampler

    def __init__(self, samples: Any, batches: MegatronBatchSampler, consumed: Callable[[], int] | None = None):
        super().__init__(samples, batch_sampler=batches)
        self.global_batch_size = batches.global_batch_size
        self._consumed = consumed
        self.begin(batches.consumed_samples)

    def __iter__(self) -> Any:
        if self._begun and self._consumed is not None:
            self._set(self._consumed())
        return self._passing(self._pass)

    def _pass(self) -> Iterator[Any]:
        self.batch_sampler.consumed_samples = self._first
        return super().__iter__()

    def __len__(self) -> int:
        """Batches of a whole pass."""
        return len(self.batch_sampler)
