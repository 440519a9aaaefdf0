"""Stochastic rounding: its definition number by number, its statistics, its reproducibility, and training that needs it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_xla.core.xla_model as xm
from jax import lax
from torch import nn

import torch_bridge
from tests.torch_bridge.devices import python
from torch_bridge import _compat, metrics
from torch_bridge.mesh import world
from torch_bridge.precision import rewrite_roundings, stochastic_rounding
from torch_bridge.recorder import sharded
from torch_bridge.runtime import executor

HALVES = [torch.bfloat16, torch.float16]
N = 40_000


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1")


def rounded(value: float, dtype: torch.dtype, n: int = N) -> torch.Tensor:
    """`value` as float32, rounded on the device n times."""
    return torch.full((n,), value).to("xla").to(dtype).cpu()


def neighbours(value: float, dtype: torch.dtype) -> tuple[float, float]:
    """The numbers of the format just below and above, from torch's own nearest rounding."""
    near = torch.tensor(value, dtype=torch.float64).to(dtype)
    other = torch.nextafter(near, torch.tensor(float("inf") if near.double() < value else -float("inf"), dtype=dtype))
    return tuple(sorted((near.item(), other.item())))  # type: ignore[return-value]


# -- definition -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [1 + 1 / 1024 + 1 / 5000, -3.1415927, 1024.3, 7e-5, -2.2e-6, 1.99999, 60000.7])
def test_unbiased_between_the_two_neighbours(dtype: torch.dtype, value: float) -> None:
    """Only the neighbours come up, the upper one with the right probability: within 4.5 standard deviations of N draws."""
    value = float(np.float32(value))
    low, high = neighbours(value, dtype)
    found = rounded(value, dtype).double()
    assert set(found.unique().tolist()) <= {low, high}
    p = (value - low) / (high - low)
    share = (found == high).double().mean().item()
    assert abs(share - p) < 4.5 * (p * (1 - p) / N) ** 0.5 + 1 / N


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("dtype", HALVES)
def test_numbers_of_the_format_stay(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[~every.isnan()]
    back = every.to("xla").float().to(dtype).cpu()
    subnormal = (every.abs() < torch.finfo(dtype).smallest_normal) & (dtype == torch.bfloat16)  # float32's too: XLA may flush them
    assert torch.equal(back[~subnormal].view(torch.int16), every[~subnormal].view(torch.int16))


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("dtype", HALVES)
def test_what_cannot_be_between_two_numbers_is_rounded_to_nearest(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), largest, 3.4028e38, -3.4028e38, 0.0, -0.0])
    got, nearest = x.to("xla").to(dtype).cpu(), x.to(dtype)
    torch.testing.assert_close(got, nearest, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit()[-2:], nearest.signbit()[-2:])


@pytest.mark.parametrize("dtype", HALVES)
def test_probability_is_exact_over_all_random_bits(dtype: torch.dtype) -> None:
    """Without statistics: of evenly spread bits, as many round up as the distance says."""
    bits = np.arange(2**16, dtype=np.uint32) << 16
    x = np.full(bits.shape, 1 + 3 / 2**13, np.float32)
    with _compat.enable_x64():
        out = np.asarray(
            stochastic_rounding.stochastic(jnp.asarray(x), jnp.dtype(str(dtype).removeprefix("torch.")), jnp.asarray(bits)).astype(
                jnp.float32
            )
        )
    gap = torch.finfo(dtype).eps
    assert set(np.unique(out)) == {1.0, 1 + gap}
    assert (out > 1).mean() == 3 / 2**13 / gap


@pytest.mark.usefixtures("on")
def test_float64_and_integers_go_through_float32() -> None:
    x = torch.full((N,), 1 + 1 / 512, dtype=torch.float64).to("xla")
    assert len(x.to(torch.bfloat16).cpu().unique()) == 2
    assert torch.full((N,), 1025).to("xla").to(torch.bfloat16).cpu().unique().tolist() == [1024, 1032]


# -- where it happens -----------------------------------------------------------------------------

OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: x + 1 / 300,
    "mul": lambda x: x * x,
    "exp": torch.exp,
    "matmul": lambda x: x.reshape(-1, 8) @ x[:8].reshape(8, 1),
    "sum": lambda x: x.reshape(-1, 5).sum(1),
    "softmax": lambda x: torch.softmax(x.reshape(-1, 5), 1),
    "layer-norm": lambda x: nn.functional.layer_norm(x.reshape(-1, 8) + torch.arange(8, dtype=x.dtype, device=x.device), [8]),
    "cumsum": lambda x: x.reshape(-1, 5).cumsum(1)[:, 4],
    "index_add": lambda x: torch.zeros_like(x).index_add(0, torch.arange(len(x), device=x.device) % 64, x),
    "conv": lambda x: nn.functional.conv1d(x.reshape(-1, 1, 8), x[:3].reshape(1, 1, 3)),
}


@pytest.mark.core(keep=3)
@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("name", OPS)
def test_results_of_half_precision_ops_are_rounded_stochastically(name: str) -> None:
    """Rows that hold the same numbers get different results whose mean is the float32 result."""
    x = torch.full((4000,), 1.171875, dtype=torch.bfloat16)
    out = OPS[name](x.to("xla")).cpu().float()
    exact = OPS[name](x.float())
    nearest = exact.bfloat16().float()
    assert not torch.equal(out, nearest)
    assert abs((out - exact).mean()) < 0.35 * (nearest - exact).abs().mean() + 0.05 * (out - exact).abs().mean()


@pytest.mark.usefixtures("on")
def test_moving_values_changes_none() -> None:
    x = torch.randn(64, 8, dtype=torch.bfloat16)
    ops: list[Callable[[Any], Any]] = [
        lambda x: x.mT.contiguous(), lambda x: torch.cat([x, x]), lambda x: x.sort(1).values, lambda x: x.amax(1), lambda x: x[:, ::2].relu(),
        lambda x: torch.where(x > 0, x, -x), lambda x: x.gather(1, torch.zeros(64, 8, dtype=torch.int64, device=x.device)), lambda x: x.clamp(-1, 1),
    ]  # fmt: skip
    for op in ops:
        assert torch.equal(op(x.to("xla")).cpu(), op(x))


@pytest.mark.usefixtures("on")
def test_constants_of_a_program_keep_their_dtype() -> None:
    out = nn.functional.fractional_max_pool2d(torch.rand(1, 1, 6, 6, dtype=torch.bfloat16).to("xla"), 2, output_size=3)
    assert (out.dtype, out.cpu().shape) == (torch.bfloat16, (1, 1, 3, 3))


def test_loops_and_branches_draw_anew_in_every_turn() -> None:
    """What the walk through a program does at each kind of control flow, on a function of JAX."""
    x = jnp.full((2000,), 1 + 1 / 1024, jnp.float32)
    half = jnp.bfloat16

    def body(carry: Any, row: Any) -> Any:
        return carry, row.astype(half)

    def run(x: Any) -> Any:
        _, scanned = lax.scan(body, 0, jnp.stack([x] * 3))
        looped = lax.fori_loop(0, 3, lambda i, c: c.at[i].set(x.astype(half)), jnp.zeros((3, *x.shape), half))
        branched = lax.cond(x[0] > 0, lambda: x.astype(half), lambda: x.astype(half) + half(1))
        return scanned, looped, branched, {"plain": x * 2}

    words = np.array([1, 2], np.uint32)
    scanned, looped, branched, rest = rewrite_roundings.rewrite(run, [x], words, stochastic_rounding.place_numbers())
    rows = [np.asarray(r.astype(jnp.float32)) for r in (*scanned, *looped, branched)]
    for i, row in enumerate(rows):
        assert abs(row.mean() - float(x[0])) < 3e-4
        assert not any(np.array_equal(row, other) for other in rows[:i])
    assert np.array_equal(rest["plain"], x * 2)


# -- reproducible ---------------------------------------------------------------------------------


def draws(n: int = 3) -> list[tuple[float, ...]]:
    return [tuple(rounded(1.001, torch.bfloat16, 1000).tolist()) for _ in range(n)]


@pytest.mark.usefixtures("on")
def test_the_seed_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    first = draws()
    assert len(set(first)) == 3
    stochastic_rounding.restart()
    assert draws() == first
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_SEED", "7")
    before = metrics.COUNTERS.get("UncachedCompile", 0)
    assert draws() != first
    assert metrics.COUNTERS.get("UncachedCompile", 0) == before


def test_a_second_process_gives_the_same() -> None:
    code = """
import torch, torch_bridge, os
torch_bridge.register()
os.environ["NEURON_RT_STOCHASTIC_ROUNDING_EN"] = "1"
x = torch.full((1000,), 1.001).to("xla")
print([x.to(torch.bfloat16).double().sum().item() for _ in range(2)])
"""
    assert python(code, NEURON_RT_STOCHASTIC_ROUNDING_SEED="3") == python(code, NEURON_RT_STOCHASTIC_ROUNDING_SEED="3")


def test_elements_are_independent() -> None:
    """Neighbouring elements, places and executions are uncorrelated, and every bit is set half the time."""
    stream, numbers = stochastic_rounding.Stream(), [jnp.asarray(k) for k in stochastic_rounding.place_numbers()]
    words = [stream.take(0) for _ in range(2)]
    rows = [
        np.asarray(stochastic_rounding.random_bits((N,), w, stochastic_rounding.place_of(n, numbers)))
        for w in words
        for n in (0, 1, 2, 63, 510, 511, 512, 513, 1024, 5000)
    ]
    u = np.stack([*(r / 2**32 for r in rows), *(np.roll(rows[0], n) / 2**32 for n in (1, 2, 64, 256, 4096))])
    corr = np.corrcoef(u) - np.eye(len(u))
    assert abs(corr).max() < 4.5 / N**0.5
    for row in rows:
        shares = ((row[:, None] >> np.arange(32)) & 1).mean(0)
        assert abs(shares - 0.5).max() < 4.5 * 0.5 / N**0.5


def test_what_tells_roundings_apart_is_an_input() -> None:
    """A constant in the program would make every rounding a kernel of its own; beyond the 512th there is one."""
    numbers = stochastic_rounding.place_numbers()
    places = [stochastic_rounding.place_of(n, numbers) for n in range(4096)]
    assert all(place is number for place, number in zip(places, numbers, strict=False)) and len(numbers) == 512
    assert len(set(map(int, places))) == len(places)


@pytest.mark.usefixtures("on")
def test_roundings_of_equal_layers_share_their_kernels() -> None:
    """Counted in the optimised program: the fused computations, without their names."""
    layers = [torch.full((64,), 1 + 1 / 300, device="xla") for _ in range(6)]
    rounded = [x.to(torch.bfloat16) for x in layers]
    assert len({tuple(r.cpu().float().tolist()) for r in rounded}) == 6
    text = torch_bridge.hlo(stage="optimized").rpartition("HloModule")[2]
    bodies = re.findall(r"^%?fused_computation[^\n]*\{\n(.*?)^\}", text, flags=re.S | re.M)
    shapes = {re.sub(r"(%[\w.\-]+|metadata=\{[^}]*\}|parameter\(\d+\))", "", body) for body in bodies}
    assert len(bodies) >= 6 and len(shapes) <= 2, text


# -- when it is switched --------------------------------------------------------------------------


def test_switching_uses_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.full((1000,), 1.001).to("xla")
    before = metrics.COUNTERS.get("UncachedCompile", 0)
    for value, kinds in (("0", 1), ("1", 2), ("0", 1), ("1", 2)):
        monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", value)
        assert len((x * 1).to(torch.bfloat16).cpu().unique()) == kinds
    assert metrics.COUNTERS["UncachedCompile"] - before == 2


@pytest.mark.parametrize(("name", "value"), [("NEURON_RT_STOCHASTIC_ROUNDING_EN", "maybe"), ("NEURON_RT_STOCHASTIC_ROUNDING_SEED", "-1")])
def test_bad_values_are_named_and_nothing_is_lost(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    y = torch.ones(3).to("xla") + 1
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}='{value}'"):
        y.cpu()
    monkeypatch.delenv(name)
    assert y.tolist() == [2, 2, 2]


@pytest.mark.usefixtures("on")
@pytest.mark.usefixtures("two_ranks")
def test_ranks_that_share_a_value_go_on_sharing_it() -> None:
    y = torch.full((1000,), 1.001).to("xla").to(torch.bfloat16)
    executor.sync()
    a, b = sharded.shards(y)
    assert torch.equal(a, b)
    assert len(a.unique()) == 2


@pytest.mark.usefixtures("on", "two_ranks")
def test_a_sum_over_ranks_is_rounded_alike_on_all() -> None:
    x = torch.full((1000,), 1.0078125, dtype=torch.bfloat16).to("xla") * (world.rank() + 1)
    total = sharded.shards(xm.all_reduce(xm.REDUCE_SUM, x))
    assert torch.equal(total[0], total[1])
    assert abs(total[0].float().mean() - 3 * 1.0078125) < 2e-3


# -- what it is for -------------------------------------------------------------------------------


def accumulated(dtype: torch.dtype) -> float:
    """1024 + 0.5, 2048 times, run in steps of 64."""
    total = torch.tensor([1024.0] * 16, dtype=dtype).to("xla")
    for i in range(2048):
        total = total + 0.5
        if i % 64 == 63:
            executor.sync()
    return total.float().mean().item()


def test_small_summands_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of Neuron's documentation: in float16, half of 1 is lost next to 1024."""
    assert accumulated(torch.float16) == 1024
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1")
    assert abs(accumulated(torch.float16) - 2048) < 40


def train(dtype: torch.dtype, steps: int = 300) -> tuple[float, float]:
    """First and last loss of a full-precision or all-bfloat16 model with small steps, as the guide writes it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(64, 8)
    y = x[:, :1] * x[:, 1:2]
    model.to(dtype).to("xla")
    x, y = x.to("xla", dtype), y.to("xla", dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-4)
    losses = []
    for _ in range(steps):
        running_loss = torch.zeros(1, dtype=torch.float).to("xla")
        loss = (model(x) - y).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        running_loss += loss.detach()
        losses.append(running_loss)
        executor.sync()
    assert all(p.dtype == dtype for p in model.parameters())
    return losses[0].item(), losses[-1].item()


def test_a_bfloat16_model_trains_and_stochastic_rounding_makes_it_follow_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    start, full = train(torch.float32)
    _, nearest = train(torch.bfloat16)
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1")
    _, stochastic = train(torch.bfloat16)
    assert start - nearest < 0.2 * (start - full)
    assert abs(stochastic - full) < 0.2 * (start - full)
