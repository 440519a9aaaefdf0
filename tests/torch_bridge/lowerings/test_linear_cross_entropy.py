"""The chunked linear_cross_entropy against eager torch: losses and gradients, with chunks that do not divide the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_bridge
from torch_bridge import _compat, metrics

torch_bridge.register()

pytestmark = pytest.mark.skipif(_compat.linear_cross_entropy_ops() is None, reason="torch has no chunked linear_cross_entropy before 2.13")


def _inputs(n: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(n, 4), torch.randn(5, 4), torch.randint(0, 5, (n,)), torch.randn(5), torch.rand(5)]


def _losses(device: str, n: int, reduction: str, bias: bool, weighted: bool, ignored: Any) -> list[torch.Tensor]:
    x, w, t, b, class_weight = _inputs(n)
    if ignored == "all":
        t[:] = -100
    elif ignored:
        t[0] = -100
    leaves = [v.to(device).requires_grad_() for v in (x, w, b)]
    given = (leaves[0], leaves[1], t.to(device), leaves[2] if bias else None, class_weight.to(device) if weighted else None)
    reduced, unreduced = _compat.linear_cross_entropy_ops()  # type: ignore[misc]
    if reduction == "none":
        loss = unreduced(*given, -100, 3, "balanced", torch.float32)
    else:
        loss = reduced(*given, reduction, -100, 0.0, 3, "balanced", torch.float32, False, True, True, bias)[0]
    loss.sum().mul(2).backward()
    return [v.detach().cpu() for v in (loss, *(leaf.grad for leaf in leaves[: 3 if bias else 2]))]  # type: ignore[union-attr]


@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize("n", [6, 7])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("bias", "weighted", "ignored"), [(True, True, "one"), (False, False, False)])
def test_losses_and_gradients(n: int, reduction: str, bias: bool, weighted: bool, ignored: Any) -> None:
    before = {k: v for k, v in metrics.COUNTERS.items() if k.startswith("aten::")}
    got = _losses("xla", n, reduction, bias, weighted, ignored)
    for g, e in zip(got, _losses("cpu", n, reduction, bias, weighted, ignored), strict=True):
        torch.testing.assert_close(g, e)
    assert {k: v for k, v in metrics.COUNTERS.items() if k.startswith("aten::")} == before


@pytest.mark.parametrize(("n", "ignored"), [(0, False), (3, "all")])
def test_the_mean_of_no_rows_is_nan(n: int, ignored: Any) -> None:
    for g, e in zip(_losses("xla", n, "mean", True, False, ignored), _losses("cpu", n, "mean", True, False, ignored), strict=True):
        torch.testing.assert_close(g, e, equal_nan=True)


def test_label_smoothing_is_refused_as_on_the_cpu() -> None:
    x, w, t, b, _ = _inputs(3)
    reduced, _ = _compat.linear_cross_entropy_ops()  # type: ignore[misc]
    for device in ("cpu", "xla"):
        given = [v.to(device) for v in (x, w, t, b)]
        with pytest.raises(NotImplementedError, match="does not support label smoothing"):
            reduced(*given, None, "mean", -100, 0.1, 3, "balanced", torch.float32, False, False, False, False)[0].cpu()
