"""Weights that were cut for another number of ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from nxd_jax.trace import layouts
from torch_bridge.aot.facts import Cut, Held

Index = tuple[int, ...]
"""A part along each of a weight's cuts."""


def suited(
    given: Sequence[Mapping[str, torch.Tensor]], weights: Mapping[str, Held], ranks: int, here: range
) -> Sequence[Mapping[str, torch.Tensor]]:
    """The weights of the ranks `here` of `ranks`: those given if they are of so many ranks, else what `resharded` makes of those of another number.

    So many weights of other shapes may be those of other sizes (tp 4 for tp 2 with ep 2); if they are not, they come back for the model to say what it needs.
    """
    if len(given) != len(here):
        return [own for rank, own in enumerate(resharded(given, weights, ranks)) if rank in here]
    shapes = {name: of.shape for name, of in weights.items() if of.cuts}
    if all(tuple(state[name].shape) == shape for state in given for name, shape in shapes.items() if name in state):
        return given
    try:
        return [own for rank, own in enumerate(resharded(given, weights, ranks)) if rank in here]
    except ValueError:
        return given


def resharded(given: Sequence[Mapping[str, torch.Tensor]], weights: Mapping[str, Held], ranks: int) -> list[dict[str, torch.Tensor]]:
    """The weights of `ranks` ranks from those of another number, joined and cut again. Names that no weight has are left out.

    What ranks fill up their parts with, copies of K/V heads and the ranks' own numbers are those of the new number. Ranks that hold the same part get the same
    tensor. Raises ValueError for a weight of which it is not known how ranks share it out, or whose parts do not make up its full shape.
    """
    found: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]
    for name, of in weights.items():
        parts = [state[name] for state in given if name in state]
        if not parts:
            continue
        if not of.cuts:
            if any(tuple(p.shape) != of.shape for p in parts) or not all(_same(p, parts[0]) for p in parts):
                raise ValueError(
                    f"the weights are of {len(given)} ranks, the model has {ranks}, and {name} is no plain cut of {of} that all have: shard the full checkpoint"
                )
            for state in found:
                state[name] = parts[0]
            continue
        own = _numbers(of) if of.cuts[0].numbers else _cut_again(_joined(name, _of_all(name, parts, given), of), of)
        for state, value in zip(found, own, strict=True):
            state[name] = value
    return found


def _of_all(name: str, parts: list[torch.Tensor], given: Sequence[object]) -> list[torch.Tensor]:
    if len(parts) != len(given) or any(p.shape != parts[0].shape or p.dtype != parts[0].dtype for p in parts):
        raise ValueError(
            f"{name}: of {len(given)} ranks {len(parts)} have a part, of shapes {', '.join(dict.fromkeys(str(list(p.shape)) for p in parts))}: all must have "
            "one of the same shape and dtype; shard the full checkpoint again"
        )
    return parts


def _numbers(of: Held) -> list[torch.Tensor]:
    return [torch.tensor([number], dtype=of.dtype) for number in of.cuts[0].index]


def _cut_again(full: torch.Tensor, of: Held) -> list[torch.Tensor]:
    """What each rank of the model holds."""
    made = _parts(full, of.cuts, [cut.parts for cut in of.cuts])
    return [made[index] for index in zip(*(cut.index for cut in of.cuts), strict=True)]


def _parts(full: torch.Tensor, cuts: Sequence[Cut], parts: Sequence[int]) -> dict[Index, torch.Tensor]:
    """All parts along all cuts."""
    if not cuts:
        return {(): full}
    own = enumerate(layouts.parts_of(full, cuts[0], parts[0], cuts[0].dim))
    return {(k, *index): t for k, part in own for index, t in _parts(part, cuts[1:], parts[1:]).items()}


def _joined(name: str, given: list[torch.Tensor], of: Held) -> torch.Tensor:
    """The full tensor of the parts of another number of ranks: the one of which they are parts again."""
    fits = False
    for parts in _numbers_of_parts(tuple(given[0].shape), of, len(given)):
        for indices in _orders(parts, len(given)):
            fits = True
            full = _whole(dict(zip(reversed(indices), reversed(given), strict=True)), of.cuts, parts)
            again = _parts(full, of.cuts, parts)
            if all(_same(again[index], own) for index, own in zip(indices, given, strict=True)):
                return full
    if fits:
        raise ValueError(
            f"{name}: what {len(given)} ranks hold are not the parts, and copies of parts, that the model's ranks would hold if they were so many: shard the "
            "full checkpoint again"
        )
    sizes = " and ".join(f"{sum(piece.size for piece in cut.pieces)} entries along dim {cut.dim}" for cut in of.cuts)
    raise ValueError(
        f"{name}: {len(given)} parts of shape {list(given[0].shape)} do not make up a tensor with {sizes}, which the model's ranks share: shard the full "
        "checkpoint again"
    )


def _numbers_of_parts(shape: tuple[int, ...], of: Held, ranks: int) -> Iterator[Index]:
    """How many parts there may be along each cut, such that a part has this shape."""
    known = {cut.dim: k for k, cut in enumerate(of.cuts)}
    if len(shape) != len(of.shape) or any(n != of.shape[d] for d, n in enumerate(shape) if d not in known):
        return
    divisors = [n for n in range(ranks, 0, -1) if ranks % n == 0]
    for parts in itertools.product(divisors, repeat=len(of.cuts)):
        if ranks % math.prod(parts) == 0 and all(
            layouts.size_of_cut(cut, n) == shape[cut.dim] for cut, n in zip(of.cuts, parts, strict=True)
        ):
            yield parts


def _orders(parts: Index, ranks: int) -> Iterator[list[Index]]:
    """Which parts ranks may hold: those of the first cut go round fastest; copies of a part go round with all parts, or lie side by side."""
    for step in dict.fromkeys((1, ranks // math.prod(parts))):
        found = []
        for rank in range(ranks):
            place, index = rank // step, []
            for count in parts:
                index.append(place % count)
                place //= count
            found.append(tuple(index))
        yield found


def _whole(held: Mapping[Index, torch.Tensor], cuts: Sequence[Cut], parts: Index) -> torch.Tensor:
    """The full tensor of parts along all cuts."""
    if not cuts:
        return held[()]
    cut = cuts[0]
    of_each = [_whole({index[1:]: t for index, t in held.items() if index[0] == k}, cuts[1:], parts[1:]) for k in range(parts[0])]
    return layouts.joined(of_each, cut, cut.dim)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits."""
    if a is b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bits(a), _bits(b))


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8) if t.is_floating_point() and t.dim() else t
