"""What real accelerators can do at most, by the names that JAX has for them."""

from __future__ import annotations

_TERA = {
    "GB200": 2500,
    "B200": 2250,
    "H200 NVL": 835,
    "H200": 989,
    "GH200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "H800": 989,
    "H20": 148,
    "A100": 312,
    "A800": 312,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "A10G": 70,
    "A10": 125,
    "A40": 150,
    "A30": 165,
    "RTX 4090": 165,
    "RTX 3090": 71,
    "TPU v4": 275,
    "TPU v5 lite": 197,
    "TPU v5e": 197,
    "TPU v5p": 459,
    "TPU v5": 459,
    "TPU v6 lite": 918,
    "TPU v6e": 918,
}
"""TFLOP/s in dense bfloat16 that the makers name for a device; the first name that the device's contains as words."""


def peak_flops_of(device: str) -> float | None:
    """Operations per second in dense bfloat16 of a device by its name, such as "NVIDIA H100 80GB HBM3"; None if it is not in the table."""
    words = f" {device.replace('-', ' ')} "
    return next((1e12 * peak for name, peak in _TERA.items() if f" {name} " in words), None)
