"""`XLA_USE_BF16` and `XLA_DOWNCAST_BF16`: dtypes stay, values on the device do not."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from torch_bridge import metrics
from torch_bridge.precision import precision_mode
from torch_bridge.runtime import executor

THIRD = 1 / 3
BF16, F32 = (torch.tensor(THIRD, dtype=torch.float64).to(d).item() for d in (torch.bfloat16, torch.float32))
pytestmark = pytest.mark.filterwarnings("ignore:XLA_(USE|DOWNCAST)_BF16 is deprecated:FutureWarning")


@pytest.mark.parametrize(
    ("variable", "dtype", "held"),
    [
        ("XLA_USE_BF16", torch.float32, BF16),
        ("XLA_USE_BF16", torch.float64, BF16),
        ("XLA_DOWNCAST_BF16", torch.float32, BF16),
        ("XLA_DOWNCAST_BF16", torch.float64, F32),
    ],
)
def test_what_each_dtype_holds(variable: str, dtype: torch.dtype, held: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploaded, filled, computed, read back: the dtype is the script's and the value the device's."""
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "0")
    one = torch.ones(2, dtype=dtype, device="xla")
    for t in (
        torch.full((2,), THIRD, dtype=dtype).to("xla"),
        torch.full((2,), THIRD, dtype=dtype, device="xla"),
        one / 3,
        torch.full((2,), THIRD, dtype=dtype).to("xla") * one,
        torch.split(one / 3, 1)[0],
        (one / 3).sort().values,
    ):
        assert t.dtype == dtype
        assert t.cpu().dtype == dtype
        assert set(t.tolist()) == {held}


def test_other_dtypes_are_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_USE_BF16", "1")
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "0")
    assert (torch.tensor([1000001]).to("xla") + 1).tolist() == [1000002]
    assert (torch.tensor([1 / 3], dtype=torch.float16).to("xla") * 1).item() == torch.tensor(1 / 3, dtype=torch.float16).item()
    assert (torch.tensor([True]).to("xla") & True).tolist() == [True]


def test_stochastic_rounding_comes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_DOWNCAST_BF16", "1")
    assert precision_mode.current().stochastic
    out = torch.ones(20_000).to("xla") / 3
    found = out.cpu().double()
    assert len(found.unique()) == 2
    assert abs(found.mean() - THIRD) < 1e-4
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "0")
    assert not precision_mode.current().stochastic
    assert len((torch.ones(20_000).to("xla") / 3).cpu().unique()) == 1


@pytest.mark.filterwarnings("default:XLA_(USE|DOWNCAST)_BF16 is deprecated:FutureWarning")
@pytest.mark.parametrize("variable", ["XLA_USE_BF16", "XLA_DOWNCAST_BF16"])
def test_warns_once(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.warns(
        FutureWarning, match=rf"{variable} is deprecated: use model.to\(torch.bfloat16\) with NEURON_RT_STOCHASTIC_ROUNDING_EN=1"
    ):
        torch.ones(2).to("xla").cpu()
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_SEED", "5")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (torch.ones(2).to("xla") + 1).cpu()


def test_bad_values_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_USE_BF16", "bf16")
    with pytest.raises(ValueError, match="XLA_USE_BF16='bf16': must be 0 or 1"):
        torch.ones(2).to("xla")


def train(steps: int = 60) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to("xla")
    x = torch.randn(64, 8)
    x, y = x.to("xla"), (x[:, :1] * 2).to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        executor.sync()
    return [v.item() for v in losses], [p.detach().cpu() for p in model.parameters()]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("variable", ["XLA_USE_BF16", "XLA_DOWNCAST_BF16"])
def test_a_float32_script_trains_in_bfloat16_unchanged(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    executor.clear_cache()
    before = metrics.COUNTERS.get("UncachedCompile", 0)
    full, _ = train()
    plain = metrics.COUNTERS["UncachedCompile"] - before
    monkeypatch.setenv(variable, "1")
    losses, weights = train()
    # The first step, without optimizer state, and the others: not one for each step.
    assert metrics.COUNTERS["UncachedCompile"] - before <= plain + 2
    assert all(w.dtype == torch.float32 and torch.equal(w, w.bfloat16().float()) for w in weights)
    assert losses != full
    assert losses[-1] < 0.2 * losses[0]
    torch.testing.assert_close(losses[-1], full[-1], rtol=0.5, atol=0.02)
