from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.parity import check, to_jax
from torch_bridge import _compat
from torch_bridge.lowerings.segments import hash_tensor

aten = torch.ops.aten
torch.manual_seed(0)
X = torch.randn(7, 3)
LENGTHS = torch.tensor([2, 0, 4])  # the last position belongs to no segment
OFFSETS = torch.tensor([0, 2, 2, 7])
REDUCTIONS = ("sum", "mean", "max", "min", "prod")


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("initial", [None, 2])
@together
def test_segment_reduce(reduce: str, initial: int | None) -> None:
    full = torch.tensor([2, 0, 5])
    check(aten.segment_reduce.default, X, reduce, lengths=full, initial=initial)
    check(aten.segment_reduce.default, X, reduce, offsets=OFFSETS, initial=initial)
    check(aten.segment_reduce.default, X.reshape(1, 7, 3), reduce, lengths=full[None], axis=1, initial=initial)


@together
def test_positions_after_the_last_segment_belong_to_none() -> None:
    check(aten.segment_reduce.default, X, "sum", lengths=LENGTHS, unsafe=True)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@together
def test_segment_reduce_backward(reduce: str) -> None:
    x = X.clone()
    x[3], x[4], x[0, 0] = 0.0, 0.0, 0.0  # zeros for prod, ties for max and min
    lengths = torch.tensor([2, 1, 4])
    out = torch.segment_reduce(x, reduce, lengths=lengths)
    check(aten._segment_reduce_backward.default, torch.randn_like(out), out, x, reduce, lengths=lengths)


@pytest.mark.parametrize("x", [X, X.double(), X.bfloat16(), torch.arange(-3, 9).reshape(3, 4), X > 0, torch.tensor(2.5)])
@together
def test_hash_tensor(x: torch.Tensor) -> None:
    check(aten.hash_tensor.default, x)
    if x.ndim:
        check(aten.hash_tensor.default, x, [1], keepdim=True)


def test_an_unknown_hash_is_refused() -> None:
    with _compat.enable_x64(), pytest.raises(NotImplementedError, match="mode=1: only mode=0"):
        hash_tensor(to_jax(X), mode=1)
