"""Kinds of numbers that an op is not defined for: integers where it needs fractions, complex numbers where it needs an order, differences of bools.

torch's CPU kernels refuse them and its meta kernels let them through: without these checks a softmax of integers, say, would be zeros. See `checks`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_bridge import lowerings
from torch_bridge.recorder.argument_checks import checks, fits_into

aten = torch.ops.aten
Tensor = torch.Tensor

_OF_FRACTIONS = (
    aten._softmax.default,
    aten._log_softmax.default,
    aten.gelu.default,
    aten.mish.default,
    aten.elu.default,
    aten.celu.default,
    aten.leaky_relu.default,
    aten.rrelu_with_noise.default,
    aten.softplus.default,
    aten.log_sigmoid_forward.default,
    aten.hardsigmoid.default,
    aten.hardswish.default,
    aten.hardshrink.default,
    aten.softshrink.default,
    aten.hypot.default,
    aten.nextafter.default,
    aten.logaddexp.default,
    aten.logaddexp2.default,
    aten.binary_cross_entropy.default,
    aten._prelu_kernel.default,
    aten.mse_loss.default,
    aten.huber_loss.default,
    aten.smooth_l1_loss.default,
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool3d.default,
    aten.grid_sampler_2d.default,
    aten.grid_sampler_3d.default,
    aten.glu.default,
    aten.multi_margin_loss.default,
    aten.multilabel_margin_loss_forward.default,
    aten.soft_margin_loss.default,
    aten.igamma.default,
    aten.igammac.default,
    aten.segment_reduce.default,
)
_OF_WEIGHTED_NEIGHBORS = (
    aten.upsample_linear1d.default,
    aten.upsample_bilinear2d.default,
    aten.upsample_bicubic2d.default,
    aten.upsample_trilinear3d.default,
    aten._upsample_bilinear2d_aa.default,
    aten._upsample_bicubic2d_aa.default,
)
_OF_FRACTIONS_OR_COMPLEX = (
    aten.silu.default,
    aten.logcumsumexp.default,
    aten.lerp.Scalar,
    aten.lerp.Tensor,
    *(getattr(op, name) for op in (aten.var, aten.std, aten.var_mean, aten.std_mean) for name in ("default", "dim", "correction")),
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.native_batch_norm.default,
    aten.cholesky.default,
    aten.cholesky_solve.default,
    aten.cholesky_inverse.default,
    aten.geqrf.default,
    aten.ormqr.default,
    aten.triangular_solve.default,
    aten._lu_with_info.default,
    aten.linalg_lu_factor_ex.default,
    aten.linalg_lu.default,
    aten.linalg_eig.default,
    aten.linalg_eigvals.default,
    aten._linalg_eigh.default,
    aten.linalg_householder_product.default,
    aten.linalg_solve_triangular.default,
)
_OF_REAL_NUMBERS = (
    *(op for op in lowerings.registered() if str(op).startswith("aten.special_")),
    *(op.default for op in (aten.erf, aten.erfc, aten.erfinv, aten.lgamma, aten.mvlgamma, aten.digamma, aten.polygamma, aten.i0)),
    *(op.default for op in (aten.frac, aten.deg2rad, aten.rad2deg, aten.logit, aten.fractional_max_pool2d, aten.fractional_max_pool3d)),
    aten.round.decimals,
)
_OF_AN_ORDER = (
    *(getattr(op, name) for op in (aten.lt, aten.le, aten.gt, aten.ge) for name in ("Tensor", "Scalar")),
    *(getattr(op, name) for op in (aten.max, aten.min, aten.median, aten.nanmedian) for name in ("default", "dim")),
    *(getattr(op, name) for op in (aten.clamp_min, aten.clamp_max) for name in ("default", "Tensor")),
    *(
        op.default
        for op in (aten.maximum, aten.minimum, aten.fmax, aten.fmin, aten.amax, aten.amin, aten.aminmax, aten.argmax, aten.argmin)
    ),
    *(op.default for op in (aten.cummax, aten.cummin, aten.kthvalue, aten.topk, aten.mode, aten.relu, aten.sign)),
    *(op.default for op in (aten.floor, aten.ceil, aten.trunc, aten.round)),
    aten.signbit.default,
    aten.hardtanh.default,
    aten.atan2.default,
    *(getattr(aten.xlogy, name) for name in ("Tensor", "Scalar_Other", "Scalar_Self")),
    *(getattr(op, name) for op in (aten.remainder, aten.fmod) for name in ("Tensor", "Scalar")),
    *(aten.copysign.Tensor, aten.floor_divide.default, aten.floor_divide.Scalar),
    *(getattr(aten.div, name) for name in ("Tensor_mode", "Scalar_mode")),
    aten.heaviside.default,
    aten.sort.default,
    aten.sort.stable,
)
_SHIFTS = tuple(
    getattr(op, name) for op in (aten.bitwise_left_shift, aten.bitwise_right_shift) for name in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")
)
_OF_WHOLE_NUMBERS = (
    aten.bitwise_not.default,
    *(getattr(op, name) for op in (aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor) for name in ("Tensor", "Scalar", "Scalar_Tensor")),
    *_SHIFTS,
    aten.gcd.default,
    aten.lcm.default,
)
_OF_GREATEST_NEIGHBORS = (
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default,
)
_NOT_OF_BOOLS = (
    aten.bitwise_left_shift.Tensor,
    aten.bitwise_right_shift.Tensor,
    aten.gcd.default,
    aten.lcm.default,
    aten.pow.Tensor_Tensor,
    aten.remainder.Tensor,
    aten.fmod.Tensor,
    aten.linalg_cross.default,
)


def _refuse(unfit: Callable[[torch.dtype], bool], why: str, *ops: torch._ops.OpOverload, operands: int = 2, numbers: Any = complex) -> None:
    """Register one check: what the first two arguments (`operands`) are promoted to may not be `unfit`. (Labels and targets may be integers.)

    numbers: of Python's numbers among them, the kinds that count: slopes, say, may be floats.
    """
    for op in ops:
        name = op._schema.name.removeprefix("aten::").removeprefix("_")

        def check(*args: Any, name: str = name, **kwargs: object) -> None:
            given = [x.dtype for x in args[:operands] if isinstance(x, Tensor)]
            if not given:
                return
            dtype = functools.reduce(torch.promote_types, given)
            for x in args[:operands]:
                if isinstance(x, numbers):
                    dtype = torch.result_type(torch.empty(1, dtype=dtype, device="meta"), x)
            if unfit(dtype):
                raise NotImplementedError(f'"{name}" not implemented for {dtype}: {why}')

        checks(op)(check)


_Fraction: Any = (float, complex)


def _is_whole(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _is_no_fraction(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point


_refuse(_is_no_fraction, "convert it with .float() (or .real, .abs() if it is complex)", *_OF_FRACTIONS)
_refuse(_is_whole, "convert it with .float()", *_OF_FRACTIONS_OR_COMPLEX)
_refuse(
    _is_no_fraction,
    "convert it with .float() (torch rounds uint8 on the CPU in its own fixed-point way, which xla does not)",
    *_OF_WEIGHTED_NEIGHBORS,
    operands=1,
)
_refuse(lambda dtype: dtype.is_complex, "it takes real numbers: take .real, .imag or .abs()", *_OF_REAL_NUMBERS)
_ORDER = "complex numbers have no order: take .real, .imag or .abs()"
_refuse(lambda dtype: dtype.is_complex, _ORDER, *_OF_AN_ORDER)
_refuse(lambda dtype: dtype.is_complex, _ORDER, aten.clamp.default, aten.clamp.Tensor, operands=3)
_refuse(
    lambda dtype: not _is_whole(dtype),
    "it takes integers: convert it with .long(), or .bool() if it is a mask",
    *_OF_WHOLE_NUMBERS,
    numbers=_Fraction,
)
_refuse(lambda dtype: dtype.is_complex, "use x.exp().cumsum(dim).log() instead", aten.logcumsumexp.default)
_refuse(lambda dtype: dtype == torch.bool, "convert it with .int()", *_NOT_OF_BOOLS)
_refuse(lambda dtype: dtype == torch.bool, "convert it with .int()", *_OF_GREATEST_NEIGHBORS)
_refuse(lambda dtype: dtype.is_complex, _ORDER, *_OF_GREATEST_NEIGHBORS)


@checks(aten.relu.default)
def _relu(self: Tensor) -> None:
    if self.dtype == torch.bool:
        raise RuntimeError("Boolean inputs not supported for relu: they are what it would give")


@checks(aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar)
def _sub(self: Tensor, other: Tensor | complex, alpha: complex = 1) -> None:
    found = [x.dtype == torch.bool if isinstance(x, Tensor) else isinstance(x, bool) for x in (self, other)]
    if any(found):
        raise RuntimeError(
            f"Subtraction, the `-` operator, with {'two bool tensors' if all(found) else 'a bool tensor'} is not supported: "
            "use `~` to invert a mask, `^` for what differs, or convert it with .int()"
        )


@checks(aten.add_.Tensor, aten.sub_.Tensor)
def _in_place(self: Tensor, other: Tensor | complex, alpha: complex = 1) -> None:
    """torch's meta kernels say that an element's size would change."""
    fits_into(torch.result_type(self, other), self.dtype)


@checks(aten.argmax.default, aten.argmin.default)
def _of_bools(self: Tensor, *rest: object, **kwargs: object) -> None:
    if self.dtype == torch.bool:
        raise RuntimeError("argmax() and argmin() do not support bool input: convert it with .int()")


@checks(
    *(getattr(op, name) for op in (aten.linspace, aten.logspace) for name in ("default", "Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor"))
)
def _steps(*ends: object, dtype: torch.dtype | None = None, **kwargs: object) -> None:
    if dtype == torch.bool:
        raise NotImplementedError("linspace and logspace are not implemented for torch.bool: make numbers, and compare them")


@checks(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _numbers(*ends: object, dtype: torch.dtype | None = None, **kwargs: object) -> None:
    if dtype == torch.bool:
        raise NotImplementedError("arange is not implemented for torch.bool: make numbers, and compare them")


@checks(aten.cumsum.default, aten.cumprod.default)
def _running(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> None:
    if dtype == torch.bool:
        raise NotImplementedError('"cumsum" and "cumprod" not implemented for torch.bool: without a dtype they count in int64')


@checks(aten.scatter_reduce.two, aten.index_reduce.default)
def _reduced_at(self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, **kwargs: object) -> None:
    if self.dtype.is_complex and reduce in ("amax", "amin"):
        raise NotImplementedError(f'a scatter that keeps the "{reduce}" is not implemented for {self.dtype}: {_ORDER}')


@checks(aten.smooth_l1_loss.default)
def _smooth_l1_loss(self: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0) -> None:
    if beta < 0:
        raise RuntimeError(f"smooth_l1_loss does not support negative values for beta, got {beta}")


@checks(aten.addcdiv.default)
def _addcdiv(self: Tensor, tensor1: Tensor, tensor2: Tensor, value: complex = 1) -> None:
    if _is_whole(tensor1.dtype) and _is_whole(tensor2.dtype):
        raise RuntimeError(
            "Integer division with addcdiv is no longer supported: convert a tensor with .float(), or write input + value * torch.trunc(tensor1 / tensor2)"
        )


@checks(aten.heaviside.default)
def _heaviside(self: Tensor, values: Tensor) -> None:
    if self.dtype != values.dtype:
        raise RuntimeError(
            f"heaviside is not yet implemented for tensors with different dtypes ({self.dtype} and {values.dtype}): convert one with .to()"
        )


@checks(aten.nansum.default)
def _nansum(self: Tensor, *args: object, **kwargs: object) -> None:
    if self.dtype.is_complex:
        raise RuntimeError("nansum on CPU does not support complex inputs: sum .real and .imag, or torch.where(x == x, x, 0)")


@checks(aten.masked_fill.Scalar)
def _masked_fill(self: Tensor, mask: Tensor, value: complex) -> None:
    """Integers have no number that stands for one they cannot hold. (Floats have: infinity, as in `torch.where`.)"""
    if isinstance(value, complex) and not self.dtype.is_complex and self.dtype != torch.bool and value.imag:
        raise RuntimeError(f"masked_fill: {value} cannot be converted to {self.dtype}: a complex number has no value there")
    value = value.real
    if _is_whole(self.dtype) and self.dtype != torch.bool:
        limits = torch.iinfo(self.dtype)
        if not limits.min <= value <= limits.max:
            raise RuntimeError(f"value cannot be converted to type {self.dtype} without overflow: masked_fill with {value}")
