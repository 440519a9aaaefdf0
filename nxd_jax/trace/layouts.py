"""What ranks hold of a full tensor that they share out in pieces (`aot.facts.Cut`), for any number of ranks, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from nxd_jax.tensor_parallel import head_plans
from torch_bridge.aot.facts import Cut, Heads, Piece


def parts_of(full: torch.Tensor, cut: Cut, parts: int, dim: int) -> list[torch.Tensor]:
    """All parts of a full tensor with the pieces of a cut below each other along `dim`, as tensors of their own."""
    pieces = full.split([piece.size for piece in cut.pieces], dim)
    chunks = [arranged(own, piece, parts, dim).chunk(parts, dim) for own, piece in zip(pieces, cut.pieces, strict=True)]
    return [torch.cat(own, dim) for own in zip(*chunks, strict=True)]


def joined(held: Sequence[torch.Tensor], cut: Cut, dim: int) -> torch.Tensor:
    """The full tensor of all parts, in order."""
    sizes = [size_of_part(piece, len(held)) for piece in cut.pieces]
    by_piece = zip(*(own.split(sizes, dim) for own in held), strict=True)
    return torch.cat([_restored(torch.cat(own, dim), piece, len(held), dim) for own, piece in zip(by_piece, cut.pieces, strict=True)], dim)


def size_of_cut(cut: Cut, parts: int) -> int:
    """Entries of one of so many parts; 0 if there cannot be so many."""
    sizes = [size_of_part(piece, parts) for piece in cut.pieces]
    return 0 if 0 in sizes else sum(sizes)


def size_of_part(piece: Piece, parts: int) -> int:
    """Entries of a piece in one of so many parts; 0 if there cannot be so many."""
    if piece.heads is not None:
        return len(places_of(piece.heads, parts)) // parts * (piece.size // count_of(piece.heads))
    step = parts * (piece.multiple or 1)
    return 0 if not piece.multiple and piece.size % parts else math.ceil(piece.size / step) * step // parts


def places_of(heads: Heads, parts: int) -> head_plans.Places:
    """Which of the model's heads are where."""
    plan = head_plans.plan(heads.query, heads.kv, parts, head_plans.GQA(heads.strategy) if heads.strategy else None)
    return plan.kv if heads.of_kv else plan.query


def count_of(heads: Heads) -> int:
    """How many there are in the model."""
    return heads.kv if heads.of_kv else heads.query


def arranged(full: torch.Tensor, piece: Piece, parts: int, dim: int) -> torch.Tensor:
    """A full piece with the copies and the filling that so many parts have."""
    if piece.heads is not None:
        return head_plans.arranged(full, places_of(piece.heads, parts), count_of(piece.heads), dim)
    missing = size_of_part(piece, parts) * parts - piece.size
    if not missing:
        return full
    more = full.new_full([missing if d == dim else n for d, n in enumerate(full.shape)], piece.fill)
    return torch.cat([full, more], dim)


def _restored(held: torch.Tensor, piece: Piece, parts: int, dim: int) -> torch.Tensor:
    """The full piece of what `arranged` gives."""
    if piece.heads is None:
        return held.narrow(dim, 0, piece.size)
    places = places_of(piece.heads, parts)
    first = torch.tensor([places.index(head) for head in range(count_of(piece.heads))])
    return held.unflatten(dim, (len(places), -1)).index_select(dim, first).flatten(dim, dim + 1)
