"""What `data.data_prefix` says: which sets, and how many samples of each."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEY = "data.data_prefix"
HOW = f"{KEY} is [PREFIX], [WEIGHT, PREFIX, WEIGHT, PREFIX, ...], or a dict of such lists with the keys train, validation and test"
USES = {"train": "train", "validation": "valid", "test": "test"}
"""Keys of a dict, and the names of index maps."""


@dataclass(frozen=True)
class Parts:
    """Sets that are read together. prefixes: their names without .bin and .idx. weights: shares that sum to 1, None for one set that is not blended."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    def samples(self, count: int) -> list[int]:
        """How many of each set are asked for, if so many are needed: half a percent more of each, as blending does not share them out evenly."""
        return [count] if self.weights is None else [math.ceil(count * weight * 1.005) for weight in self.weights]


def parse(said: Any, key: str = KEY) -> Parts:
    """A list of weights and prefixes, a list of one prefix, or a prefix. `~` and `$VARIABLES` are filled in. Raises ValueError for anything else."""
    words = [said] if isinstance(said, (str, os.PathLike)) else said
    if not isinstance(words, Sequence) or not words:
        raise ValueError(f"{key}: {said!r} names no sets. {HOW}")
    if len(words) == 1:
        return Parts((_prefix(words[0], key),))
    if len(words) % 2:
        raise ValueError(f"{key}: {list(words)} has {len(words)} members, and every prefix needs a weight before it. {HOW}")
    weights = [_weight(word, key) for word in words[::2]]
    total = sum(weights)
    if total <= 0:
        raise ValueError(f"{key}: the weights {weights} sum to {total}; at least one must be above 0")
    return Parts(tuple(_prefix(word, key) for word in words[1::2]), tuple(weight / total for weight in weights))


def by_use(said: Any) -> dict[str, Parts] | None:
    """The sets of a dict, by the names of index maps; None for a list, whose sets are split. Raises ValueError for other keys, and without train."""
    if not isinstance(said, Mapping):
        return None
    strange = sorted(set(map(str, said)) - set(USES))
    if strange or said.get("train") is None:
        raise ValueError(
            f"{KEY} has the keys {', '.join(map(str, said)) or '(none)'}: they must be train, and validation and test where they are used. {HOW}"
        )
    return {USES[key]: parse(value, f"{KEY}.{key}") for key, value in said.items() if value is not None}


def _weight(word: Any, key: str) -> float:
    try:
        found = float(word)
    except (TypeError, ValueError):
        found = -1.0
    if not 0 <= found < math.inf:
        raise ValueError(f"{key}: {word!r} stands where a weight must be, a number of at least 0. {HOW}")
    return found


def _prefix(word: Any, key: str) -> str:
    if not isinstance(word, (str, os.PathLike)):
        raise ValueError(f"{key}: {word!r} stands where a prefix must be, a path without .bin and .idx. {HOW}")
    return os.path.expandvars(os.path.expanduser(os.fspath(word).strip()))
