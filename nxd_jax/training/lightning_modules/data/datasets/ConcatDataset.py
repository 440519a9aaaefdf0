"""`neuronx_distributed_training.lightning_modules.data.datasets.ConcatDataset`: several tokenized rows in one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from nxd_jax.training.lightning_modules.data.utils import convert_dict_to_list, pad_tokens

__all__ = ["ConcatDataset"]

logger = logging.getLogger("nxd_jax")

Columns = Mapping[str, Sequence[Sequence[int]]]


class ConcatDataset(Dataset[dict[str, list[int]]]):
    """Rows of exactly chunk_size: as many of a data set's as fit, in order, each with EOS_ID behind it, the rest filled.

    dataset: columns input_ids, attention_mask and labels, lists of ids; or something with `dataset["input_ids"]` like that. pad_id_map: what fills each
    column. No loss is taken of EOS_ID where pad_id_map["labels"] is -100, and it is attended to. A row of chunk_size or more tokens fits nowhere and is left
    out, with a warning that counts them.

    Labels and masks are those of the data set. (The original has token ids in their place.)
    """

    def __init__(self, dataset: Any, EOS_ID: int, pad_id_map: Mapping[str, int], chunk_size: int = 4096):
        self.dataset = dataset
        self.chunk_size = chunk_size
        self.eos = EOS_ID
        self.pad_id_map = pad_id_map
        self.samples = self.pack_datasets(dataset, chunk_size, EOS_ID, pad_id_map)

    def pack_datasets(self, data: Any, chunk_size: int, EOS_ID: int, pad_id_map: Mapping[str, int]) -> list[dict[str, list[int]]]:
        """The packed rows, each with the three columns."""
        ends = {**pad_id_map, "input_ids": EOS_ID, "attention_mask": 1}
        columns = {name: list(data[name]) for name in ("input_ids", "attention_mask", "labels")}
        packed: dict[str, list[list[int]]] = {name: [] for name in columns}
        for rows in self._together(columns["input_ids"], chunk_size):
            for name, values in columns.items():
                joined = [number for row in rows for number in (*values[row], ends[name])]
                packed[name].append(pad_tokens(joined, chunk_size, pad_id_map[name]))
        return convert_dict_to_list(packed)

    def _together(self, ids: Sequence[Sequence[int]], chunk_size: int) -> list[list[int]]:
        """Which rows go into one."""
        fitting = [k for k, row in enumerate(ids) if len(row) < chunk_size]
        if len(fitting) < len(ids):
            logger.warning(
                "%d of %d rows have %d tokens or more and are left out: with the end of text they do not fit",
                len(ids) - len(fitting),
                len(ids),
                chunk_size,
            )
        found: list[list[int]] = []
        used = chunk_size
        for k in fitting:
            if used + len(ids[k]) + 1 > chunk_size:
                found.append([])
                used = 0
            found[-1].append(k)
            used += len(ids[k]) + 1
        return found

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)
