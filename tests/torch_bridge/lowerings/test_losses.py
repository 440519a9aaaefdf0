from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.nn_checks import check_gradients, run
from tests.torch_bridge.lowerings.parity import check

aten = torch.ops.aten
torch.manual_seed(0)
X, T = torch.randn(4, 5), torch.randn(4, 5)
T[0] = X[0]
REGRESSION = [
    ("mse_loss", ()),
    ("smooth_l1_loss", (1.0,)),
    ("smooth_l1_loss", (0.0,)),
    ("smooth_l1_loss", (0.5,)),
    ("huber_loss", (1.0,)),
    ("huber_loss", (0.3,)),
    ("soft_margin_loss", ()),
]


@pytest.mark.thorough(keep=8)
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize(("name", "extra"), REGRESSION)
@together
def test_regression(name, extra, reduction):
    forward, backward = getattr(aten, name).default, getattr(aten, f"{name}_backward").default
    check(forward, X, T, reduction, *extra)
    check(forward, X.double(), T.double(), reduction, *extra, jit=False)
    check(forward, X.bfloat16(), T.bfloat16(), reduction, *extra, rtol=2e-2, atol=2e-2, jit=False)
    g = torch.randn_like(forward(X, T, reduction, *extra))
    check(backward, g, X, T, reduction, *extra)
    check_gradients(
        forward, X, T, reduction, *extra, constants=(1,) if name == "soft_margin_loss" or 0.0 in extra else ()
    )  # at ties torch gives target the sign of self


@together
def test_empty_and_promotion():
    check(aten.mse_loss.default, torch.empty(0, 3), torch.empty(0, 3), 1)
    check(aten.mse_loss.default, torch.empty(0, 3), torch.empty(0, 3), 2)
    check(aten.mse_loss.default, X, T.double(), 1)
    check(aten.huber_loss.default, X, T.double(), 1)
    check(aten.soft_margin_loss.default, X, T.double(), 1)


P = torch.cat([torch.rand(3, 5), torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.5]])])
Q = torch.cat([torch.rand(3, 5), torch.tensor([[0.0, 1.0, 1.0, 0.0, 0.5]])])


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weight", [None, torch.rand(4, 5)])
@together
def test_binary_cross_entropy(reduction, weight):
    check(aten.binary_cross_entropy.default, P, Q, weight, reduction)
    g = torch.randn_like(aten.binary_cross_entropy(P, Q, weight, reduction))
    check(aten.binary_cross_entropy_backward.default, g, P, Q, weight, reduction)
    for pos_weight in (None, torch.rand(5)):
        check(aten.binary_cross_entropy_with_logits.default, X * 40, Q, weight, pos_weight, reduction)
        check_gradients(aten.binary_cross_entropy_with_logits.default, X, Q, weight, pos_weight, reduction, constants=(2, 3))


LOGITS = torch.log_softmax(torch.randn(6, 4), 1)
TARGET = torch.tensor([0, 3, -100, 1, 2, -100])


@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weight", [None, torch.rand(4)])
@pytest.mark.parametrize("ignore", [-100, 1])
@together
def test_nll(reduction, weight, ignore):
    target = TARGET if ignore < 0 else TARGET.clamp(min=0)
    for x, t in ((LOGITS, target), (LOGITS.double(), target), (LOGITS[0], target[0]), (LOGITS[0], torch.tensor(ignore))):
        w = None if weight is None else weight.to(x.dtype)
        check(aten.nll_loss_forward.default, x, t, w, reduction, ignore)
        out, total = aten.nll_loss_forward(x, t, w, reduction, ignore)
        check(aten.nll_loss_backward.default, torch.randn_like(out), x, t, w, reduction, ignore, total)
    check_gradients(aten.nll_loss_forward.default, LOGITS, target, None, reduction, ignore)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@together
def test_nll2d(reduction):
    x, t, w = torch.randn(2, 4, 3, 2), torch.randint(0, 4, (2, 3, 2)), torch.rand(4)
    for weight in (None, w):
        check(aten.nll_loss2d_forward.default, x, t, weight, reduction, 2)
        out, total = aten.nll_loss2d_forward(x, t, weight, reduction, 2)
        check(aten.nll_loss2d_backward.default, torch.randn_like(out), x, t, weight, reduction, 2, total)


def test_nll_corners():
    ignored = torch.full((6,), -100)
    check(aten.nll_loss_forward.default, LOGITS, ignored, None, 1, -100)
    check(aten.nll_loss_forward.default, LOGITS[:0], ignored[:0], None, 1, -100)
    check(aten.nll_loss_forward.default, LOGITS[:0], ignored[:0], None, 0, -100)
    for bad in (4, -1):  # torch stops with an error there; on a device nothing can, so the loss must not look right
        assert run(aten.nll_loss_forward.default, LOGITS, torch.full((6,), bad), None, 1, -100)[0].isnan()


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("p", [1, 2])
@together
def test_multi_margin(reduction, p):
    for x, t in ((torch.randn(5, 4), torch.tensor([0, 3, 1, 1, 2])), (torch.randn(4), torch.tensor(2))):
        for weight in (None, torch.rand(4)):
            check(aten.multi_margin_loss.default, x, t, p, 0.7, weight, reduction)
            g = torch.randn_like(aten.multi_margin_loss(x, t, p, 0.7, weight, reduction))
            check(aten.multi_margin_loss_backward.default, g, x, t, p, 0.7, weight, reduction)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@together
def test_multilabel_margin(reduction):
    for x, t in (
        (torch.randn(3, 4), torch.tensor([[3, 0, -1, 1], [-1, 2, 3, 0], [0, 1, 2, 3]])),
        (torch.randn(4), torch.tensor([2, 0, -1, 1])),
    ):
        check(aten.multilabel_margin_loss_forward.default, x, t, reduction)
        out, is_target = aten.multilabel_margin_loss_forward(x, t, reduction)
        check(aten.multilabel_margin_loss_backward.default, torch.randn_like(out), x, t, reduction, is_target)


def test_multilabel_margin_of_one_row_is_a_number():
    """torch's meta kernel says 1-d, the CPU kernel 0-d."""
    x, t = torch.randn(4), torch.tensor([2, 0, -1, 1])
    losses, grads = [], []
    for device in ("cpu", "xla"):
        leaf = x.clone().to(device).requires_grad_()
        losses.append(torch.nn.functional.multilabel_margin_loss(leaf, t.to(device), reduction="none"))
        losses[-1].backward()
        grads.append(leaf.grad.cpu())
    assert losses[1].shape == losses[0].shape == ()
    torch.testing.assert_close(losses[1].cpu(), losses[0])
    torch.testing.assert_close(grads[1], grads[0])
