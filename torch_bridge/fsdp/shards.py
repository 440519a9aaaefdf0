"""One tensor that a unit shares out: a parameter, or several that lie one after the other in one vector (`flatten_parameters=True`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from torch_bridge.fsdp import naming
from torch_bridge.fsdp.shard_layout import ShardLayout


class Place(NamedTuple):
    """Where a module finds a parameter."""

    module: nn.Module
    name: str


class Piece(NamedTuple):
    """A parameter of the wrapped module. path: its first name in it; others: further names (tied parameters); places: all of them; stand_in:
    what they hold while the parameter is not gathered, a tensor on the meta device."""

    path: str
    others: tuple[str, ...]
    size: torch.Size
    places: tuple[Place, ...]
    stand_in: torch.Tensor


class Shared:
    """A tensor that is shared out. shard: this rank's part, a parameter of the wrapper; pieces: what it consists of; original: torch_xla's name of it;
    unsent: full gradients of backward passes under `no_sync`, None if there are none."""

    def __init__(self, full: torch.Tensor, layout: ShardLayout, pieces: Sequence[Piece], original: str, requires_grad: bool):
        with torch.no_grad():
            self.shard = nn.Parameter(layout.cut(full.detach()), requires_grad=requires_grad)
        self.layout = layout
        self.pieces = tuple(pieces)
        self.original = original
        self.unsent: torch.Tensor | None = None

    @property
    def is_flat(self) -> bool:
        """Whether it is a vector of several parameters."""
        return f"{naming.WRAPPED}.{naming.FLAT}" in self.original

    def split(self, full: torch.Tensor) -> list[torch.Tensor]:
        """The parameters in the full tensor, as views of it."""
        if not self.is_flat:
            return [full]
        parts = full.split([piece.size.numel() for piece in self.pieces])
        return [part.view(piece.size) for part, piece in zip(parts, self.pieces, strict=True)]

    def whole_gradient(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The gradient of the full tensor, from those of its parameters; of one that was not used it is 0."""
        if not self.is_flat:
            assert grads[0] is not None
            return grads[0]
        some = next(g for g in grads if g is not None)
        flat = (some.new_zeros(piece.size.numel()) if g is None else g.reshape(-1) for g, piece in zip(grads, self.pieces, strict=True))
        return torch.cat(list(flat))
