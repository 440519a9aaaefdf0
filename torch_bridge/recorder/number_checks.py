"""Kinds of numbers that an op is not defined for: integers where it needs fractions, complex numbers where it needs an order, differences of bools.

torch's CPU kernels refuse them and its meta kernels let them through: without these checks a softmax of integers, say, would be zeros. See `checks`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_bridge.recorder.argument_checks import checks

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
)
_OF_AN_ORDER = (
    *(getattr(op, name) for op in (aten.lt, aten.le, aten.gt, aten.ge) for name in ("Tensor", "Scalar")),
    *(getattr(op, name) for op in (aten.max, aten.min, aten.median, aten.nanmedian) for name in ("default", "dim")),
    *(getattr(op, name) for op in (aten.clamp, aten.clamp_min, aten.clamp_max) for name in ("default", "Tensor")),
    *(
        op.default
        for op in (aten.maximum, aten.minimum, aten.fmax, aten.fmin, aten.amax, aten.amin, aten.aminmax, aten.argmax, aten.argmin)
    ),
    *(op.default for op in (aten.cummax, aten.cummin, aten.kthvalue, aten.topk, aten.mode, aten.relu, aten.sign)),
    *(op.default for op in (aten.floor, aten.ceil, aten.trunc, aten.round)),
    aten.hardtanh.default,
    aten.atan2.default,
    aten.xlogy.Tensor,
    aten.heaviside.default,
    aten.sort.default,
    aten.sort.stable,
)


def _refuse(unfit: Callable[[torch.dtype], bool], why: str, *ops: torch._ops.OpOverload) -> None:
    """Register one check: what tensors among the first two arguments are promoted to may not be `unfit`. (Labels and targets may be integers.)"""
    for op in ops:
        name = op._schema.name.removeprefix("aten::").removeprefix("_")

        def check(*args: Any, name: str = name, **kwargs: object) -> None:
            given = [x.dtype for x in args[:2] if isinstance(x, Tensor)]
            if given and unfit(dtype := functools.reduce(torch.promote_types, given)):
                raise NotImplementedError(f'"{name}" not implemented for {dtype}: {why}')

        checks(op)(check)


def _is_whole(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _is_no_fraction(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point


_refuse(_is_no_fraction, "convert it with .float() (or .real, .abs() if it is complex)", *_OF_FRACTIONS)
_refuse(_is_whole, "convert it with .float()", *_OF_FRACTIONS_OR_COMPLEX)
_refuse(lambda dtype: dtype.is_complex, "complex numbers have no order: take .real, .imag or .abs()", *_OF_AN_ORDER)


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
