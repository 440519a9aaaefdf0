from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.nn_checks import check_gradients
from tests.torch_bridge.lowerings.parity import check

aten = torch.ops.aten
torch.manual_seed(0)

# input, weight, stride, padding, dilation, transposed, output_padding, groups
CASES = {
    "1d": ((2, 3, 9), (4, 3, 3), [1], [0], [1], False, [0], 1),
    "1d stride": ((2, 4, 9), (6, 2, 3), [2], [3], [2], False, [0], 2),
    "2d": ((2, 3, 8, 7), (4, 3, 3, 2), [2, 1], [1, 0], [1, 2], False, [0, 0], 1),
    "2d leftover": ((1, 2, 8, 8), (4, 2, 3, 3), [3, 3], [0, 1], [1, 1], False, [0, 0], 1),
    "depthwise": ((2, 4, 6, 6), (8, 1, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 4),
    "1x1": ((2, 3, 4, 4), (5, 3, 1, 1), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "one number": ((2, 3, 8, 7), (4, 3, 3, 3), [2], [1], [1], False, [0], 1),
    "3d": ((1, 2, 5, 6, 4), (4, 1, 2, 3, 3), [1, 2, 1], [1, 1, 0], [2, 1, 1], False, [0, 0, 0], 2),
    "transposed 1d": ((2, 3, 5), (3, 4, 3), [2], [1], [1], True, [1], 1),
    "transposed 2d": ((2, 4, 5, 4), (4, 3, 3, 2), [2, 3], [1, 0], [1, 2], True, [1, 2], 2),
    "transposed 3d": ((1, 2, 3, 2, 3), (2, 3, 2, 2, 2), [2, 1, 2], [0, 1, 0], [1, 1, 1], True, [1, 0, 0], 1),
    "transposed, more padding than kernel": ((1, 2, 6), (2, 2, 2), [3], [3], [1], True, [2], 1),
    "transposed, output padding above the stride": ((1, 2, 6), (2, 3, 3), [1], [1], [3], True, [2], 1),
    "transposed 4x4 of stride 2": ((2, 3, 4, 5), (3, 2, 4, 4), [2, 2], [1, 1], [1, 1], True, [0, 0], 1),
    "depthwise, strided, dilated": ((2, 3, 9, 8), (6, 1, 3, 2), [2, 3], [2, 1], [2, 1], False, [0, 0], 3),
    "depthwise 1d": ((2, 5, 9), (5, 1, 4), [1], [3], [1], False, [0], 5),
    "depthwise 3d": ((1, 2, 4, 5, 4), (2, 1, 3, 2, 1), [1, 2, 1], [1, 0, 0], [1, 1, 1], False, [0, 0, 0], 2),
    "depthwise 6x6": ((2, 2, 8, 9), (2, 1, 6, 6), [1, 2], [2, 0], [1, 1], False, [0, 0], 2),
    "depthwise 8x8": ((1, 2, 9, 8), (2, 1, 8, 8), [1, 1], [1, 2], [1, 1], False, [0, 0], 2),
    "depthwise transposed": ((2, 4, 5, 4), (4, 1, 3, 3), [2, 2], [1, 1], [1, 1], True, [1, 0], 4),
    "depthwise transposed, more outputs": ((2, 3, 4, 4), (3, 2, 3, 2), [2, 1], [1, 0], [1, 2], True, [1, 1], 3),
    "groups": ((2, 6, 7, 6), (9, 2, 3, 3), [2, 1], [1, 1], [1, 2], False, [0, 0], 3),
}
EMPTY_BATCH = ((0, 3, 8), (4, 3, 3), [1], [0], [1], False, [0], 1)

NO_CHANNELS = ((2, 0, 8), (4, 0, 3), [1], [0], [1], False, [0], 1)


def tensors(case, dtype):
    x, w, *rest = case
    channels = w[1] * rest[-1] if rest[3] else w[0]
    return torch.randn(x).to(dtype), torch.randn(w).to(dtype), torch.randn(channels).to(dtype), rest


@pytest.mark.core(keep=11)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward(name, dtype):
    x, w, b, rest = tensors(CASES[name], dtype)
    low = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    check(aten.convolution.default, x, w, b, *rest, **low)
    check(aten.convolution.default, x, w, None, *rest, **low, jit=False)


@pytest.mark.parametrize("name", CASES)
@together
def test_backward(name):
    x, w, _, rest = tensors(CASES[name], torch.float32)
    g = torch.randn_like(aten.convolution(x, w, None, *rest))
    sizes = [g.shape[1]]
    check(aten.convolution_backward.default, g, x, w, sizes, *rest, [True, True, True], rtol=1e-4, atol=1e-4)


@together
def test_variants():
    x, w, b, rest = tensors(CASES["2d"], torch.float64)
    check(aten.convolution.default, x, w, b, *rest)
    check(aten._convolution.default, x, w, b, *rest, False, False, False, False)
    x, w, b, rest = tensors(EMPTY_BATCH, torch.float32)
    check(aten.convolution.default, x, w, b, *rest)
    g = torch.randn_like(aten.convolution(x, w, b, *rest))
    check(aten.convolution_backward.default, g, x, w, [4], *rest, [True, True, True])
    x, w, _, rest = tensors(NO_CHANNELS, torch.float32)
    check(aten.convolution.default, x, w, None, *rest)
    check(aten.conv_tbc.default, torch.randn(7, 2, 3), torch.randn(3, 3, 5), torch.randn(5), 1)


@pytest.mark.parametrize("name", ["1d stride", "depthwise", "transposed 2d"])
@together
def test_gradients(name):
    x, w, b, rest = tensors(CASES[name], torch.float32)
    check_gradients(aten.convolution.default, x, w, b, *rest, rtol=1e-4, atol=1e-4)
