"""CTC loss lowerings against eager torch: lengths of all kinds, impossible targets, gradients."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

import torch_bridge.lowerings as lowerings
from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.parity import check, to_jax, to_torch
from torch_bridge import _compat

aten = torch.ops.aten

TARGETS = torch.tensor([[1, 2, 2], [1, 1, 1], [3, 4, 1], [2, 2, 2], [4, 1, 3]])
CASES = {  # name -> targets, input lengths, target lengths, blank
    "full": (TARGETS, [7] * 5, [3] * 5, 0),
    "ragged": (TARGETS, [7, 5, 6, 5, 3], [3, 3, 2, 1, 2], 0),
    "no targets": (TARGETS, [7, 5, 6, 5, 3], [0] * 5, 0),
    "some empty": (TARGETS, [7, 5, 6, 5, 3], [0, 1, 0, 2, 3], 0),
    "impossible": (TARGETS, [7, 3, 0, 4, 0], [3, 3, 2, 3, 0], 0),
    "other blank": (TARGETS, [7, 5, 6, 6, 3], [3, 3, 3, 3, 2], 5),
    "concatenated": (torch.tensor([1, 2, 2, 1, 1, 3, 4, 2]), [7, 5, 6, 5, 7], [3, 2, 1, 0, 2], 0),
    "narrow": (TARGETS, [7] * 5, [1, 2, 1, 1, 2], 0),
}


def log_probs(dtype=torch.float32):
    return torch.randn(7, 5, 6, generator=torch.Generator().manual_seed(0), dtype=dtype).log_softmax(-1)


def low(op):
    return lowerings.lookup(op).fn


def alphas_to_compare(alpha, input_lengths, target_lengths):
    """torch leaves the alphas beyond an input's or a target's length uninitialised."""
    return [a[:t, : 2 * s + 1] for a, t, s in zip(alpha, input_lengths, target_lengths, strict=True)]


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in CASES), ("ragged", torch.float64)])
def test_forward(name, dtype):
    targets, inputs, lengths, blank = CASES[name]
    expected = aten._ctc_loss(log_probs(dtype), targets, inputs, lengths, blank)
    with _compat.enable_x64():
        nll, alpha = (to_torch(x) for x in low(aten._ctc_loss.default)(to_jax(log_probs(dtype)), to_jax(targets), inputs, lengths, blank))
    torch.testing.assert_close(nll, expected[0])
    assert alpha.shape == expected[1].shape
    for a, e in zip(alphas_to_compare(alpha, inputs, lengths), alphas_to_compare(expected[1], inputs, lengths), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize(("name", "zero_infinity"), [*((name, name == "impossible") for name in CASES), ("ragged", True)])
@together
def test_backward(name, zero_infinity):
    targets, inputs, lengths, blank = CASES[name]
    lp = log_probs()
    nll, alpha = aten._ctc_loss(lp, targets, inputs, lengths, blank)
    grad = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0])
    # The values torch left uninitialised must not matter, so they become NaN-free noise for both.
    check(
        aten._ctc_loss_backward.default,
        grad,
        lp,
        targets,
        inputs,
        lengths,
        nll,
        torch.nan_to_num(alpha),
        blank,
        zero_infinity,
        rtol=1e-4,
        atol=1e-5,
    )


def test_impossible_targets_have_no_gradient():
    """Without zero_infinity torch gives NaN too, except where it reads memory that it never wrote (inputs shorter than T)."""
    targets, inputs, lengths, blank = CASES["impossible"]
    args = (to_jax(log_probs()), to_jax(targets), inputs, lengths)
    with _compat.enable_x64():
        nll, alpha = low(aten._ctc_loss.default)(*args, blank)
        got = to_torch(low(aten._ctc_loss_backward.default)(to_jax(torch.ones(5)), *args, nll, alpha, blank))
    assert to_torch(nll).isinf().tolist() == [False, True, True, True, False]
    assert got.isnan().all(-1).sum(0).tolist() == [0, 3, 0, 4, 0] and got.isnan().any(-1).sum() == 7


@pytest.mark.parametrize("name", ["ragged", "impossible", "concatenated"])
def test_lengths_as_tensors(name):
    """The traced-lengths overloads give the same losses and gradients; only the alphas are wider."""
    targets, inputs, lengths, blank = CASES[name]
    lp, grad = log_probs(), torch.ones(5)
    nll, alpha = aten._ctc_loss(lp, targets, inputs, lengths, blank)
    expected = aten._ctc_loss_backward(grad, lp, targets, inputs, lengths, nll, alpha, blank, True)

    def both(lp, targets, inputs, lengths, grad):
        nll, alpha = low(aten._ctc_loss.Tensor)(lp, targets, inputs, lengths, blank, True)
        return nll, low(aten._ctc_loss_backward.Tensor)(grad, lp, targets, inputs, lengths, nll, alpha, blank, True)

    with _compat.enable_x64():
        got = jax.jit(both)(*map(to_jax, (lp, targets, torch.tensor(inputs), torch.tensor(lengths), grad)))
    torch.testing.assert_close(to_torch(got[0]), nll)
    torch.testing.assert_close(to_torch(got[1]), expected, rtol=1e-4, atol=1e-5)


def test_gradient_through_log_softmax():
    targets, inputs, lengths, blank = CASES["ragged"]
    x = torch.randn(7, 5, 5, generator=torch.Generator().manual_seed(1), requires_grad=True)
    torch.nn.functional.ctc_loss(x.log_softmax(-1), targets, inputs, lengths, blank, reduction="sum").backward()
    with _compat.enable_x64():
        got = jax.grad(lambda v: low(aten._ctc_loss.default)(jax.nn.log_softmax(v), to_jax(targets), inputs, lengths, blank)[0].sum())(
            to_jax(x)
        )
    np.testing.assert_allclose(np.asarray(got), x.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_no_batch_and_no_time():
    with _compat.enable_x64():
        nll, alpha = low(aten._ctc_loss.default)(to_jax(torch.empty(0, 2, 3)), to_jax(TARGETS[:2]), [0, 0], [0, 1])
    assert to_torch(nll).tolist() == [0.0, float("inf")] and alpha.shape == (2, 0, 3)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("autocasts", [False, True])
def test_lengths_may_stay_on_the_cpu(reduction, autocasts):
    lengths = torch.tensor([7, 5, 6, 5, 5]), torch.tensor([3, 3, 2, 1, 2])
    x, y = (torch.randn(7, 5, 6, generator=torch.Generator().manual_seed(1)).to(d).requires_grad_() for d in ("cpu", "xla"))
    expected = torch.nn.functional.ctc_loss(x.log_softmax(-1), TARGETS, *lengths, reduction=reduction)
    with torch.autocast("xla", enabled=autocasts):
        got = torch.nn.functional.ctc_loss(y.log_softmax(-1), TARGETS.to("xla"), *lengths, reduction=reduction)
    for loss in (expected, got):
        loss.sum().backward()
    torch.testing.assert_close(got.detach().cpu(), expected.detach())
    torch.testing.assert_close(y.grad.cpu(), x.grad)
    with torch.inference_mode():
        torch.testing.assert_close(
            torch.nn.functional.ctc_loss(y.log_softmax(-1), TARGETS.to("xla"), *lengths, reduction=reduction).cpu(), got.detach().cpu()
        )


@pytest.mark.parametrize("there", [True, False], ids=["lengths on xla", "lengths on the CPU"])
def test_one_sequence(there):
    """Without a batch, lengths are numbers."""

    def run(device):
        x = log_probs()[:, 0].to(device).requires_grad_()
        lengths = [torch.tensor(n, device=device if there else "cpu") for n in (6, 3)]
        loss = torch.nn.functional.ctc_loss(x, TARGETS[0].to(device), *lengths)
        loss.backward()
        return loss.detach().cpu(), x.grad.cpu()

    torch.testing.assert_close(run("xla"), run("cpu"))
