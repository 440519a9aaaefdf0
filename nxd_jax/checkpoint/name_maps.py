"""How tensors are called in Hugging Face folders, and which of them a layer fuses. `register` adds the map of a model of your own."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from nxd_jax.checkpoint.joining import Rules, parse_rules

Rename = Callable[[str], str | None]


@dataclasses.dataclass(frozen=True)
class Made:
    """A tensor to write: its name, the names of those it is made of, and how (None: it is the only one)."""

    name: str
    sources: tuple[str, ...]
    make: Callable[..., torch.Tensor] | None = None

    def of(self, *values: torch.Tensor) -> torch.Tensor:
        """The tensor, from its sources."""
        return values[0] if self.make is None else self.make(*values)


class NameMap:
    """Between the names of an nxd checkpoint ("ours": q, k and v by themselves as weight_q, weight_k, weight_v; gate and up as one) and those of a folder.

    This one changes nothing; subclasses override `to_hub` and `from_hub`. rules: how tensor-parallel ranks share out tensors, by our names.
    """

    rules: Rules = ()

    def to_hub(self, names: Sequence[str]) -> list[Made]:
        """What a Hugging Face folder is to hold."""
        return [Made(name, (name,)) for name in names]

    def from_hub(self, names: Sequence[str]) -> list[Made]:
        """What a checkpoint of ours is to hold."""
        return [Made(name, (name,)) for name in names]


class Renamed(NameMap):
    """Names changed by a function (None: leave the tensor out), the same for both directions: give the one for the direction that you go."""

    def __init__(self, rename: Rename):
        self._rename = rename

    def to_hub(self, names: Sequence[str]) -> list[Made]:
        found = [(self._rename(name), name) for name in names]
        return _unique([Made(new, (name,)) for new, name in found if new is not None])

    def from_hub(self, names: Sequence[str]) -> list[Made]:
        return self.to_hub(names)


@dataclasses.dataclass(frozen=True)
class Heads:
    """The heads of grouped-query attention. copies: ranks that hold each K/V head; tp: tensor-parallel ranks; neighbours: copies stand side by side (trn2)."""

    query: int
    kv: int
    copies: int = 1
    tp: int = 1
    neighbours: bool = False

    def order(self) -> list[int]:
        """For each place in the ranks' order of query heads: which head of the Hugging Face model stands there. A rank has those that its K/V heads serve."""
        if self.copies == 1:
            return list(range(self.query))
        parts, served = self.tp // self.copies, self.query // self.kv
        if self.tp % self.copies or self.kv % parts or served % self.copies:
            raise ValueError(
                f"{self.query} query heads and {self.kv} K/V heads {self.copies} times do not divide over {self.tp} tensor-parallel ranks"
            )
        held, each = self.kv // parts, served // self.copies
        found: list[int] = []
        for rank in range(self.tp):
            part, copy = (rank // self.copies, rank % self.copies) if self.neighbours else (rank % parts, rank // parts)
            for head in range(part * held, (part + 1) * held):
                first = head * served + copy * each
                found += range(first, first + each)
        return found


class Suffixes(NameMap):
    """By the ends of names, as a table: ours -> those in the folder. Several are fused along dim 0. `rules` as texts (`joining.parse_rules`).

    query, output: ends of our names whose rows (columns) are query heads; with copies of K/V heads their order differs (`Heads.order`).
    """

    def __init__(
        self,
        table: Mapping[str, Sequence[str]],
        rules: Iterable[str] = (),
        query: Sequence[str] = (),
        output: Sequence[str] = (),
        heads: Heads | None = None,
    ):
        self.table = {ours: tuple(theirs) for ours, theirs in table.items()}
        self.rules = parse_rules(rules)
        self.query, self.output, self.heads = tuple(query), tuple(output), heads

    def to_hub(self, names: Sequence[str]) -> list[Made]:
        found = []
        for name in names:
            prefix, ours = self._match(name, self.table)
            theirs = self.table.get(ours, (ours,))
            for k, end in enumerate(theirs):
                found.append(Made(prefix + end, (name,), self._out(name, k, len(theirs))))
        return _unique(found)

    def from_hub(self, names: Sequence[str]) -> list[Made]:
        owner = {end: (ours, theirs) for ours, theirs in self.table.items() for end in theirs}
        there, found = set(names), []
        for name in names:
            prefix, end = self._match(name, owner)
            ours, theirs = owner.get(end, (end, (end,)))
            sources = tuple(prefix + e for e in theirs)
            missing = [s for s in sources if s not in there]
            if missing:
                raise ValueError(f"{name} is there, but not {', '.join(missing)}: {prefix + ours} is made of both")
            if end == theirs[0]:
                found.append(Made(prefix + ours, sources, self._in(prefix + ours, len(theirs))))
        return _unique(found)

    def _match(self, name: str, ends: Iterable[str]) -> tuple[str, str]:
        """What comes before the end that is in a table, and that end (all of it if none is)."""
        for end in ends:
            if name == end or name.endswith("." + end):
                return name[: len(name) - len(end)], end
        return "", name

    def _out(self, name: str, k: int, count: int) -> Callable[..., torch.Tensor] | None:
        moved = self._reorder(name, back=True)
        if count == 1:
            return moved
        return lambda t: t.chunk(count)[k]

    def _in(self, name: str, count: int) -> Callable[..., torch.Tensor] | None:
        return self._reorder(name, back=False) if count == 1 else lambda *several: torch.cat(several)

    def _reorder(self, name: str, back: bool) -> Callable[..., torch.Tensor] | None:
        if self.heads is None or self.heads.copies == 1:
            return None
        dim = 0 if name.endswith(self.query) else 1 if name.endswith(self.output) else None
        if dim is None or not (self.query or self.output):
            return None
        order = self.heads.order()
        order = [order.index(h) for h in range(len(order))] if back else order
        return lambda t: reordered(t, order, dim)


def reordered(t: torch.Tensor, order: Sequence[int], dim: int) -> torch.Tensor:
    """A tensor whose blocks of heads along `dim` come in another order."""
    blocks = t.chunk(len(order), dim)
    return torch.cat([blocks[h] for h in order], dim)


def _unique(made: list[Made]) -> list[Made]:
    seen: dict[str, Made] = {}
    for m in made:
        if m.name in seen:
            raise ValueError(
                f"{m.name} would be made of {', '.join(seen[m.name].sources)} and of {', '.join(m.sources)}: the names must stay different"
            )
        seen[m.name] = m
    return made


# -- maps by name ------------------------------------------------------------------------------------

Factory = Callable[[Heads | None], NameMap]
_MAPS: dict[str, Factory] = {}


def register(name: str, factory: Factory) -> None:
    """Make a map known by a name, for `nxd-ckpt convert --map` and `mapping=`. factory: from the model's heads (None: unknown) to the map.

    Raises ValueError for a name that is taken.
    """
    if name in _MAPS:
        raise ValueError(f"there is a name map {name!r} already")
    _MAPS[name] = factory


def known() -> list[str]:
    """The names of all maps."""
    return sorted(_MAPS)


def resolve(mapping: object, heads: Heads | None = None) -> NameMap:
    """A `NameMap` from what users give: None (names stay), a registered name such as "llama", a dict of regular expressions and what takes their place (None:
    leave those out), a function from name to name or None, or a `NameMap`. Raises ValueError for an unknown name, TypeError for anything else."""
    if mapping is None:
        return NameMap()
    if isinstance(mapping, NameMap):
        return mapping
    if isinstance(mapping, str):
        if mapping not in _MAPS:
            raise ValueError(
                f"there is no name map {mapping!r}, only {', '.join(known())}: give one of these, a dict of regular expressions, or a function"
            )
        return _MAPS[mapping](heads)
    if isinstance(mapping, Mapping):
        return Renamed(_by_patterns(mapping))
    if callable(mapping):
        return Renamed(mapping)
    raise TypeError(f"mapping must be a name, a dict of regular expressions, a function or a NameMap, got {type(mapping).__name__}")


def _by_patterns(patterns: Mapping[str, str | None]) -> Rename:
    compiled = [(re.compile(pattern), new) for pattern, new in patterns.items()]

    def rename(name: str) -> str | None:
        for pattern, new in compiled:
            if new is None and pattern.search(name):
                return None
            name = name if new is None else pattern.sub(new, name)
        return name

    return rename


def heads_of(config: Mapping[str, Any], copies: int = 1, tp: int = 1, neighbours: bool = False) -> Heads | None:
    """The heads that a Hugging Face config.json speaks of."""
    query = config.get("num_attention_heads")
    if not query:
        return None
    return Heads(int(query), int(config.get("num_key_value_heads") or query), copies, tp, neighbours)


def llama(heads: Heads | None = None) -> NameMap:
    """Llama as examples/llama builds it (and NxD's examples do): fused q, k, v in `qkv_proj`, gate and up in `gate_up_proj`."""
    table: dict[str, tuple[str, ...]] = {}
    for kind in ("weight", "bias"):
        for letter in "qkv":
            table[f"self_attn.qkv_proj.{kind}_{letter}"] = (f"self_attn.{letter}_proj.{kind}",)
        table[f"mlp.gate_up_proj.{kind}"] = (f"mlp.gate_proj.{kind}", f"mlp.up_proj.{kind}")
    rules = (
        r".*qkv_proj\.(weight|bias)_[qkv]=0",
        r".*gate_up_proj\.(weight|bias)=0x2",
        r".*\.(o_proj|down_proj)\.weight=1",
        r"(.*\.)?(embed_tokens|lm_head)\.weight=0",
        r".*norm\.weight=none",
        r".*\.(o_proj|down_proj)\.bias=none",
        r".*rotary.*inv_freq=none",
    )
    return Suffixes(table, rules, (".qkv_proj.weight_q", ".qkv_proj.bias_q"), (".o_proj.weight",), heads)


EXPERTS = parse_rules(
    (
        r"(.*\.)?mlp_op(_tkg)?\.gate_up_proj\.weight=experts+2x2",
        r"(.*\.)?mlp_op(_tkg)?\.gate_up_proj\.bias=experts+1x2",
        r"(.*\.)?mlp_op(_tkg)?\.up_proj\.weight=experts+2",
        r"(.*\.)?mlp_op(_tkg)?\.up_proj\.bias=experts+1",
        r"(.*\.)?mlp_op(_tkg)?\.down_proj\.weight=experts+1",
        r"(.*\.)?mlp_op(_tkg)?\.down_proj\.bias=experts",
        r"(.*\.)?router\.(linear_router\.(weight|bias)|weight_T|e_score_correction_bias)=none",
        r"(.*\.)?shared_experts\.(gate_proj|up_proj)\.(weight|bias)=0",
        r"(.*\.)?shared_experts\.gate_up_proj\.(weight|bias)=0x2",
        r"(.*\.)?shared_experts\.down_proj\.weight=1",
        r"(.*\.)?shared_experts\.down_proj\.bias=none",
    )
)
"""How ranks share out what NxD's mixtures of experts (`modules.moe`) consist of, whatever model they are in."""


register("llama", llama)
