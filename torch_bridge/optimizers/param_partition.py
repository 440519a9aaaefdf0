"""What a tensor is a part of: for optimizers that look at whole tensors while a rank holds a block of one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from torch_bridge.mesh.groups import Groups


@dataclass(frozen=True)
class Cut:
    """A tensor shared out along one dim. groups: the ranks that have it together, as collectives name them; share: 1 / how many ranks hold the same part."""

    dim: int
    groups: str
    share: float = 1.0


@dataclass(frozen=True)
class Divided:
    """shape: of the whole tensor, without padding (of which a part may have rows of zeros). cuts: how it was shared out; none if each rank has all of it."""

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def across(self, dim: int | None = None) -> tuple[Cut, ...]:
        """The cuts that a sum along a dim (None: along all) crosses."""
        return self.cuts if dim is None else tuple(c for c in self.cuts if c.dim == dim % len(self.shape))

    def cut(self, dim: int, among: Groups, share: float = 1.0) -> Divided:
        """Shared out once more."""
        return Divided(self.shape, (*self.cuts, Cut(dim % len(self.shape), among.text, share))) if among.size > 1 else self


def mark(t: torch.Tensor, of: Divided) -> None:
    """Say what a tensor is a part of."""
    t._divided = of  # type: ignore[attr-defined]


def of(t: torch.Tensor) -> Divided:
    """What was said with `mark`; without, it is a tensor of its own. A number counts as a vector of length one."""
    return getattr(t, "_divided", None) or Divided(tuple(t.shape) or (1,))


def text(flags: Iterable[str], tensors: Iterable[torch.Tensor]) -> str:
    """Flags, and what tensors are parts of, as an op's argument."""
    wholes = [of(t) for t in tensors]
    return json.dumps([sorted(flags), [[w.shape, [[c.dim, c.groups, c.share] for c in w.cuts]] for w in wholes]])


def parse(options: str) -> tuple[frozenset[str], list[Divided]]:
    """What `text` wrote."""
    found: Any = json.loads(options)
    return frozenset(found[0]), [Divided(tuple(shape), tuple(Cut(*c) for c in cuts)) for shape, cuts in found[1]]
