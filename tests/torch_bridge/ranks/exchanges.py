"""Collectives in plain Python, on one CPU tensor for each rank: the reference for those of the graph."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

Values = list[torch.Tensor]
Groups = Sequence[Sequence[int]]

_FOLDS = {
    "sum": lambda a, b: a | b if a.dtype == torch.bool else a + b,
    "mul": lambda a, b: a & b if a.dtype == torch.bool else a * b,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
}


def members(groups: Groups, rank: int) -> list[int]:
    return list(next(g for g in groups if rank in g))


def _each(values: Values, groups: Groups, of: object) -> Values:
    return [of(members(groups, r), members(groups, r).index(r)) for r in range(len(values))]  # type: ignore[operator]


def all_reduce(kind: str, values: Values, groups: Groups) -> Values:
    return _each(values, groups, lambda group, place: functools.reduce(_FOLDS[kind], [values[m] for m in group]))


def all_gather(values: Values, groups: Groups, dim: int) -> Values:
    return _each(values, groups, lambda group, place: torch.cat([values[m] for m in group], dim))


def reduce_scatter(kind: str, values: Values, groups: Groups, dim: int) -> Values:
    reduced = all_reduce(kind, values, groups)
    return _each(values, groups, lambda group, place: reduced[group[0]].chunk(len(group), dim)[place])


def all_to_all(values: Values, groups: Groups, split: int, concat: int) -> Values:
    return _each(values, groups, lambda group, place: torch.cat([values[m].chunk(len(group), split)[place] for m in group], concat))


def broadcast(values: Values, groups: Groups, place: int) -> Values:
    return _each(values, groups, lambda group, at: values[group[place]])


def permute(values: Values, pairs: Sequence[Sequence[int]]) -> Values:
    source = {b: a for a, b in pairs}
    return [values[source[r]] if r in source else torch.zeros_like(values[r]) for r in range(len(values))]
