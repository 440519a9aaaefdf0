"""`NEURON_CC_FLAGS=--auto-cast`: which float32 ops compute in which type."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torch_bridge import metrics
from torch_bridge.export import hlo_text
from torch_bridge.lowerings import grouped_matmul
from torch_bridge.precision import precision_mode, rewrite_roundings
from torch_bridge.runtime import executor

BITS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def as_type(x: torch.Tensor, kind: str) -> torch.Tensor:
    """`x` rounded to the type on the CPU, in float32."""
    if kind in BITS:
        return x.to(BITS[kind]).float()
    kept, lowest = {"tf32": (10, -125), "fp8_e4m3": (3, -5)}[kind]
    gap = 2.0 ** (torch.frexp(x.double()).exponent.clamp(min=lowest) - 1 - kept)
    return ((x / gap).round() * gap).float()


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mm": lambda a, b: a @ b,
    "bmm": lambda a, b: torch.bmm(a.reshape(2, 4, 8), b.reshape(2, 8, 4)),
    "linear": lambda a, b: F.linear(a, b.mT),
    "conv": lambda a, b: F.conv1d(a.reshape(2, 4, 8), b.reshape(4, 4, 4)),
}


def test_ragged_products_of_tpus_are_rounded_too() -> None:
    generator = np.random.default_rng(0)
    x, w = (jnp.asarray(generator.normal(size=size), jnp.float32) for size in ((6, 8), (2, 8, 4)))
    offs = jnp.asarray([2, 6], jnp.int32)

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return grouped_matmul.ragged_rows(False, x, w, offs)

    rounded = run(*(t.astype(jnp.bfloat16).astype(jnp.float32) for t in (x, w)))
    np.testing.assert_allclose(rewrite_roundings.rewrite(run, (x, w), matmul="bf16"), rounded, rtol=1e-5, atol=1e-5)
    assert not np.allclose(rounded, run(x, w), rtol=1e-4)


@pytest.mark.core(keep=4)
@pytest.mark.parametrize("kind", ["bf16", "fp16", "tf32", "fp8_e4m3"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_matmult_rounds_the_operands_and_sums_in_float32(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_CC_FLAGS", f"--auto-cast=matmult --auto-cast-type={kind}")
    a, b = torch.rand(8, 8), torch.rand(8, 8)
    out = PRODUCTS[name](a.to("xla"), b.to("xla"))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.cpu(), PRODUCTS[name](as_type(a, kind), as_type(b, kind)), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(out.cpu(), PRODUCTS[name](a, b), rtol=1e-6, atol=1e-6)


def test_small_and_large_numbers_of_a_narrow_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainium's e4m3: multiples of 2**-9 near zero, 240 the largest, infinite beyond."""
    monkeypatch.setenv("NEURON_CC_FLAGS", "--auto-cast=matmult --auto-cast-type=fp8_e4m3")
    x = torch.tensor([[2.0**-9], [2.6 * 2**-9], [2.0**-11], [240.0], [1e4], [-3e-7]])
    assert (x.to("xla") @ torch.ones(1, 1).to("xla")).flatten().tolist() == [2**-9, 3 * 2**-9, 0, 240, float("inf"), 0]


def test_matmult_leaves_the_rest_and_other_dtypes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_CC_FLAGS", "--auto-cast matmult")
    x = torch.rand(8, 8)
    assert torch.equal((x.to("xla") + x.to("xla") * 2).cpu(), x + x * 2)
    assert torch.allclose((x.double().to("xla") @ x.double().to("xla")).cpu(), x.double() @ x.double(), rtol=1e-12)
    assert ((x * 100).long().to("xla") @ (x * 100).long().to("xla")).cpu().equal((x * 100).long() @ (x * 100).long())


def test_gradients_of_products_are_cast_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_CC_FLAGS", "--auto-cast=matmult")
    a, b, g = (torch.rand(4, 4) for _ in range(3))
    x = a.to("xla").requires_grad_()
    (x @ b.to("xla")).backward(g.to("xla"))
    assert x.grad is not None
    torch.testing.assert_close(x.grad.cpu(), as_type(g, "bf16") @ as_type(b, "bf16").mT, rtol=1e-6, atol=1e-6)


def test_all_rounds_what_every_op_takes_and_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_CC_FLAGS", "--auto-cast=all")
    a, b = torch.rand(64), torch.rand(64)
    x, y = a.to("xla"), b.to("xla")
    out = (x * y + x).cpu()
    low_a, low_b = as_type(a, "bf16"), as_type(b, "bf16")
    assert out.dtype == torch.float32
    assert torch.equal(out, as_type(as_type(low_a * low_b, "bf16") + low_a, "bf16"))
    assert torch.equal(x.cpu(), a)


def test_none_is_the_default_and_float32_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert precision_mode.current() == precision_mode.PLAIN
    for flags in ("", "--auto-cast=none", "--auto-cast=none --auto-cast-type=fp16 --model-type=transformer -O1"):
        monkeypatch.setenv("NEURON_CC_FLAGS", flags)
        assert precision_mode.current() == precision_mode.PLAIN


def test_a_changed_flag_uses_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(8, 8).to("xla")
    results = []
    before = metrics.COUNTERS.get("UncachedCompile", 0)
    for flags in ("--auto-cast=none", "--auto-cast=matmult", "--auto-cast=all", "--auto-cast=matmult --auto-cast-type=tf32") * 2:
        monkeypatch.setenv("NEURON_CC_FLAGS", flags)
        results.append((x @ x).cpu())
    assert metrics.COUNTERS["UncachedCompile"] - before == 4
    for k in range(4):
        assert torch.equal(results[k], results[k + 4])
        assert not any(torch.equal(results[k], results[j]) for j in range(k))


def test_stochastic_rounding_applies_to_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_CC_FLAGS", "--auto-cast=matmult")
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1")
    out = torch.full((4000, 1), 1 + 1 / 1024).to("xla") @ torch.ones(1, 1).to("xla")
    assert out.cpu().unique().tolist() == [1, 1 + 1 / 128]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--auto-cast=some", "--auto-cast=some must be one of none, matmult, all"),
        ("--auto-cast-type=int4", "--auto-cast-type=int4 must be one of bf16, fp16, tf32, fp8_e4m3"),
    ],
)
def test_bad_values_are_named(flags: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    y = torch.ones(2).to("xla") + 1
    monkeypatch.setenv("NEURON_CC_FLAGS", flags)
    with pytest.raises(ValueError, match=words):
        y.cpu()
    monkeypatch.delenv("NEURON_CC_FLAGS")
    assert y.tolist() == [2, 2]


def test_hlo_metadata_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_CC_FLAGS", "--auto-cast=matmult")
    executor.clear_cache()
    x = torch.rand(8, 8).to("xla")
    (x @ x).cpu()
    text = hlo_text.hlo()
    assert "test_auto_cast.py" in text
    assert "bf16" in text


def test_a_script_with_casts_by_the_compiler_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 products and float32 weights: it learns like float32, and its numbers are not float32's."""

    def train() -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to("xla")
        x = torch.randn(64, 8)
        x, y = x.to("xla"), (x[:, :1] * 2).to("xla")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(40):
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            executor.sync()
        return [v.item() for v in losses]

    full = train()
    monkeypatch.setenv("NEURON_CC_FLAGS", "--auto-cast=matmult")
    cast = train()
    assert cast != full
    assert cast[-1] < 0.2 * cast[0]
    torch.testing.assert_close(cast, full, rtol=0.05, atol=0.02)
