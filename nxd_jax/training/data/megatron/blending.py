"""Several sets by weights, in one order that is the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from nxd_jax.training.data.megatron.turns import turns


class Blend(Dataset[Any]):
    """`BlendableDataset(datasets, weights, size)`: sample k is of the set whose turn it is. Number -1 is a sample that only fills a batch.

    size: of samples; None: as many as there are until the next one would be of a set that has no more.

    Raises ValueError for a set that has fewer samples than its weight asks of it.
    """

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float], size: int | None):
        if len(datasets) != len(weights):
            raise ValueError(f"{len(datasets)} sets cannot be blended by {len(weights)} weights")
        self.datasets = tuple(datasets)
        self.weights = (np.asarray(weights, np.float64) / np.sum(weights)).tolist()
        there = np.array([len(one) for one in datasets])
        if size is None:
            most = min(int(count / weight) for count, weight in zip(there, self.weights, strict=True) if weight)
            chosen, numbers = turns(self.weights, most + len(there))
            end = int(np.flatnonzero([*(numbers >= there[chosen]), True])[0])
            self._chosen, self._numbers = chosen[:end], numbers[:end]
            return
        self._chosen, self._numbers = turns(self.weights, size)
        for number, one in enumerate(self.datasets):
            taken = int((self._chosen == number).sum())
            if taken > len(one):
                raise ValueError(f"{taken} of {size} samples are to be of {getattr(one, 'source', f'set {number}')}, which has {len(one)}")

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, number: int) -> Any:
        inner = int(self._numbers[number])
        return self.datasets[self._chosen[number]][-1 if number == -1 else inner]
