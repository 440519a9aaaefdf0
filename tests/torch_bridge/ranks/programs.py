"""Small random programs of views, in-place ops and slices at each rank's own place, run once for all ranks and once for each in eager torch.

A program is a list of (op number, a, b, c), interpreted against a growing pool of tensors with operands modulo what is there, so that every list of
integers is a program. Whatever an op refuses is skipped; it must be refused for all ranks or for none, so sizes decide, never values.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

Instruction = tuple[int, int, int, int]
Pool = list[torch.Tensor]
MAX_POOL = 10
RANKS = 4


def start(device: str) -> Pool:
    """Integers, so that sums and products stay exact."""
    return [torch.arange(40.0).reshape(8, 5).to(device), (torch.arange(24.0) - 9).reshape(4, 6).to(device), torch.ones(4, 4, 2).to(device)]


def _dim(t: torch.Tensor, n: int) -> int:
    return n % t.dim() if t.dim() else 0


def _place(t: torch.Tensor, dim: int) -> int:
    """Elements that every rank can have of a dim to itself; 0 if there are too few."""
    return t.shape[dim] // RANKS if t.dim() else 0


def _own_part(t: torch.Tensor, r: Any, b: int, c: int) -> torch.Tensor:
    d = _dim(t, b)
    n = _place(t, d)
    return t[(slice(None),) * d + (slice(r * n, r * n + n),)] if n else t


def _shifted(t: torch.Tensor, r: Any, b: int, c: int) -> torch.Tensor:
    """Parts of different ranks that overlap."""
    d = _dim(t, b)
    if not t.dim() or t.shape[d] < RANKS:
        return t
    n = t.shape[d] - RANKS + 1
    return t.narrow(d, r if c % 2 else 3 - r, n)


def _picked(t: torch.Tensor, r: Any, b: int, c: int) -> torch.Tensor:
    d = _dim(t, b)
    if not _place(t, d):
        return t
    return t.select(d, r) if c % 2 else t[(slice(None),) * d + (-1 - r,)]


def _slice(t: torch.Tensor, r: Any, b: int, c: int) -> torch.Tensor:
    d = _dim(t, b)
    return t[(slice(None),) * d + (slice(c % 2, None, 1 + c // 2 % 2),)] if t.dim() and t.shape[d] > 1 else t


def _select(t: torch.Tensor, r: Any, b: int, c: int) -> torch.Tensor:
    d = _dim(t, b)
    return t.select(d, c % t.shape[d]) if t.dim() and t.shape[d] else t


def _transpose(t: torch.Tensor, r: Any, b: int, c: int) -> torch.Tensor:
    return t.transpose(_dim(t, b), _dim(t, c)) if t.dim() > 1 else t


def _flat(t: torch.Tensor, r: Any, b: int, c: int) -> torch.Tensor:
    return t.view(-1) if t.is_contiguous() else t.unsqueeze(_dim(t, b))


def _reshape(t: torch.Tensor, r: Any, b: int, c: int) -> torch.Tensor:
    """A copy or a view, decided as torch decides it (only where strides are torch's: a rank's part is laid out anew)."""
    return t.clone().reshape(-1)


def _fits(t: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Something that broadcasts to `t`."""
    if other.dim() <= t.dim() and all(a in (1, b) for a, b in zip(reversed(other.shape), reversed(t.shape), strict=False)):
        return other
    return other.sum()


def _alias(t: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A copy, because eager torch refuses or mixes up operands that overlap what is written."""
    return _fits(t, other).clone()


def _wrap(t: torch.Tensor) -> torch.Tensor:
    return t.remainder(64.0)


Make = Callable[[torch.Tensor, Any, int, int], torch.Tensor]
MAKE: list[Make] = [
    _own_part, _own_part, _shifted, _picked, _slice, _select, _transpose, _flat, _reshape,
    lambda t, r, b, c: t.detach(), lambda t, r, b, c: _wrap(t * 2 + r), lambda t, r, b, c: torch.where(t > r * 3, t, -t), lambda t, r, b, c: t.clone(),
]  # fmt: skip

Write = Callable[[torch.Tensor, torch.Tensor, Any, int, int], Any]
WRITE: list[Write] = [
    lambda t, o, r, b, c: t.add_(c % 5), lambda t, o, r, b, c: t.add_(r), lambda t, o, r, b, c: t.mul_(-1), lambda t, o, r, b, c: t.copy_(_alias(t, o)),
    lambda t, o, r, b, c: t.fill_(c % 7), lambda t, o, r, b, c: t.zero_(), lambda t, o, r, b, c: t.fill_(r), lambda t, o, r, b, c: t.add_(_wrap(_alias(t, o))),
    lambda t, o, r, b, c: t.masked_fill_(t < r * 2, c % 9), lambda t, o, r, b, c: t.sub_(_own_part(t, r, b, c).sum().remainder(8.0)),
    lambda t, o, r, b, c: _own_part(t, r, b, c).copy_(_own_part(t, r, b, c) * 2 + 1), lambda t, o, r, b, c: _picked(t, r, b, c).add_(3),
    lambda t, o, r, b, c: t.copy_(torch.arange(float(t.numel())).reshape(t.shape)),
]  # fmt: skip


def run(program: list[Instruction], r: Any, device: str) -> Pool:
    """The pool after the program, as rank `r` (a number for each rank on xla)."""
    pool = start(device)
    for op, a, b, c in program:
        t = pool[a % len(pool)]
        if op % 2:
            WRITE[op // 2 % len(WRITE)](t, pool[b % len(pool)], r, b, c)
            continue
        made = MAKE[op // 2 % len(MAKE)](t, r, b, c)
        if len(pool) >= MAX_POOL:
            pool.pop(c % len(pool))
        pool.append(made)
    return pool


def random_program(seed: int, length: int = 14) -> list[Instruction]:
    draw = random.Random(seed)
    return [(draw.randrange(1000), draw.randrange(1000), draw.randrange(1000), draw.randrange(1000)) for _ in range(length)]
