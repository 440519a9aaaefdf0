"""`torch_neuronx.testing.validation`: comparing results across devices."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torch_bridge.recorder import prefetch
from torch_bridge.torch_neuronx.testing.logits import logit_validation

__all__ = ["Comparison", "assert_close", "logit_validation", "neuron_allclose"]


class Comparison(NamedTuple):
    """What `neuron_allclose` finds. `allclose`: within tolerance everywhere; `max_difference`: largest absolute difference; `mismatched`:
    elements outside.
    """

    allclose: bool
    max_difference: float
    mismatched: int

    def __bool__(self) -> bool:
        return self.allclose


def assert_close(actual: Any, expected: Any, **kwargs: Any) -> None:
    """`torch_neuronx.testing.assert_close`: `torch.testing.assert_close` on the values, whatever devices they are on."""
    torch.testing.assert_close(prefetch.to_host(actual), prefetch.to_host(expected), **kwargs)


def neuron_allclose(
    actual: torch.Tensor,
    expected: torch.Tensor,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = False,
    **kwargs: Any,
) -> Comparison:
    """`torch_neuronx.testing.neuron_allclose`: whether two tensors are close, whatever devices they are on; the tolerances of
    `torch.testing.assert_close` by default.
    """
    a, b = prefetch.to_host(actual).detach(), prefetch.to_host(expected).detach()
    if a.shape != b.shape:
        raise ValueError(f"neuron_allclose compares tensors of one shape, got {list(a.shape)} and {list(b.shape)}")
    if rtol is None or atol is None:
        default_rtol, default_atol = torch.testing._comparison.default_tolerances(a, b)
        rtol = default_rtol if rtol is None else rtol
        atol = default_atol if atol is None else atol
    a, b = a.double(), b.double()
    close = torch.isclose(a, b, rtol, atol, equal_nan)
    difference = float((a - b).abs().max()) if a.numel() else 0.0
    return Comparison(bool(close.all()), difference, int((~close).sum()))
