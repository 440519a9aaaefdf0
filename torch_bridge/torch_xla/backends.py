"""`torch_xla.backends`: how precise products of matrices are."""

from __future__ import annotations

from torch_bridge.torch_xla import _XLAC

__all__ = ["get_mat_mul_precision", "set_mat_mul_precision"]

_PRECISIONS = ("default", "high", "highest")


def set_mat_mul_precision(precision: str) -> None:
    """`torch_xla.backends.set_mat_mul_precision`: "default", "high" or "highest", for matrix products and convolutions of float32.

    Those are in float32 here whatever is asked for, so nothing gets less precise. Raises ValueError for other names.
    """
    if precision not in _PRECISIONS:
        raise ValueError(f"Invalid precision: {precision!r}. Must be one of {', '.join(_PRECISIONS)}")
    _XLAC._xla_set_mat_mul_precision(precision)


def get_mat_mul_precision() -> str:
    """`torch_xla.backends.get_mat_mul_precision`: what was set; "default" at first."""
    return _XLAC._xla_get_mat_mul_precision()
