"""`neuronx_distributed_training.lightning_modules.data.datasets.PaddedDataset`: tokenized rows, each filled to one length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from nxd_jax.training.lightning_modules.data.utils import convert_dict_to_list, pad_token_list, pad_token_tensor

__all__ = ["PaddedDPODataset", "PaddedDataset"]


class PaddedDataset(Dataset[dict[str, list[int]]]):
    """Rows of pad_size tokens. dataset: columns input_ids, attention_mask and labels, lists of ids. pad_id_map: what fills each column.

    Raises ValueError for a longer row. (The original fills it to a multiple of pad_size, and one of exactly pad_size to two.)
    """

    def __init__(self, dataset: Any, pad_id_map: Mapping[str, int], pad_size: int = 4096):
        self.dataset = dataset
        self.pad_size = pad_size
        self.pad_id_map = pad_id_map
        self.samples = self.pad_datasets(dataset, pad_size, pad_id_map)

    def pad_datasets(self, data: Any, pad_size: int, pad_id_map: Mapping[str, int]) -> list[dict[str, list[int]]]:
        """The filled rows, each with the three columns."""
        columns = {name: list(data[name]) for name in ("input_ids", "attention_mask", "labels")}
        for k, ids in enumerate(columns["input_ids"]):
            if len(ids) > pad_size:
                raise ValueError(f"row {k} has {len(ids)} tokens, and pad_size is {pad_size}: cut it before, or give a larger pad_size")
        return convert_dict_to_list({name: pad_token_list(values, pad_size, pad_id_map[name]) for name, values in columns.items()})

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)


class PaddedDPODataset(Dataset[dict[str, Any]]):
    """Rows of preferences: columns that end in _input_ids, _attention_mask or _labels become int64 [pad_size], those of the prompt filled on the left, others
    on the right, with 0, 0 and -100. Other columns stay as they are. (The original loses them.)

    Raises ValueError for a longer row.
    """

    pad_token_id: int = 0
    label_pad_token_id: int = -100

    def __init__(self, dataset: Sequence[Mapping[str, Any]], pad_size: int = 4096):
        self.dataset = dataset
        self.pad_size = pad_size
        self.samples = self.pad_datasets(dataset, pad_size)

    def pad_datasets(self, data: Sequence[Mapping[str, Any]], pad_size: int) -> list[dict[str, Any]]:
        """The filled rows."""
        rows = [dict(row) for row in data]
        for name in rows[0] if rows else ():
            if (fill := self._fill(name)) is None:
                continue
            side = "left" if name.startswith("prompt_") else "right"
            tensors = [torch.tensor(row[name], dtype=torch.int64) for row in rows]
            for row, values in zip(rows, pad_token_tensor(tensors, pad_size, fill, side), strict=True):
                row[name] = values
        return rows

    def _fill(self, name: str) -> int | None:
        """What a column is filled with; None: it is not."""
        if name.endswith("_labels"):
            return self.label_pad_token_id
        if name.endswith("_input_ids"):
            return self.pad_token_id
        return 0 if name.endswith("_attention_mask") else None

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)
