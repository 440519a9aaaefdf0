"""Samples of a Megatron set as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from nxd_jax.training.data.megatron.index_maps import Maps
from nxd_jax.training.data.megatron.indexed import IndexedSet

COLUMNS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
"""In the order in which a model takes them."""

_PADDING = -1


@dataclass(frozen=True)
class Rules:
    """How samples are made.

    seq_length: tokens. eod: the id that ends a document, None if none does. reset_position_ids: positions begin at 0 again behind it. eod_mask_loss: no loss
    where it is the input. extra: 1 if a sample is read with one token more for its last label, 0 if the last label has no loss
    (`data.no_seqlen_plus_one_input_tokens`). vocab_size: ids are below it (None: not checked).

    Raises ValueError for the two options without an eod.
    """

    seq_length: int
    eod: int | None = None
    reset_position_ids: bool = False
    eod_mask_loss: bool = False
    extra: int = 1
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        for key in ("reset_position_ids", "eod_mask_loss"):
            if getattr(self, key) and self.eod is None:
                raise ValueError(f"data.{key}: True needs a tokenizer with an end of text, and data.tokenizer has none")

    def tensors(self, ids: np.ndarray, ignored: bool = False) -> dict[str, torch.Tensor]:
        """`COLUMNS` of one sample. ids: int64, at most seq_length + extra of them; where they are fewer, tokens and labels are 0 without loss. ignored: no
        loss anywhere.

        tokens, labels, position_ids: int64 [seq_length]; loss_mask: float32 [seq_length]; attention_mask: bool [1], which stands for causal attention.
        """
        whole = np.full(self.seq_length + 1, _PADDING, np.int64)
        whole[: len(ids)] = ids
        tokens, labels = whole[:-1].copy(), whole[1:].copy()
        loss_mask = np.where((labels == _PADDING) | ignored, np.float32(0), np.float32(1))
        places = np.arange(self.seq_length)
        positions = places
        if self.eod is not None and (self.eod_mask_loss or self.reset_position_ids):
            ends = tokens == self.eod
            if self.eod_mask_loss:
                loss_mask[ends] = 0
            if self.reset_position_ids:
                begins = np.concatenate([[0], np.maximum.accumulate(np.where(ends, places + 1, 0))[:-1]])
                positions = places - begins
        tokens[tokens == _PADDING] = 0
        labels[labels == _PADDING] = 0
        mask = np.ones(1, bool)
        return {name: torch.from_numpy(values) for name, values in zip(COLUMNS, (tokens, labels, loss_mask, mask, positions), strict=True)}


class GPTSamples(Dataset[dict[str, torch.Tensor]]):
    """`GPTDataset`: the samples that index maps say. Number -1 is the last sample without any loss; samplers fill batches with it.

    Raises ValueError for a set that holds no whole numbers, and, where a sample is read, for an id that the vocabulary does not have.
    """

    def __init__(self, indexed: IndexedSet, maps: Maps, rules: Rules):
        if not np.issubdtype(indexed.dtype, np.integer):
            raise ValueError(f"{indexed.prefix} holds {indexed.dtype.name} numbers, and token ids are whole numbers")
        self.indexed = indexed
        self.maps = maps
        self.rules = rules

    @property
    def source(self) -> str:
        """As errors name it."""
        return self.indexed.prefix

    def __len__(self) -> int:
        return len(self.maps.shuffle)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return self.rules.tensors(self.ids(number), ignored=number == -1)

    def ids(self, number: int) -> np.ndarray:
        """The tokens that a sample is made of, int64, in the order of the text. Raises IndexError for a sample that is not there."""
        if not -1 <= number < len(self):
            raise IndexError(f"{self.source} has {len(self)} samples, and no number {number}")
        row = int(self.maps.shuffle[number])
        (first, offset), (last, end) = self.maps.samples[row].tolist(), self.maps.samples[row + 1].tolist()
        end += self.rules.extra
        parts = []
        for place in range(first, last + 1):
            document = int(self.maps.documents[place])
            begin = offset if place == first else 0
            length = end - begin if place == last else None
            part = self.indexed.get(document, begin, length)
            self._check(part, document, begin)
            parts.append(part)
        return np.concatenate(parts).astype(np.int64)

    def _check(self, ids: np.ndarray, document: int, begin: int) -> None:
        limit = self.rules.vocab_size
        if not len(ids) or limit is None or (ids.min() >= 0 and ids.max() < limit):
            return
        place = int(np.flatnonzero((ids < 0) | (ids >= limit))[0])
        raise ValueError(
            f"{self.source}: token {begin + place} of document {document} is {ids[place]}, and ids are 0 to {limit - 1} with the vocabulary of data.tokenizer: "
            "the set was made with another tokenizer"
        )
