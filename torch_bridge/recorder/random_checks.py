"""What torch's CPU kernels refuse of a random op (see `checks`): an empty range, a probability above 1, bounds that the dtype cannot hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_bridge.recorder.argument_checks import checks

aten = torch.ops.aten
Tensor = torch.Tensor

_EXACT = {torch.float64: 53, torch.float32: 24, torch.float16: 11}
"""Integers up to 2^n are exact in these dtypes (torch lets bfloat16 repeat its integers)."""


# -- dtypes ---------------------------------------------------------------------------------------


def _need_float(name: str, dtype: torch.dtype | None, complex_too: bool = False) -> None:
    if dtype is not None and not dtype.is_floating_point and not (complex_too and dtype.is_complex):
        raise NotImplementedError(f'"{name}" not implemented for {dtype}: it draws floats; for integers use randint or random_')


@checks(aten.rand.default, aten.rand.generator)
def _rand(size: Sequence[int], *, dtype: torch.dtype | None = None, **kwargs: object) -> None:
    _need_float("rand", dtype, complex_too=True)


@checks(aten.rand_like.default, aten.rand_like.generator)
def _rand_like(self: Tensor, *, dtype: torch.dtype | None = None, **kwargs: object) -> None:
    _need_float("rand_like", dtype or self.dtype, complex_too=True)


@checks(aten.poisson.default)
def _poisson(self: Tensor, generator: torch.Generator | None = None) -> None:
    _need_float("poisson", self.dtype)


@checks(aten.bernoulli.default)
def _bernoulli(self: Tensor, *, generator: torch.Generator | None = None) -> None:
    _need_float("bernoulli", self.dtype)


@checks(aten.bernoulli.Tensor)
def _bernoulli_tensor(self: Tensor, p: Tensor, *, generator: torch.Generator | None = None) -> None:
    _need_float("bernoulli_ with a tensor p", p.dtype)


@checks(aten.normal.float_Tensor, aten.normal.Tensor_Tensor, aten.normal.Tensor_float)
def _normal(mean: Tensor | float, std: Tensor | float = 1.0, *, generator: torch.Generator | None = None) -> None:
    if isinstance(std, Tensor) and std.dtype.is_complex:
        raise RuntimeError(f"normal expects standard deviation to be non-complex, got {std.dtype}")
    if isinstance(mean, Tensor):
        _need_float("normal", mean.dtype, complex_too=True)


@checks(aten.binomial.default)
def _binomial(count: Tensor, prob: Tensor, generator: torch.Generator | None = None) -> None:
    for name, x in (("count", count), ("prob", prob)):
        if not x.dtype.is_floating_point:
            raise ValueError(f"binomial only supports floating-point dtypes for {name}, got: {x.dtype}")


# -- probabilities and ranges ---------------------------------------------------------------------


def check_dropout(p: float) -> None:
    """RuntimeError, as in torch, unless p is a probability."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")


@checks(aten.native_dropout.default)
def _native_dropout(input: Tensor, p: float, train: bool | None) -> None:
    if train:
        check_dropout(p)


@checks(aten.bernoulli.p)
def _bernoulli_p(self: Tensor, p: float, *, generator: torch.Generator | None = None) -> None:
    if not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")


def _check_integers(dtype: torch.dtype, low: int, high: int) -> None:
    """Raise unless the integers of [low, high) exist and lie in the dtype's range."""
    if dtype.is_complex:
        raise RuntimeError(f"random_ draws integral, floating-point and boolean types, got {dtype}")
    if low >= high:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")
    first, last = _ends(dtype)
    for name, bound in (("from", low), ("to - 1", high - 1)):
        if not first <= bound <= last:
            raise RuntimeError(f"random_: {name} is out of bounds for {dtype}: {bound} is not in [{first:.6g}, {last:.6g}]")


def _ends(dtype: torch.dtype) -> tuple[float, float]:
    if dtype == torch.bool:
        return 0, 1
    info: Any = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return info.min, info.max


@checks(aten.randint.default, aten.randint.generator)
def _randint(high: int, size: Sequence[int], *, dtype: torch.dtype | None = torch.int64, **kwargs: object) -> None:
    _check_integers(dtype or torch.int64, 0, high)


@checks(aten.randint.low, aten.randint.low_generator)
def _randint_low(low: int, high: int, size: Sequence[int], *, dtype: torch.dtype | None = torch.int64, **kwargs: object) -> None:
    _check_integers(dtype or torch.int64, low, high)


@checks(aten.randint_like.default, aten.randint_like.generator)
def _randint_like(self: Tensor, high: int, *, dtype: torch.dtype | None = None, **kwargs: object) -> None:
    _check_integers(dtype or self.dtype, 0, high)


@checks(aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype)
def _randint_like_low(self: Tensor, low: int, high: int, *, dtype: torch.dtype | None = None, **kwargs: object) -> None:
    _check_integers(dtype or self.dtype, low, high)


@checks(aten.random.to)
def _random_to(self: Tensor, to: int, *, generator: torch.Generator | None = None) -> None:
    _check_integers(self.dtype, 0, to)


@checks(getattr(aten.random, "from"))
def _random_from(
    self: Tensor, low: int | None = None, to: int | None = None, *, generator: torch.Generator | None = None, **named: int
) -> None:
    low = named.get("from", low)
    assert low is not None
    _check_integers(self.dtype, low, low + 1 if to is None else to)


@checks(aten.randperm.default, aten.randperm.generator)
def _randperm(n: int, *, dtype: torch.dtype | None = torch.int64, **kwargs: object) -> None:
    dtype = dtype or torch.int64
    if dtype == torch.bool or dtype.is_complex:
        raise NotImplementedError(f'"randperm" not implemented for {dtype}: ask for an integer or a float dtype')
    most = 1 << _EXACT[dtype] if dtype in _EXACT else _ends(dtype)[1]
    if n > most + 1:
        raise RuntimeError(f"randperm: n={n} is too large for {dtype}, whose integers are exact up to {most}")
