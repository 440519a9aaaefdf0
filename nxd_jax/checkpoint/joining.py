"""Full tensors out of what tensor-parallel ranks of some earlier run held, one at a time. No ranks of now are needed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from nxd_jax.tensor_parallel.full_weights import Shares


class Held(NamedTuple):
    """A tensor that one rank held; `read` gives its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


Parts = Mapping[str, Sequence[Held]]
"""By name what each tensor-parallel rank held, in order."""


@dataclasses.dataclass(frozen=True)
class Need:
    """A full tensor that is wanted. dim: along which ranks share it out (None: each has all of it). stride: tensors fused along `dim`, each shared out by
    itself. order: which part tensor-parallel rank k holds, if not part k. experts: whether dim 0 is known to count experts that expert-parallel ranks share
    out; held: which each of them has, if not equal runs."""

    shape: tuple[int, ...]
    dim: int | None = None
    stride: int = 1
    order: tuple[int, ...] | None = None
    experts: bool = False
    held: tuple[tuple[int, ...], ...] | None = None

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape in which a checkpoint stores it: fused tensors along a dim of their own."""
        if self.stride == 1 or self.dim is None:
            return self.shape or (1,)
        return (*self.shape[: self.dim], self.stride, self.shape[self.dim] // self.stride, *self.shape[self.dim + 1 :])


def fused_name(key: str) -> tuple[str, int] | None:
    """For `..._q`, `..._k` or `..._v`: the name of the tensor in which all three are fused, and which one this is."""
    stem, _, letter = key.rpartition("_")
    return (f"{stem}_qkv", "qkv".index(letter)) if letter in ("q", "k", "v") and stem.rpartition(".")[2] in ("weight", "bias") else None


def separate_names(name: str) -> list[str]:
    """For the name of a fused tensor: those of q, k and v."""
    return [f"{name.removesuffix('_qkv')}_{letter}" for letter in "qkv"]


def is_there(parts: Parts, key: str) -> bool:
    """Whether a tensor can be had: by itself, or as part of a fused one."""
    fused = fused_name(key)
    return key in parts or (fused is not None and fused[0] in parts)


def source_of(parts: Parts, key: str) -> str:
    """The name under which a tensor is there."""
    fused = fused_name(key)
    return key if key in parts or fused is None else fused[0]


@dataclasses.dataclass(frozen=True)
class Joint:
    """How to make one full tensor. start, rows: which rows of what each rank held (rows None: all). count: different parts; 1: each rank has all of it."""

    key: str
    held: tuple[Held, ...]
    need: Need
    count: int
    start: int = 0
    rows: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.held[0].dtype

    def read(self) -> torch.Tensor:
        """The full tensor. Raises ValueError if ranks that should hold copies do not."""
        if self.count == 1:
            return self._part(0).reshape(self.need.shape)
        assert self.need.dim is not None
        index = self._index()
        kept = {part: rank for rank, part in reversed(index.items())}
        shares = Shares(self.need.dim, self.need.stride, self.count, {rank: part for part, rank in kept.items()})
        return shares.join({rank: self._part(rank) for rank in shares.index})

    def _part(self, rank: int) -> torch.Tensor:
        found = self.held[rank].read()
        return found if self.rows is None else found.narrow(0, self.start, self.rows)

    def _index(self) -> dict[int, int]:
        """For each tensor-parallel rank: which part it held."""
        tp = len(self.held)
        if self.need.order is not None:
            return dict(enumerate(self.need.order))
        copies = tp // self.count
        if copies == 1:
            return {r: r for r in range(tp)}
        if self._same(range(0, tp, self.count)):
            return {r: r % self.count for r in range(tp)}
        if self._same(range(copies)):
            return {r: r // copies for r in range(tp)}
        raise ValueError(
            f"{self.key}: {tp} ranks hold {self.count} different parts, but neither every {self.count}th nor {copies} neighbours hold the same one"
        )

    def _same(self, ranks: Sequence[int]) -> bool:
        first = self._part(ranks[0])
        return all(torch.equal(first, self._part(r)) for r in ranks[1:])


def joint(parts: Parts, key: str, needs: Mapping[str, Need], prefix: str = "") -> Joint:
    """How to make a full tensor `prefix + key`. Raises ValueError if what ranks held does not fit."""
    need, name = needs[key], prefix + key
    source = source_of(parts, name)
    held = tuple(parts[source])
    local = held[0].shape
    if any(h.shape != local for h in held):
        raise ValueError(f"{source} has different shapes on tensor-parallel ranks: {sorted({h.shape for h in held})}")
    if source == name:
        return Joint(name, held, need, _count(name, local, len(held), need))
    fused = fused_name(key)
    assert fused is not None
    start, rows = _rows(source, local[0], len(held), [needs[k].shape[0] for k in separate_names(fused[0])])[fused[1]]
    return Joint(name, held, need, _count(name, (rows, *local[1:]), len(held), need), start, rows)


def _rows(source: str, local: int, tp: int, full: Sequence[int]) -> list[tuple[int, int]]:
    """First row and rows of q, k and v in what a rank held of all three: q is shared out, K and V are held by one rank or more each."""
    q, k, v = full
    left = local - q // tp
    kv = left // 2
    if q % tp or k != v or left <= 0 or left % 2 or kv * tp % k:
        raise ValueError(f"{source} has {local} rows on each of {tp} ranks, which cannot hold {q} rows of q and {k} of k and v each")
    return [(0, q // tp), (q // tp, kv), (q // tp + kv, kv)]


def _count(name: str, local: Sequence[int], tp: int, need: Need) -> int:
    """How many different parts ranks hold."""
    full = need.shape
    if tuple(local) == full or (not need.shape and tuple(local) == (1,)) or (full == (1,) and not local):
        return 1
    dim = need.dim
    fits = dim is not None and len(local) == len(full) and all(a == b for d, (a, b) in enumerate(zip(local, full, strict=True)) if d != dim)
    if not fits or dim is None or local[dim] == 0 or full[dim] % local[dim] or tp % (full[dim] // local[dim]):
        said = (
            f" (it is of {local[0]} experts, and {full[0]} are needed)" if need.experts and local and local[0] != full[0] else _along(dim)
        )
        raise ValueError(f"{name} has shape {list(local)} on each of {tp} ranks in the checkpoint, {list(full)} is needed{said}")
    if need.order is not None and len(need.order) != tp:
        raise ValueError(
            f"{name} is shared out in an order of its own (rank_ordering) among {len(need.order)} ranks, the checkpoint is of {tp}"
        )
    return full[dim] // local[dim]


def _along(dim: int | None) -> str:
    return "" if dim is None else f" (shared out along dim {dim})"


# -- without a model ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Split:
    """How ranks share a tensor out. dim: that tensor-parallel ranks cut; None: each has all of it. stride: as in `Need`. copies: ranks that hold each part.
    experts: whether expert-parallel ranks share out dim 0."""

    dim: int | None
    stride: int = 1
    copies: int = 1
    experts: bool = False

    def need(self, local: Sequence[int], tp: int) -> Need:
        """The full tensor, given what one of `tp` ranks held (of all experts)."""
        if self.dim is None:
            return Need(tuple(local), experts=self.experts)
        shape = tuple(n * tp // self.copies if d == self.dim else n for d, n in enumerate(local))
        return Need(shape, self.dim, self.stride, experts=self.experts)

    def own_experts(self, full: torch.Tensor, rank: int, ep: int) -> torch.Tensor:
        """What an expert-parallel rank holds of a full tensor. Raises ValueError if experts do not divide."""
        if not self.experts or ep == 1:
            return full
        if not full.dim() or full.shape[0] % ep:
            raise ValueError(f"dim 0 of shape {list(full.shape)}, the experts, does not divide by {ep} expert-parallel ranks")
        return full.chunk(ep)[rank]

    def part(self, full: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
        """What a tensor-parallel rank holds of a full tensor. Copies go round the ranks, as on trn1. Raises ValueError if it does not divide."""
        if self.dim is None or tp == 1:
            return full
        count = tp // self.copies
        if tp % self.copies or full.shape[self.dim] % (count * self.stride):
            raise ValueError(
                f"dim {self.dim} of shape {list(full.shape)} does not divide by {count} ranks"
                + (f" x {self.stride}" if self.stride > 1 else "")
            )
        return Shares(self.dim, self.stride, count, {r: r % count for r in range(tp)}).part(full, rank)


Rules = Sequence[tuple[re.Pattern[str], Split]]
"""How tensors are shared out, by patterns of whole names; the first that fits counts."""


def rule_for(name: str, rules: Rules) -> Split | None:
    """The rule for a tensor."""
    return next((split for pattern, split in rules if pattern.fullmatch(name)), None)


def parse_rules(texts: Iterable[str]) -> Rules:
    """Rules such as `.*down_proj.weight=1` (along dim 1), `.*gate_up.*=0x2` (two fused along dim 0), `.*norm.*=none`; of experts, which expert-parallel ranks
    share out along dim 0, `.*mlp_op.down_proj.weight=experts+1` and, if tensor-parallel ranks all have the same, `.*bias=experts`. Raises ValueError."""
    found = []
    for text in texts:
        pattern, equals, how = text.rpartition("=")
        match = re.fullmatch(r"(?P<none>none|experts)|(?P<experts>experts\+)?(?P<dim>\d+)(x(?P<stride>\d+))?", how)
        if not equals or not match:
            raise ValueError(
                "a rule is NAMES=DIM, NAMES=DIMxFUSED or NAMES=none (of experts NAMES=experts, NAMES=experts+DIM or NAMES=experts+DIMxFUSED), with a regular "
                f"expression for whole names, got {text!r}"
            )
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} in the rule {text!r} is no regular expression: {error}") from None
        dim, experts = None if match["none"] else int(match["dim"]), bool(match["experts"]) or match["none"] == "experts"
        found.append((compiled, Split(dim, int(match["stride"] or 1), experts=experts)))
    return found
