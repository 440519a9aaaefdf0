"""Small random programs of views, in-place ops and arithmetic, for comparing a device with eager torch.

A program is a list of (op number, a, b, c): `run` interprets each against a growing pool of tensors, taking operands modulo what is there, so that
every list of integers is a program and hypothesis can shrink it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Instruction = tuple[int, int, int, int]
Pool = list[torch.Tensor]
MAX_POOL = 12


def start(device: str) -> Pool:
    """The tensors every program starts with (small integers, so that sums and products stay exact)."""
    return [
        torch.arange(24.0).reshape(4, 6).to(device),
        (torch.arange(30.0) - 11).reshape(2, 3, 5).to(device),
        torch.arange(8).to(device),
        torch.ones(3, 1).to(device),
        torch.arange(16.0).reshape(2, 2, 2, 2).permute(3, 1, 0, 2).to(device),
        torch.tensor(3.0).to(device),
    ]


def _dim(t: torch.Tensor, n: int) -> int:
    return n % t.dim() if t.dim() else 0


def _slice(t: torch.Tensor, b: int, c: int) -> torch.Tensor:
    if not t.dim():
        return t
    d = _dim(t, b)
    start_, stop, step = c % 3, c // 3 % 5 + 1, c // 15 % 3 + 1
    return t[(slice(None),) * d + (slice(start_, start_ + stop, step),)]


def _select(t: torch.Tensor, b: int, c: int) -> torch.Tensor:
    d = _dim(t, b)
    return t.select(d, c % t.shape[d]) if t.dim() and t.shape[d] else t


def _regroup(t: torch.Tensor, b: int, c: int) -> torch.Tensor:
    n = t.numel()
    divisors = [k for k in range(1, n + 1) if n % k == 0] or [1]
    k = divisors[b % len(divisors)]
    shapes = [(k, n // k), (n,), (1, n), (n // k, k, 1)] if n else [(0,), (0, 3)]
    return t.reshape(shapes[c % len(shapes)]) if c % 2 else t.view(shapes[c % len(shapes)])


def _permute(t: torch.Tensor, b: int, c: int) -> torch.Tensor:
    if t.dim() < 2:
        return t.t()
    return t.transpose(_dim(t, b), _dim(t, c))


def _expand(t: torch.Tensor, b: int, c: int) -> torch.Tensor:
    return t.expand([2, *(n if n != 1 else 3 for n in t.shape)]) if t.dim() < 4 else t


def _as_strided(t: torch.Tensor, b: int, c: int) -> torch.Tensor:
    n = t.numel()
    if n < 4:
        return t
    return t.as_strided(
        (2, 2), (b % 3 + (1 if c % 2 else 0), 1), c % (n - 3) if n > 6 and t.is_contiguous() and t.storage_offset() == 0 else 0
    )


def _diagonal(t: torch.Tensor, b: int, c: int) -> torch.Tensor:
    return t.diagonal(b % 3 - 1, 0, 1) if t.dim() >= 2 else t


def _unfold(t: torch.Tensor, b: int, c: int) -> torch.Tensor:
    d = _dim(t, b)
    return t.unfold(d, 2, c % 2 + 1) if t.dim() in (1, 2, 3) and t.shape[d] >= 2 else t


def _chunk(t: torch.Tensor, b: int, c: int) -> torch.Tensor:
    return t.chunk(2, _dim(t, b))[-1] if t.dim() else t


def _unbind(t: torch.Tensor, b: int, c: int) -> torch.Tensor:
    d = _dim(t, b)
    return t.unbind(d)[c % t.shape[d]] if t.dim() and t.shape[d] else t


def _bits(t: torch.Tensor, b: int, c: int) -> torch.Tensor:
    # Integers only: small integers read as floats are denormal numbers, and XLA's CPU code flushes those to zero in arithmetic (eager torch does not).
    other = {torch.int64: torch.int32}.get(t.dtype)
    return t.view(other) if other and b % 4 == 0 else t


VIEWS: list[Callable[[torch.Tensor, int, int], torch.Tensor]] = [
    _slice, _select, _regroup, _permute, _expand, _as_strided, _diagonal, _unfold, _chunk, _unbind,
    lambda t, b, c: t.unsqueeze(b % (t.dim() + 1)),
    lambda t, b, c: t.squeeze(),
    lambda t, b, c: t.flatten(),
    lambda t, b, c: t.movedim(0, -1) if t.dim() else t,
    lambda t, b, c: t.detach(),
    lambda t, b, c: t.narrow(_dim(t, b), 0, 1) if t.dim() and t.shape[_dim(t, b)] else t,
    lambda t, b, c: t.contiguous(),
    lambda t, b, c: t.swapaxes(0, -1) if t.dim() else t,
    lambda t, b, c: t.data,
    lambda t, b, c: t.split(2, _dim(t, b))[0] if t.dim() else t,
    _bits,
]  # fmt: skip


def _assign(t: torch.Tensor, other: torch.Tensor, b: int, c: int) -> None:
    if t.dim() and t.shape[0]:
        t[b % t.shape[0] :: c % 2 + 1] = c % 7


def _copy(t: torch.Tensor, other: torch.Tensor, b: int, c: int) -> None:
    other = other.clone()  # torch refuses operands that overlap the target in part; the xla device reads them first
    source = other.flatten()[:1] if other.numel() else other.new_zeros(1)
    t.copy_(other if other.shape == t.shape else source.reshape([1] * t.dim()))


def _index_put(t: torch.Tensor, other: torch.Tensor, b: int, c: int) -> None:
    if t.dim() and t.shape[0]:
        t[torch.tensor([b % t.shape[0], c % t.shape[0]], device=t.device)] = 4


def _mask(t: torch.Tensor, other: torch.Tensor, b: int, c: int) -> None:
    t[t > c % 9] = -1


def _out(t: torch.Tensor, other: torch.Tensor, b: int, c: int) -> None:
    torch.add(t, 1, out=t)


WRITES: list[Callable[[torch.Tensor, torch.Tensor, int, int], Any]] = [
    lambda t, o, b, c: t.add_(b % 5),
    lambda t, o, b, c: t.mul_(2).clamp_(-50, 50),
    lambda t, o, b, c: t.zero_(),
    lambda t, o, b, c: t.fill_(c % 4),
    _assign, _copy, _index_put, _mask, _out,
    lambda t, o, b, c: t.neg_(),
    lambda t, o, b, c: t.masked_fill_(t == b % 6, 9),
    lambda t, o, b, c: t.sub_(o.clone()) if o.shape == t.shape and o.dtype == t.dtype else t.sub_(1),
    lambda t, o, b, c: t.select(0, 0).add_(3) if t.dim() and t.shape[0] else t.add_(3),
    lambda t, o, b, c: t.copy_(t.flip(0)) if t.dim() else t,
    lambda t, o, b, c: t.transpose_(0, -1) if t.dim() > 1 else t,
    lambda t, o, b, c: t.squeeze_(),
    lambda t, o, b, c: t.unsqueeze_(0) if t.dim() < 4 else t,
    lambda t, o, b, c: t.diagonal().fill_(7) if t.dim() >= 2 else t,
    lambda t, o, b, c: torch.mul(o.clone(), 1, out=t) if o.shape == t.shape and o.dtype == t.dtype else t,
    lambda t, o, b, c: setattr(t, "data", o) if o.dtype == t.dtype and b % 3 == 0 else t,
    lambda t, o, b, c: t.set_(o) if o.dtype == t.dtype and b % 3 == 0 else t,
    lambda t, o, b, c: t.resize_(2, 2) if t.numel() >= 4 and t.is_contiguous() else t,
    lambda t, o, b, c: t.cumsum_(0) if t.dim() else t,
    lambda t, o, b, c: t.scatter_(0, torch.zeros([1] * t.dim(), dtype=torch.int64, device=t.device), 5) if t.dim() and t.numel() else t,
]  # fmt: skip

MATH: list[Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]] = [
    lambda t, o, b, c: t + (o if o.shape == t.shape else 1),
    lambda t, o, b, c: (t * 2).clamp(-50, 50),
    lambda t, o, b, c: t.clone(),
    lambda t, o, b, c: t.sum(_dim(t, b), keepdim=bool(c % 2)) if t.dim() else t * 1,
    lambda t, o, b, c: torch.cat([t, t], _dim(t, b)) if t.dim() and t.numel() < 64 else t + 0,
    lambda t, o, b, c: torch.where(t > b % 5, t, -t),
    lambda t, o, b, c: t.float() - 1,
    lambda t, o, b, c: t.T.contiguous() if t.dim() == 2 else t + 1,
    lambda t, o, b, c: torch.zeros_like(t),
]


def overlaps(t: torch.Tensor) -> bool:
    """True if two elements may share memory: writing to such a tensor is undefined in torch."""
    reach = 0
    for stride, n in sorted((s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (n - 1)
    return False


def run(program: list[Instruction], pool: Pool, sync: Callable[[], Any]) -> list[str]:
    """Run a program; returns the types of errors that instructions raised ('' for none)."""
    errors = []
    groups = [VIEWS, VIEWS, WRITES, WRITES, MATH]
    for op, a, b, c in program:
        t, other = pool[a % len(pool)], pool[(a // 16 + b) % len(pool)]
        group = groups[op % len(groups)]
        rule: Any = group[op // len(groups) % len(group)]
        if group is WRITES and overlaps(t):
            rule = WRITES[0]  # add_: torch refuses where it can tell
            if 0 not in t.stride():
                continue
        try:
            result = rule(t, b, c) if group is VIEWS else rule(t, other, b, c)
            errors.append("")
        except (RuntimeError, IndexError, ValueError) as error:
            errors.append(type(error).__name__)
            continue
        if group is not WRITES and len(pool) < MAX_POOL and result.numel() < 200:
            pool.append(result)
        elif group is not WRITES and result.numel() < 200:
            pool[b % len(pool)] = result
        if (a + b) % 11 == 0:
            sync()
    return errors
