from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.autograd_parity import check_grad
from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.parity import check

aten = torch.ops.aten
X = torch.arange(24.0).reshape(2, 3, 4)
S = torch.tensor(3.0)
EMPTY = torch.zeros(0, 3)
MAX = 2**63 - 1
C = torch.complex(torch.randn(2, 4), torch.randn(2, 4))

VIEWS = [
    (aten.view, (X, [6, 4])),
    (aten.view, (X, [-1, 2])),
    (aten.view, (EMPTY, [-1, 3])),
    (aten.view, (S, [1, 1])),
    (aten.view, (torch.ones(1), [])),
    (aten.permute, (X, [2, 0, 1])),
    (aten.permute, (X, [-1, 0, -2])),
    (aten.permute, (S, [])),
    (aten.expand, (torch.ones(3, 1), [2, -1, 4])),
    (aten.expand, (S, [2, 2])),
    (aten.expand, (torch.zeros(1, 3), [0, 3])),
    (aten.squeeze, (torch.ones(1, 3, 1),)),
    (aten.unsqueeze, (X, -1)),
    (aten.unsqueeze, (X, 0)),
    (aten.unsqueeze, (S, -1)),
    (aten.diagonal, (X,)),
    (aten.diagonal, (X, 1, 0, 2)),
    (aten.diagonal, (X, -1, -1, 0)),
    (aten.diagonal, (X, 5, 1, 2)),
    (aten.diagonal, (X, -2, 1, 2)),
    (aten.diagonal, (EMPTY,)),
    (aten.unfold, (X, 2, 2, 2)),
    (aten.unfold, (X, -1, 3, 1)),
    (aten.unfold, (X, 0, 1, 5)),
    (aten.unfold, (torch.arange(100.0), 0, 40, 3)),
    (aten.unfold, (torch.arange(150.0).reshape(75, 2), 0, 34, 1)),
    (aten.unfold, (X, 1, 0, 1)),
    (aten.unfold, (S, 0, 1, 1)),
    (aten.unfold, (S, 0, 0, 1)),
    (aten.as_strided, (X, [2, 3], [12, 4])),
    (aten.as_strided, (X, [4, 3], [1, 4], 12)),
    (aten.as_strided, (X, [5, 2], [1, 1], 3)),
    (aten.as_strided, (X, [3, 2, 4], [0, 12, 2], 1)),
    (aten.as_strided, (X, [], [], 7)),
    (aten.as_strided, (X, [0, 3], [3, 1])),
    (aten.as_strided, (X, [3, 1, 2], [7, 99, 3], 2)),
    (aten.detach, (X,)),
    (aten.alias, (X,)),
    (aten.t, (X[0],)),
    (aten.t, (X[0, 0],)),
    (aten.t, (S,)),
    (aten._reshape_alias, (X, [4, 6], [6, 1])),
]


@pytest.mark.parametrize(("packet", "args"), VIEWS)
@together
def test_view_and_its_copy(packet, args):
    check(packet.default, *args)
    copy = getattr(aten, packet.__name__.lstrip("_") + "_copy", None) or getattr(aten, packet.__name__ + "_copy")
    check(copy.default, *args)


OTHERS = [
    (aten._unsafe_view.default, (X, [3, 8])),
    (aten.lift_fresh.default, (X,)),
    (aten.lift_fresh_copy.default, (X,)),
    (aten.lift.default, (X,)),
    (aten.transpose.int, (X, 0, -1)),
    (aten.transpose.int, (S, 0, -1)),
    (aten.transpose_copy.int, (X, 1, 2)),
    (aten.squeeze.dim, (torch.ones(1, 3, 1), -1)),
    (aten.squeeze.dim, (torch.ones(1, 3, 1), 1)),
    (aten.squeeze.dim, (S, -1)),
    (aten.squeeze.dims, (torch.ones(1, 3, 1), [0, 1, -1])),
    (aten.squeeze.dims, (torch.ones(1, 3, 1), [])),
    (aten.squeeze_copy.dim, (torch.ones(1, 3, 1), 0)),
    (aten.squeeze_copy.dims, (torch.ones(1, 3, 1), [2])),
    (aten.select.int, (X, 1, -1)),
    (aten.select.int, (X, -1, 2)),
    (aten.select_copy.int, (X, 0, 1)),
    (aten.slice.Tensor, (X, 1)),
    (aten.slice.Tensor, (X, 1, 1, MAX)),
    (aten.slice.Tensor, (X, -1, -3, -1, 2)),
    (aten.slice.Tensor, (X, 2, 3, 1)),
    (aten.slice.Tensor, (X, 2, -99, 99, 3)),
    (aten.slice.Tensor, (X, 2, 7, 9)),
    (aten.slice_copy.Tensor, (X, 0, 1)),
    (aten.narrow_copy.default, (X, 1, 1, 2)),
    (aten.narrow_copy.default, (X, -1, -2, 1)),
    (aten.split.Tensor, (X, 3, -1)),
    (aten.split.Tensor, (X, 9, 1)),
    (aten.split.Tensor, (EMPTY, 2, 0)),
    (aten.split.Tensor, (EMPTY, 0, 0)),
    (aten.split_copy.Tensor, (X, 2, 1)),
    (aten.unsafe_split.Tensor, (X, 2, 1)),
    (aten.split_with_sizes.default, (X, [1, 0, 3], 2)),
    (aten.split_with_sizes_copy.default, (X, [1, 2], 1)),
    (aten.unsafe_split_with_sizes.default, (X, [1, 2], -2)),
    (aten.unbind.int, (X, -1)),
    (aten.unbind.int, (EMPTY,)),
    (aten.unbind_copy.int, (X,)),
    (aten.view.dtype, (X, torch.int32)),
    (aten.view.dtype, (X, torch.float64)),
    (aten.view.dtype, (X, torch.int16)),
    (aten.view.dtype, (X, torch.uint8)),
    (aten.view.dtype, (X, torch.complex64)),
    (aten.view.dtype, (C, torch.float32)),
    (aten.view.dtype, (C, torch.int64)),
    (aten.view.dtype, (C, torch.complex128)),
    (aten.view.dtype, (S, torch.int32)),
    (aten.view.dtype, (X > 3, torch.uint8)),
    (aten.view.dtype, ((X > 3).to(torch.uint8), torch.bool)),
    (aten.view.dtype, (X.bfloat16(), torch.float32)),
    (aten.view_copy.dtype, (X.double(), torch.bfloat16)),
]


@pytest.mark.parametrize("through", [torch.int64, torch.complex64, torch.float64])
def test_bytes_seen_through_a_wider_dtype(through):
    """XLA joins two casts of bits, and fails."""
    x = torch.full((8,), 3, dtype=torch.int32, device="xla") + torch.zeros(8, dtype=torch.int32, device="xla")
    assert x.view(through).view(torch.uint8).cpu().tolist() == [3, 0, 0, 0] * 8
    assert x.view(torch.uint8).view(through).view(torch.int16).cpu().tolist() == [3, 0] * 8


@pytest.mark.parametrize(("op", "args"), OTHERS)
@together
def test_other_views(op, args):
    check(op, *args)


GRADS = [
    (aten.slice.Tensor, (X, 1, 0, 3, 2)),
    (aten.as_strided.default, (X, [5, 2], [1, 1], 3)),
    (aten.as_strided.default, (X, [3, 2, 4], [0, 12, 2], 1)),
    (aten.diagonal.default, (X, 1, 1, 2)),
    (aten.unfold.default, (X, 2, 3, 1)),
    (aten.unfold.default, (torch.randn(150), 0, 34, 1)),
    (aten.expand.default, (torch.randn(3, 1), [2, 3, 4])),
    (aten.split_with_sizes.default, (X, [1, 3], 2)),
]


@pytest.mark.parametrize(("op", "args"), GRADS)
@together
def test_gradients(op, args):
    check_grad(op, *args)
