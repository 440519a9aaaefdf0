from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.nn_checks import run

aten = torch.ops.aten
torch.manual_seed(0)
B, H = 3, 4


def biases(gates: int, wanted: bool):
    return (torch.randn(gates * H), torch.randn(gates * H)) if wanted else (None, None)


@pytest.mark.parametrize("has_bias", [True, False])
def test_lstm_cell(has_bias):
    x, h, cx = torch.randn(B, 4 * H), torch.randn(B, 4 * H), torch.randn(B, H)
    ib, hb = biases(4, has_bias)
    gates = (x + h + (ib + hb if has_bias else 0)).requires_grad_()
    leaf = cx.clone().requires_grad_()
    i, f, g, o = gates.chunk(4, 1)
    cy = f.sigmoid() * leaf + i.sigmoid() * g.tanh()
    hy = o.sigmoid() * cy.tanh()
    got = run(aten._thnn_fused_lstm_cell.default, x, h, cx, ib, hb)
    torch.testing.assert_close(got[:2], [hy.detach(), cy.detach()])
    for gh, gc in [(torch.randn(B, H), torch.randn(B, H)), (torch.randn(B, H), None), (None, torch.randn(B, H))]:
        outs, seeds = zip(*[(a, b) for a, b in ((hy, gh), (cy, gc)) if b is not None], strict=True)
        grad_gates, grad_cx = torch.autograd.grad(outs, (gates, leaf), seeds, retain_graph=True)
        back = run(aten._thnn_fused_lstm_cell_backward_impl.default, gh, gc, cx, got[1], got[2], has_bias)
        torch.testing.assert_close(back[:2], [grad_gates, grad_cx])
        assert (back[2] is not None) == has_bias
        if has_bias:
            torch.testing.assert_close(back[2], grad_gates.sum(0))


@pytest.mark.parametrize("has_bias", [True, False])
def test_gru_cell(has_bias):
    x, h, hx = (torch.randn(B, n * H).requires_grad_() for n in (3, 3, 1))
    ib, hb = biases(3, has_bias)
    xi, hi = (t if b is None else t + b for t, b in ((x, ib), (h, hb)))
    (ir, iz, in_), (hr, hz, hn) = xi.chunk(3, 1), hi.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (in_ + r * hn).tanh()
    hy = n + z * (hx - n)
    got = run(aten._thnn_fused_gru_cell.default, x, h, hx, ib, hb)
    torch.testing.assert_close(got[0], hy.detach())
    g = torch.randn(B, H)
    expected = torch.autograd.grad(hy, (x, h, hx), g)
    back = run(aten._thnn_fused_gru_cell_backward.default, g, got[1], has_bias)
    torch.testing.assert_close(tuple(back[:3]), expected)
    if has_bias:
        torch.testing.assert_close(back[3:], [expected[0].sum(0), expected[1].sum(0)])
    else:
        assert back[3:] == [None, None]
