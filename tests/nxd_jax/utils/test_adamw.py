"""AdamW with moments in full precision."""

from __future__ import annotations

import math

import pytest
import torch

from nxd_jax.utils.adamw_fp32_optim_params import AdamW_FP32OptimParams


def reference(
    p: torch.Tensor, grads: list[torch.Tensor], lr: float, betas: tuple[float, float], eps: float, decay: float, correct: bool
) -> torch.Tensor:
    """The algorithm in double precision."""
    p, m, v = p.double(), torch.zeros_like(p).double(), torch.zeros_like(p).double()
    for t, grad in enumerate(grads, 1):
        g = grad.double()
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        step = lr * math.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t) if correct else lr
        p = p - step * m / (v.sqrt() + eps)
        p = p - lr * decay * p
    return p


@pytest.mark.core(keep=4)
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("downcast", [False, True])
@pytest.mark.parametrize("decay, correct", [(0.0, True), (0.1, True), (0.1, False)])
def test_updates(monkeypatch: pytest.MonkeyPatch, decay: float, correct: bool, downcast: bool, device: str) -> None:
    monkeypatch.setenv("XLA_DOWNCAST_BF16", "1" if downcast and device == "cpu" else "0")
    torch.manual_seed(0)
    start = torch.randn(4, 3)
    p = torch.nn.Parameter(start.clone().to(device))
    unused = torch.nn.Parameter(torch.ones(1))
    optimizer = AdamW_FP32OptimParams([{"params": [p]}, {"params": [unused], "lr": 1.0}], lr=0.1, weight_decay=decay, correct_bias=correct)
    grads = [torch.randn(4, 3) for _ in range(3)]
    for grad in grads:
        p.grad = grad.to(device)
        optimizer.step()
    torch.testing.assert_close(
        p.detach().cpu().double(), reference(start, grads, 0.1, (0.9, 0.999), 1e-6, decay, correct), rtol=1e-5, atol=1e-6
    )
    state = optimizer.state[p]
    assert state["step"] == 3 and type(state["step"]) is int and unused not in optimizer.state
    assert state["exp_avg"].dtype == (torch.double if downcast and device == "cpu" else torch.float32)
    copy = AdamW_FP32OptimParams([{"params": [p]}, {"params": [unused]}])
    copy.load_state_dict(optimizer.state_dict())
    assert copy.state[p]["step"] == 3


@pytest.mark.filterwarnings("ignore:XLA_DOWNCAST_BF16 is deprecated")
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_loaded_moments_keep_their_precision(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """torch gives them the parameter's dtype, which on xla then is bfloat16. A parameter without a gradient has no state."""
    monkeypatch.setenv("XLA_DOWNCAST_BF16", "1")
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(8).to(device)), torch.nn.Parameter(torch.ones(1).to(device))]
    optimizer = AdamW_FP32OptimParams(params)
    params[0].grad = torch.randn(8).to(device)
    optimizer.step()
    other = AdamW_FP32OptimParams(params)
    other.load_state_dict(optimizer.state_dict())
    assert list(other.state) == params[:1]
    for name in ("exp_avg", "exp_avg_sq"):
        found, given = other.state[params[0]][name], optimizer.state[params[0]][name]
        assert found.dtype == torch.double and torch.equal(found.cpu(), given.cpu())


def test_closure_has_gradients_on() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = AdamW_FP32OptimParams([p])

    def closure() -> torch.Tensor:
        loss = (p * 2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0 and p[0] < 1


def test_errors() -> None:
    p = torch.nn.Parameter(torch.ones(2, 2))
    for kwargs, text in (
        ({"lr": -1.0}, "lr=-1.0"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]=1.0 must be in \[0, 1\)"),
    ):
        with pytest.raises(ValueError, match=text):
            AdamW_FP32OptimParams([p], **kwargs)  # type: ignore[arg-type]
    with pytest.warns(FutureWarning, match=r"torch.optim.AdamW"):
        optimizer = AdamW_FP32OptimParams([p], no_deprecation_warning=False)
    p.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(RuntimeError, match="does not take sparse gradients: use torch.optim.SparseAdam"):
        optimizer.step()
