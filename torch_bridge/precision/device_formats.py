"""`XLA_USE_BF16` and `XLA_DOWNCAST_BF16`: float tensors of the script hold numbers of less precision on the device.

| variable | torch.float32 | torch.float64 |
|---|---|---|
| `XLA_USE_BF16=1` | bfloat16 | bfloat16 |
| `XLA_DOWNCAST_BF16=1` | bfloat16 | float32 |

Tensors keep the dtype the script gave them, and an array of that dtype: what changes is that every value, uploaded or computed, is rounded to the
narrower format. An op computes on such values and rounds its result once, as an op on bfloat16 tensors does.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

VARIABLES = {
    "XLA_USE_BF16": {"float32": "bf16", "float64": "bf16"},
    "XLA_DOWNCAST_BF16": {"float32": "bf16", "float64": "fp32"},
}
"""Formats on the device by variable and dtype."""

_HOST = {"bf16": jnp.dtype(jnp.bfloat16), "fp32": np.dtype(np.float32)}
_warned: set[str] = set()


def formats(switched_on: Mapping[str, bool | None]) -> dict[str, str]:
    """The formats by dtype name, for variables that are on or off; `XLA_USE_BF16` wins. Warns once that they are deprecated."""
    for name, by_dtype in VARIABLES.items():
        if switched_on.get(name):
            _warn(name)
            return by_dtype
    return {}


def without_warnings() -> None:
    """Do not say that the variables are deprecated: they were set for somebody who did not choose them (`nxdt-train`, by `precision.type`)."""
    _warned.update(VARIABLES)


def _warn(name: str) -> None:
    if name in _warned:
        return
    _warned.add(name)
    warnings.warn(
        f"{name} is deprecated: use model.to(torch.bfloat16) with NEURON_RT_STOCHASTIC_ROUNDING_EN=1, or torch.autocast('xla'). "
        "It still works here: float tensors keep their dtype and hold values of lower precision on the device.",
        FutureWarning,
        stacklevel=2,
    )


def on_host(values: np.ndarray, by_dtype: Mapping[str, str]) -> np.ndarray:
    """Values about to be uploaded, rounded to nearest; the same array if they stay as they are."""
    target = by_dtype.get(values.dtype.name) if by_dtype else None
    return values if target is None else values.astype(np.float32).astype(_HOST[target]).astype(values.dtype)
