from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.parity import check, to_torch
from torch_bridge import _compat
from torch_bridge.ir.dtypes import Scalar

aten = torch.ops.aten
T = torch.tensor

CASES = [
    (aten.arange.default, (5,), {}),
    (aten.arange.default, (0,), {}),
    (aten.arange.default, (4.2,), {}),
    (aten.arange.default, (5,), {"dtype": torch.bfloat16}),
    (aten.arange.default, (5.5,), {"dtype": torch.int64}),
    (aten.arange.default, (5.5,), {"dtype": torch.int32}),
    (aten.arange.start, (2, 7), {}),
    (aten.arange.start, (-1.5, 2), {}),
    (aten.arange.start_step, (1, 10, 3), {}),
    (aten.arange.start_step, (10, 1, -2), {}),
    (aten.arange.start_step, (10, 1, -2), {"dtype": torch.uint8}),
    (aten.arange.start_step, (0, 1, 0.1), {}),
    (aten.arange.start_step, (0, 1, 0.1), {"dtype": torch.int32}),
    (aten.arange.start_step, (2, 5, 0.9), {"dtype": torch.uint8}),
    (aten.arange.start_step, (0.0, 1.0, 0.3), {"dtype": torch.float64}),
    (aten.arange.start_step, (2**53, 2**53 + 7, 3), {}),
    (aten.arange.start_step, (0, 10, 2), {"dtype": torch.float16}),
    (aten.range.default, (1, 4), {}),
    (aten.range.step, (1, 4, 0.5), {}),
    (aten.range.step, (4, 1, -1), {"dtype": torch.int64}),
    (aten.full.default, ([2, 3], 1.5), {}),
    (aten.full.default, ([2], 7), {}),
    (aten.full.default, ([], True), {}),
    (aten.full.default, ([2], 1 + 2j), {}),
    (aten.full.default, ([0, 2], 2.7), {"dtype": torch.int32}),
    (aten.full.default, ([2], 2.7), {"dtype": torch.int32}),
    (aten.full.default, ([2], float("nan")), {"dtype": torch.bfloat16}),
    (aten.scalar_tensor.default, (3,), {}),
    (aten.scalar_tensor.default, (2.5,), {"dtype": torch.int64}),
    (aten.zeros.default, ([2, 3],), {}),
    (aten.zeros.default, ([2, 3],), {"dtype": torch.bool}),
    (aten.ones.default, ([],), {"dtype": torch.int8}),
    (aten.ones.default, ([2],), {}),
    (aten.eye.default, (3,), {}),
    (aten.eye.default, (0,), {}),
    (aten.eye.m, (2, 4), {"dtype": torch.bool}),
    (aten.eye.m, (4, 2), {"dtype": torch.int64}),
    (aten.tril_indices.default, (3, 4), {}),
    (aten.tril_indices.default, (3, 4, -1), {"dtype": torch.int32}),
    (aten.triu_indices.default, (3, 4, 1), {}),
    (aten.triu_indices.default, (0, 4, 1), {}),
    (aten.linspace.default, (0, 1, 7), {}),
    (aten.linspace.default, (-3, 10.5, 8), {"dtype": torch.float64}),
    (aten.linspace.default, (0, 10, 7), {"dtype": torch.int64}),
    (aten.linspace.default, (2.9, -10.9, 6), {"dtype": torch.int32}),
    (aten.linspace.default, (0, 1, 6), {"dtype": torch.bfloat16}),
    (aten.linspace.default, (3, 9, 1), {}),
    (aten.linspace.default, (3, 9, 0), {}),
    (aten.linspace.default, (0, 1 + 2j, 5), {}),
    (aten.linspace.Tensor_Tensor, (T(1), T(2.0), 5), {}),
    (aten.linspace.Tensor_Scalar, (T(1.0), 2, 5), {}),
    (aten.linspace.Scalar_Tensor, (1, T(2.0, dtype=torch.float64), 5), {}),
    (aten.logspace.default, (0, 3, 4), {}),
    (aten.logspace.default, (-1, 2.5, 6, 2.0), {"dtype": torch.float64}),
    (aten.logspace.default, (0, 4, 5, 2.0), {"dtype": torch.int64}),
    (aten.logspace.default, (0, 4, 1, 2.0), {}),
    (aten.logspace.Tensor_Tensor, (T(0.0), T(2.0), 5), {}),
]


@pytest.mark.parametrize(("op", "args", "kwargs"), CASES)
@pytest.mark.filterwarnings("ignore:torch.range")
@together
def test_values(op, args, kwargs):
    check(op, *args, **kwargs)


def test_empty_has_shape_and_dtype():
    import torch_bridge.lowerings as lowerings

    with _compat.enable_x64():
        for op, args in ((aten.empty.memory_format, ()), (aten.empty_strided.default, ([3, 1],)), (aten.empty_permuted.default, ([0, 1],))):
            out = to_torch(lowerings.lookup(op).fn([2, 3], *args, dtype=torch.int16))
            assert out.shape == (2, 3) and out.dtype == torch.int16


def test_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        for op, args in ((aten.ones.default, ([2],)), (aten.full.default, ([2], 1.5)), (aten.arange.default, (2.5,))):
            check(op, *args)
        check(aten.linspace.default, 0, 1, 3)
        check(aten.full.default, [1], 1j)
    finally:
        torch.set_default_dtype(torch.float32)


def test_lifted_numbers():
    import jax
    import jax.numpy as jnp

    import torch_bridge.lowerings as lowerings

    with _compat.enable_x64():
        full, line = (lowerings.lookup(op).fn for op in (aten.full.default, aten.linspace.default))
        out = jax.jit(lambda v: (full([2], Scalar(int, v)), line(Scalar(int, v), Scalar(int, v + 3), 4, dtype=torch.int32)))(jnp.asarray(2))
        assert out[0].tolist() == [2, 2] and out[0].dtype == jnp.int64
        assert out[1].tolist() == [2, 3, 4, 5] and out[1].dtype == jnp.int32
