from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.autograd_parity import check_grad
from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.parity import check
from torch_bridge import _compat

aten = torch.ops.aten
torch.manual_seed(0)
X = torch.randn(3, 4, 5)
MAX = 2**63 - 1

CASES = [
    (aten.slice_scatter.default, (X, torch.ones(3, 2, 5), 1, 1, 3)),
    (aten.slice_scatter.default, (X, torch.ones(3, 2, 5), 1, -4, MAX, 2)),
    (aten.slice_scatter.default, (X, torch.ones(3, 4, 2), -1, 1, 5, 3)),
    (aten.slice_scatter.default, (X, torch.ones(3, 4, 0), 2, 4, 1)),
    (aten.slice_scatter.default, (X, torch.ones(3, 4, 5), 2)),
    (aten.slice_scatter.default, (torch.full_like(X, torch.nan), torch.ones(3, 4, 3), 2, 0, 5, 2)),
    (aten.select_scatter.default, (X, torch.ones(3, 5), 1, -1)),
    (aten.select_scatter.default, (X, torch.ones(4, 5), 0, 1)),
    (aten.diagonal_scatter.default, (X[0], torch.ones(4))),
    (aten.diagonal_scatter.default, (X, torch.ones(4, 3), 2, 0, 2)),
    (aten.diagonal_scatter.default, (X, torch.ones(3, 2), -2, 1, 2)),
    (aten.diagonal_scatter.default, (X[0], torch.ones(0), 9)),
    (aten.diag_embed.default, (X[0],)),
    (aten.diag_embed.default, (X[0], 1)),
    (aten.diag_embed.default, (X[0], -2, 0, 2)),
    (aten.diag_embed.default, (torch.tensor([True, False]), 1)),
    (aten.diag_embed.default, (torch.zeros(2, 0), 0)),
    (aten.as_strided_scatter.default, (X, torch.ones(2, 3), [2, 3], [20, 2], 1)),
    (aten.as_strided_scatter.default, (X, torch.ones(0), [0], [1])),
    (aten.slice_backward.default, (torch.ones(3, 2, 5), [3, 4, 5], 1, 1, 3, 1)),
    (aten.slice_backward.default, (torch.ones(3, 4, 2), [3, 4, 5], 2, 1, MAX, 3)),
    (aten.slice_backward.default, (torch.ones(3, 4, 0), [3, 4, 5], -1, 4, 2, 1)),
    (aten.select_backward.default, (torch.ones(3, 5), [3, 4, 5], 1, 2)),
    (aten.select_backward.default, (torch.ones(3, 4), [3, 4, 5], -1, -2)),
    (aten.diagonal_backward.default, (torch.ones(4, 3), [3, 4, 5], 1, 0, 2)),
    (aten.diagonal_backward.default, (torch.ones(3, 3), [3, 4, 5], -1, 1, -1)),
    (aten.unfold_backward.default, (torch.ones(3, 4, 3, 3), [3, 4, 5], 2, 3, 1)),
    (aten.unfold_backward.default, (torch.ones(3, 2, 5, 2), [3, 4, 5], 1, 2, 2)),
]


@pytest.mark.parametrize(("op", "args"), CASES)
@together
def test_values(op, args):
    check(op, *args)


GRADS = [
    (aten.slice_scatter.default, (X, torch.ones(3, 2, 5), 1, 0, 4, 2)),
    (aten.select_scatter.default, (X, torch.ones(3, 5), 1, -1)),
    (aten.diagonal_scatter.default, (X, torch.ones(4, 3), 2, 0, 2)),
    (aten.diag_embed.default, (X[0], 1)),
]


@pytest.mark.parametrize(("op", "args"), GRADS)
@together
def test_gradients(op, args):
    check_grad(op, *args)


def test_as_strided_scatter_gradient():
    """Not against torch 2.13, which gives `self` the gradient of the positions that were overwritten."""
    import jax
    import jax.numpy as jnp

    import torch_bridge.lowerings as lowerings

    fn = lowerings.lookup(aten.as_strided_scatter.default).fn
    with _compat.enable_x64():
        _, pull = jax.vjp(lambda x, src: fn(x, src, [2], [2], 1), jnp.ones(6), jnp.zeros(2))
        by_self, by_src = pull(jnp.arange(6.0))
    assert by_self.tolist() == [0, 0, 2, 0, 4, 5]
    assert by_src.tolist() == [1, 3]
