"""The names under which `InferenceConfig` and `nxd-generate` take dtypes of quantized numbers: NxD's and torch's. Without torch, for the command line."""

from __future__ import annotations

QUANTIZED = {
    "int8": "int8",
    "f8e4m3": "f8e4m3",
    "f8e4m3fn": "f8e4m3",
    "float8_e4m3": "f8e4m3",
    "float8_e4m3fn": "f8e4m3",
    "f8e5m2": "f8e5m2",
    "float8_e5m2": "f8e5m2",
}
"""Of weights: a name, and NxD's, which `QuantizedDtype` has."""
TORCH = {"int8": "int8", "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}
"""NxD's names, and torch's."""


def quantized(given: object, integers: bool = True) -> str:
    """NxD's name of a dtype, or of a name for it in any case, with "torch." in front or not. integers: int8 is allowed.

    Raises ValueError, naming those that are.
    """
    allowed = [name for name, short in QUANTIZED.items() if integers or short != "int8"]
    name = str(given).lower().removeprefix("torch.")
    if name not in allowed:
        raise ValueError(f"{given!r} must be one of {', '.join(allowed)}")
    return QUANTIZED[name]
