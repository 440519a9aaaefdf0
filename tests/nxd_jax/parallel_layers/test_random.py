"""What tensor parallel ranks draw alike, what they draw differently, and the tracker's states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
import torch_xla.core.xla_model as xm
import torch_xla.utils.checkpoint as xla_checkpoint

import torch_bridge
from nxd_jax.parallel_layers import parallel_state
from nxd_jax.parallel_layers.random import XLARNGStatesTracker, get_xla_rng_tracker, model_parallel_xla_manual_seed
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.parallel_layers.parts import own, per_rank
from torch_bridge.recorder import sharded

N = 20000


@pytest.fixture(autouse=True)
def fresh_tracker() -> Iterator[None]:
    get_xla_rng_tracker().reset()
    yield
    get_xla_rng_tracker().reset()


def masks(x: torch.Tensor) -> list[torch.Tensor]:
    return [m != 0 for m in per_rank(F.dropout(x, 0.25))]


def independent(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Two masks that keep three quarters each, independently, agree on 5/8 of their places."""
    return abs((a == b).float().mean().item() - 0.625) < 0.02


def test_default_state(nxd: Nxd) -> None:
    """One seed: alike on all ranks, whatever their activations."""
    nxd(8, tp=4)
    model_parallel_xla_manual_seed(1)
    found = masks(own([torch.ones(N)] * 8, ["dp"]))
    assert all(torch.equal(m, found[0]) for m in found)


def test_independent_draws(nxd: Nxd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alike on tensor parallel ranks, different on data parallel ones once their activations differ."""
    monkeypatch.setenv("NXD_JAX_INDEPENDENT_DRAWS", "1")
    nxd(8, tp=4)
    model_parallel_xla_manual_seed(1)
    found = masks(own([torch.ones(N)] * 8, ["dp"]))
    assert all(torch.equal(found[r], found[0]) for r in range(4))
    assert all(torch.equal(found[r], found[4]) for r in range(4, 8))
    assert independent(found[0], found[4])
    assert abs(found[0].float().mean().item() - 0.75) < 0.02
    same = masks(torch.ones(N, device="xla"))
    assert all(torch.equal(m, same[0]) for m in same)
    assert not torch.equal(same[0], found[0])


def test_fork_differs_among_tensor_parallel_ranks(nxd: Nxd) -> None:
    nxd(8, tp=4)
    model_parallel_xla_manual_seed(1)
    with get_xla_rng_tracker().fork():
        found = masks(torch.ones(N, device="xla"))
        more = masks(torch.ones(N, device="xla"))
    for a in range(4):
        assert abs(found[a].float().mean().item() - 0.75) < 0.02
        assert torch.equal(found[a], found[a + 4])  # data parallel ranks share what they share
        assert independent(found[a], more[a])
        for b in range(a):
            assert independent(found[a], found[b])


def test_fork_leaves_the_default_state_alone_and_goes_on_itself(nxd: Nxd) -> None:
    nxd(4, tp=4)
    tracker = get_xla_rng_tracker()

    def draw() -> tuple[list[float], list[float]]:
        return torch.rand(3).tolist(), torch.rand(3, device="xla").tolist()

    model_parallel_xla_manual_seed(5)
    first, second = draw(), draw()
    model_parallel_xla_manual_seed(5)
    assert draw() == first
    with tracker.fork():
        inside = draw()
    assert draw() == second
    with tracker.fork("model-parallel-rng"):
        later = draw()
    assert len({str(d) for d in (first, second, inside, later)}) == 4
    model_parallel_xla_manual_seed(5)
    with tracker.fork():
        assert (draw(), draw()) == (inside, later)


def test_states_can_be_kept_and_restored(nxd: Nxd) -> None:
    nxd(4, tp=4)
    model_parallel_xla_manual_seed(5)
    tracker = get_xla_rng_tracker()
    kept = tracker.get_states()
    with tracker.fork():
        first = per_rank(torch.rand(4, device="xla"))
    other = XLARNGStatesTracker()
    other.set_states(kept)
    with other.fork():
        again = per_rank(torch.rand(4, device="xla"))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    with pytest.raises(TypeError, match="rng state x must be one that get_states"):
        tracker.set_states({"x": torch.zeros(3)})  # type: ignore[dict-item]


def test_the_states_number_within_a_fork(nxd: Nxd) -> None:
    """`xm.get_rng_state()` puts the same draws back, also after more of them and outside."""
    nxd(4, tp=2)
    model_parallel_xla_manual_seed(5)
    with get_xla_rng_tracker().fork():
        draw()
        state = xm.get_rng_state()
        first = [draw(), draw()]
        later = xm.get_rng_state()
        last = draw()
        xm.set_rng_state(state)
        assert [draw(), draw()] == first
    xm.set_rng_state(later)
    assert draw() == last and len({tuple(x) for x in last}) == 2


CHECKPOINTS = {
    "reentrant": lambda f, x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=True),
    "not": lambda f, x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False),
    "torch_xla's": xla_checkpoint.checkpoint,
}


@pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_fork_that_is_computed_again(nxd: Nxd, checkpoint: Any) -> None:
    """By torch's activation checkpointing: with the mask of the first time, and nothing else moves."""
    nxd(2, tp=2)
    model_parallel_xla_manual_seed(5)

    def layer(x: torch.Tensor) -> torch.Tensor:
        with get_xla_rng_tracker().fork():
            return x * F.dropout(x, 0.5)

    found = []
    for call in (checkpoint, lambda f, x: f(x)):
        model_parallel_xla_manual_seed(5)
        x = torch.ones(64, device="xla", requires_grad=True)
        y = call(layer, call(layer, x) + 1)
        y.sum().backward()
        with get_xla_rng_tracker().fork():
            found.append([y.detach(), x.grad, torch.rand(3, device="xla")])
    for again, once in zip(*found, strict=True):
        for a, b in zip(per_rank(again), per_rank(once), strict=True):
            torch.testing.assert_close(a, b)


def draw() -> list[list[float]]:
    return [x.tolist() for x in per_rank(torch.rand(3, device="xla"))]


def test_added_states(nxd: Nxd) -> None:
    nxd(4, tp=4)
    tracker = XLARNGStatesTracker()
    tracker.add("shared", 11)
    tracker.add("own", 100 + parallel_state.get_tensor_model_parallel_rank())
    with tracker.fork("shared"):
        shared = per_rank(torch.rand(4, device="xla"))
    with tracker.fork("own"):
        own_numbers = per_rank(torch.rand(4, device="xla"))
    assert all(torch.equal(s, shared[0]) for s in shared)
    assert not any(torch.equal(own_numbers[a], own_numbers[b]) for a in range(4) for b in range(a))
    with pytest.raises(Exception, match="seed 11 already exists"):
        tracker.add("third", 11)
    with pytest.raises(Exception, match="rng state shared already exists"):
        tracker.add("shared", 12)
    tracker.reset()
    assert tracker.get_states() == {}
    with pytest.raises(Exception, match="rng state shared is not added"), tracker.fork("shared"):
        pass


def test_an_error_inside_a_fork_restores_the_default_state(nxd: Nxd) -> None:
    nxd(2, tp=2)
    model_parallel_xla_manual_seed(1)
    expected = torch.rand(3, device="xla").tolist()
    model_parallel_xla_manual_seed(1)
    with pytest.raises(ZeroDivisionError), get_xla_rng_tracker().fork():
        torch.rand(3, device="xla")
        raise ZeroDivisionError
    assert torch.rand(3, device="xla").tolist() == expected


def test_a_world_of_one(nxd: Nxd) -> None:
    nxd(1)
    model_parallel_xla_manual_seed(1)
    with get_xla_rng_tracker().fork():
        a = torch.rand(3, device="xla").tolist()
    assert a != torch.rand(3, device="xla").tolist()


def test_a_seed_that_differs_by_rank(nxd: Nxd) -> None:
    """As AWS's scripts seed: each rank draws what it would alone, in the default state and in the tracker's, on the CPU and on xla."""
    nxd(4, tp=2)
    rank = xm.get_ordinal()
    model_parallel_xla_manual_seed(5 + rank)
    host, device = sharded.shards(torch.rand(3)), per_rank(torch.rand(3, device="xla"))
    with get_xla_rng_tracker().fork():
        host_inside, device_inside = sharded.shards(torch.rand(3)), per_rank(torch.rand(3, device="xla"))
    for r in range(4):
        torch.manual_seed(5 + r)
        assert torch.equal(host[r], torch.rand(3)) and torch.equal(device[r], torch.rand(3, device="xla").cpu())
        torch.manual_seed(5 + r + 2718 + r % 2)
        assert torch.equal(host_inside[r], torch.rand(3)) and torch.equal(device_inside[r], torch.rand(3, device="xla").cpu())


def test_the_tracker_differs_among_tensor_parallel_ranks_on_the_cpu_too(nxd: Nxd) -> None:
    nxd(4, tp=2)
    model_parallel_xla_manual_seed(5)
    with get_xla_rng_tracker().fork():
        inside = sharded.shards(torch.rand(3))
    assert type(torch.rand(3)) is torch.Tensor
    for r in range(4):
        torch.manual_seed(5 + 2718 + r % 2)
        assert torch.equal(inside[r], torch.rand(3))


def test_without_parallel_state_is_an_error() -> None:
    parallel_state.destroy_model_parallel()
    with pytest.raises(RuntimeError, match="model parallel groups are not initialized"):
        model_parallel_xla_manual_seed(1)


class Forking(torch.nn.Module):
    """Dropout within a fork."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with get_xla_rng_tracker().fork():
            return F.dropout(self.linear(x), self.rate)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_module_whose_forks_draw_nothing_is_played(nxd: Nxd, rate: float) -> None:
    nxd(1, tp=1)
    model_parallel_xla_manual_seed(5)
    module: Any = torch_bridge.optimize(Forking(rate).to("xla"))
    for _ in range(6):
        torch.rand(2, device="xla")
        torch.rand(2)
        module(torch.ones(2, 8, device="xla")).sum().backward()
        xm.mark_step()
    state = module.forward.state()
    assert (state.played > 0) == (rate == 0.0) and ("random state of its own" in state.reason) == (rate != 0.0)
