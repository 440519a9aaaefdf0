from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.nn_checks import check_gradients
from tests.torch_bridge.lowerings.parity import check

aten = torch.ops.aten
torch.manual_seed(0)
inf, nan = float("inf"), float("nan")

# kernel, stride, padding, ceil_mode, count_include_pad, divisor_override
AVG2D = [
    ([2, 2], [], 0, False, True, None),
    ([3, 2], [2, 1], [1, 0], False, True, None),
    ([3, 3], [2, 2], [1, 1], True, False, None),
    ([3, 3], [2, 2], [1, 1], True, True, None),
    ([2, 3], [3, 2], [1, 1], True, True, None),
    ([3], [1], [1], False, True, 5),
    ([2, 2], [2, 2], [0, 0], True, False, -3),
    ([9, 8], [1, 1], [0, 0], False, True, None),
]


@pytest.mark.parametrize("args", AVG2D)
@together
def test_avg_pool2d(args):
    x = torch.randn(2, 3, 9, 8)
    for y in (x, x[0], x.bfloat16()):
        check(aten.avg_pool2d.default, y, *args)
    g = torch.randn_like(aten.avg_pool2d(x, *args))
    check(aten.avg_pool2d_backward.default, g, x, args[0], args[1], args[2] or [0], *args[3:])
    check_gradients(aten.avg_pool2d.default, x, *args)


@together
def test_more_avg_pools():
    x = torch.randn(2, 3, 7, 6, 5)
    for args in [([2, 2, 2], [], [0], False, True, None), ([3, 2, 3], [2, 1, 2], [1, 1, 1], True, False, None)]:
        check(aten.avg_pool3d.default, x, *args)
        g = torch.randn_like(aten.avg_pool3d(x, *args))
        check(aten.avg_pool3d_backward.default, g, x, args[0], args[1], args[2], *args[3:])
    check(aten.avg_pool1d.default, x[0, 0], [3], [2], [1], True, False)
    check(aten.avg_pool1d.default, torch.randn(2, 3, 100), [40], [3], [5])
    check(aten.avg_pool2d.default, torch.randint(-50, 50, (2, 6, 6)), [3, 3], [2, 2], [1, 1])
    check(aten.avg_pool2d.default, torch.tensor([[[1.0, inf, 2.0, nan], [0.0, 1.0, 2.0, 3.0]]]), [2, 1])


@pytest.mark.parametrize("out", [[1, 1], [3, 4], [5, 7], [12, 3], [9, 8]])
@together
def test_adaptive_avg_pools(out):
    x = torch.randn(2, 3, 9, 8)
    for y in (x, x[0], x.bfloat16(), x.double()):
        check(aten._adaptive_avg_pool2d.default, y, out)
    check(aten._adaptive_avg_pool2d_backward.default, torch.randn(2, 3, *out), x)
    x = torch.randn(2, 3, 4, 9, 8)
    check(aten._adaptive_avg_pool3d.default, x, [3, *out])
    check(aten._adaptive_avg_pool3d_backward.default, torch.randn(2, 3, 3, *out), x)
    check(aten.adaptive_avg_pool1d.default, x[0, 0], out[:1])


# kernel, stride, padding, dilation, ceil_mode
MAX2D = [
    ([2, 2], [], 0, 1, False),
    ([3, 2], [2, 1], [1, 1], [1, 2], False),
    ([3, 3], [2, 2], [1, 1], [1, 1], True),
    ([3, 3], [1, 2], [1, 1], [3, 2], True),
    ([2, 2], [3, 3], [1, 0], [1, 1], True),
    ([5, 4], [1, 1], [2, 2], [1, 1], False),
]


def ties(*shape: int) -> torch.Tensor:
    return torch.randint(0, 3, shape).float()


def special(*shape: int) -> torch.Tensor:
    return torch.tensor([nan, -inf, -inf, -inf, 1.0, inf])[torch.randint(0, 6, shape)]


@pytest.mark.parametrize("args", MAX2D)
@together
def test_max_pool2d(args):
    x = torch.randn(2, 3, 9, 8)
    for y in (x, x[0], x.bfloat16(), ties(2, 3, 9, 8), special(2, 3, 9, 8), torch.full((1, 9, 8), -inf)):
        check(aten.max_pool2d_with_indices.default, y, *args)
    check(aten.max_pool2d_with_indices.default, ties(2, 3, 9, 8).long() - 5, *args)


@pytest.mark.parametrize("args", MAX2D)
@together
def test_max_pool2d_backward(args):
    x = ties(2, 3, 9, 8)
    y, indices = aten.max_pool2d_with_indices(x, *args)
    kernel, stride, padding, dilation, ceil_mode = args
    rest = kernel, stride or kernel, padding or [0, 0], [dilation] if isinstance(dilation, int) else dilation, ceil_mode
    check(aten.max_pool2d_with_indices_backward.default, torch.randn_like(y), x, *rest, indices)
    check_gradients(aten.max_pool2d_with_indices.default, x, *args)


@together
def test_long_windows():
    x = ties(2, 3, 1, 200)
    for x in (ties(2, 3, 1, 200), special(2, 3, 1, 200), torch.randn(2, 3, 1, 200)):
        check(aten.max_pool2d_with_indices.default, x, [1, 200])
        check(aten.max_pool2d_with_indices.default, x, [1, 50], [1, 7], [0, 20], [1, 3], True)
        check(aten.max_pool2d_with_indices.default, x, [1, 64], [1, 5], [0, 9])
    y, indices = aten.max_pool2d_with_indices(x, [1, 50], [1, 7])
    check(aten.max_pool2d_with_indices_backward.default, torch.randn_like(y), x, [1, 50], [1, 7], [0, 0], [1, 1], False, indices)


@together
def test_max_pool3d():
    for x in (torch.randn(2, 3, 5, 6, 7), special(2, 3, 5, 6, 7)):
        for args in [([2, 2, 2], [], 0, 1, False), ([3, 2, 3], [2, 1, 2], [1, 1, 1], [1, 2, 1], True)]:
            check(aten.max_pool3d_with_indices.default, x, *args)
            y, indices = aten.max_pool3d_with_indices(x, *args)
            rest = args[0], args[1] or args[0], args[2] or [0, 0, 0], args[3] if args[3] != 1 else [1, 1, 1], args[4]
            check(aten.max_pool3d_with_indices_backward.default, torch.randn_like(y), x, *rest, indices)


@pytest.mark.parametrize("out", [[1, 1], [3, 4], [5, 7], [12, 3], [9, 8]])
@together
def test_adaptive_max_pools(out):
    for x in (torch.randn(2, 3, 9, 8), ties(3, 9, 8), special(2, 3, 9, 8)):
        check(aten.adaptive_max_pool2d.default, x, out)
        y, indices = aten.adaptive_max_pool2d(x, out)
        check(aten.adaptive_max_pool2d_backward.default, torch.randn_like(y), x, indices)
    x = torch.randn(2, 3, 4, 9, 8)
    check(aten.adaptive_max_pool3d.default, x, [3, *out])
    y, indices = aten.adaptive_max_pool3d(x, [3, *out])
    check(aten.adaptive_max_pool3d_backward.default, torch.randn_like(y), x, indices)


@together
def test_empty_batch():
    x = torch.randn(0, 3, 9, 8)
    check(aten.avg_pool2d.default, x, [2, 2])
    check(aten.max_pool2d_with_indices.default, x, [2, 2])
    check(aten._adaptive_avg_pool2d.default, x, [2, 2])
