"""The sets of a configuration for training, validation and test."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nxd_jax.training.data.megatron import map_files, prefixes
from nxd_jax.training.data.megatron.blending import Blend
from nxd_jax.training.data.megatron.index_maps import Wanted
from nxd_jax.training.data.megatron.indexed import IndexedSet
from nxd_jax.training.data.megatron.prefixes import Parts
from nxd_jax.training.data.megatron.samples import GPTSamples, Rules
from nxd_jax.training.data.megatron.splits import split

logger = logging.getLogger("nxd_jax")

USES = ("train", "valid", "test")
KEYS = dict(zip(USES, prefixes.USES, strict=True))


@dataclass
class Source:
    """What `data` says of Megatron sets.

    data_prefix, splits_string, index_mapping_dir: as they are there. rules: how samples are made. drop_last: by use; True if it is not in there. seed: of the
    shuffles.
    """

    data_prefix: Any
    splits_string: str | None
    rules: Rules
    seed: int
    index_mapping_dir: str | None = None
    drop_last: Mapping[str, bool] = field(default_factory=dict)
    _opened: dict[str, IndexedSet] = field(default_factory=dict)

    def open(self, needed: Mapping[str, int | None]) -> dict[str, Any]:
        """A set for each use in `needed` ("train", "valid", "test"), with so many samples at least (None: with those of one pass); None for one that has no
        documents.

        Raises FileNotFoundError and ValueError for files that are not there or damaged, keys that say nothing, and sets without tokens.
        """
        own = prefixes.by_use(self.data_prefix)
        if own is None:
            if self.splits_string is None:
                raise ValueError(
                    "data.splits_string is missing: it says which documents are for training, validation and test, such as 980,10,10"
                )
            parts = prefixes.parse(self.data_prefix)
            return {use: self._together(use, parts, count, whole=False) for use, count in needed.items()}
        if self.splits_string is not None:
            logger.warning("data.splits_string=%s is ignored: data.data_prefix names a set for each use", self.splits_string)
        return {use: self._together(use, own[use], count, whole=True) if use in own else None for use, count in needed.items()}

    def _together(self, use: str, parts: Parts, count: int | None, whole: bool) -> Any:
        """One set, or several that are blended. whole: all documents are for this use."""
        counts = parts.samples(1 if count is None else count)
        made = [self._one(prefix, use, n, whole) for prefix, n in zip(parts.prefixes, counts, strict=True)]
        if parts.weights is None:
            return made[0]
        there = [k for k, one in enumerate(made) if one is not None]
        missing = ", ".join(
            prefix for prefix, weight, one in zip(parts.prefixes, parts.weights, made, strict=True) if one is None and weight
        )
        if missing:
            if use == "train":
                raise ValueError(
                    f"data.splits_string={self.splits_string} leaves no documents for training in {missing}, which data.data_prefix gives a weight"
                )
            logger.warning(
                "there is nothing for %s in %s (data.splits_string=%s): it is left out there", KEYS[use], missing, self.splits_string
            )
        if not there:
            return None
        size = count if whole or count is None else sum(counts[k] for k in there)
        return Blend([made[k] for k in there], [parts.weights[k] for k in there], size)

    def _one(self, prefix: str, use: str, count: int, whole: bool) -> GPTSamples | None:
        indexed = self._opened.get(prefix) or self._opened.setdefault(prefix, IndexedSet(prefix))
        if whole:
            first, last = 0, len(indexed)
        else:
            bounds = split(str(self.splits_string), len(indexed))
            first, last = bounds[USES.index(use)], bounds[USES.index(use) + 1]
        if last <= first:
            return None
        try:
            wanted = Wanted(
                indexed.sizes,
                first,
                last,
                count,
                self.rules.seq_length,
                self.seed,
                self.rules.extra,
                drop_last=self.drop_last.get(use, True),
            )
        except ValueError as error:
            raise ValueError(f"{prefix} for {KEYS[use]}: {error}") from error
        maps = map_files.load_or_build(prefix, use, wanted, self.index_mapping_dir)
        made = GPTSamples(indexed, maps, self.rules)
        logger.info("%s for %s: %d samples of documents %d to %d, %d epochs", prefix, KEYS[use], len(made), first, last - 1, wanted.epochs)
        return made
