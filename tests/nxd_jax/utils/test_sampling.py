"""Sampling: greedy, the distribution of draws, seeds, and equal tokens on all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torch_bridge
from nxd_jax.utils.sampling import Sampler
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.parallel_layers.parts import per_rank

DEVICES = ("cpu", "xla")


def config(top_k: int, **given: Any) -> Any:
    return SimpleNamespace(do_sample=True, num_beams=1, top_k=top_k, on_device_sampling=True, **given)


@pytest.mark.parametrize("device", DEVICES)
def test_greedy(device: str) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, -1.0, -2.0], [0.0, 1.0, 2.0]], device=device)
    assert Sampler(config(1)).sample(logits).tolist() == [1, 0, 2]
    assert Sampler(config(1)).sample(logits.int()).tolist() == [1, 0, 2]


def test_the_tokens_that_upstream_expects() -> None:
    """torch's seed 5 on the CPU: the two tokens of upstream's own test."""
    transformers = pytest.importorskip("transformers")
    sampler = Sampler(transformers.GenerationConfig(do_sample=True, top_k=3, num_beams=1))
    torch.manual_seed(5)
    assert sampler.sample(torch.rand(2, 100)).tolist() == [9, 71]


@pytest.mark.core(keep=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_distribution(device: str, dtype: torch.dtype) -> None:
    """Chi-square of 40,000 draws against the softmax of the five best: 4 degrees of freedom, 18.47 is exceeded by one in a thousand."""
    logits = torch.tensor([0.5, -8.0, 2.0, 1.5, -30.0, 1.25, 3.0, 0.25], dtype=dtype)
    kept = [6, 2, 3, 5, 0]
    weights = torch.tensor([2.718281828 ** float(logits[t]) for t in kept], dtype=torch.float64)
    expected = weights / weights.sum() * 40_000
    sampler = Sampler(config(5), torch.Generator(device).manual_seed(7))
    tokens = sampler.sample(logits.expand(40_000, 8).to(device)).cpu()
    counts = torch.bincount(tokens, minlength=8).double()
    assert counts[kept].sum() == 40_000
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 18.47


@pytest.mark.parametrize("device", DEVICES)
def test_impossible_tokens(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the number drawn is the largest there is and the probabilities sum to less than it."""
    largest = 1 - 2**-24
    real = torch.rand
    monkeypatch.setattr(torch, "rand", lambda shape, **given: real(shape, **given) * 0 + largest)
    logits = torch.cat((torch.randn(64, 30), torch.full((64, 2), -torch.inf)), 1).to(device)
    assert Sampler(config(32)).sample(logits).max() < 30
    monkeypatch.setattr(torch, "rand", lambda shape, **given: real(shape, **given) * 0)
    assert torch.equal(Sampler(config(32)).sample(logits), logits.argmax(1))


@pytest.mark.parametrize("device", DEVICES)
def test_seeds(device: str) -> None:
    """One generator gives one sequence of tokens, which goes on from call to call; without one the device's own seed counts."""
    logits = torch.zeros(40, 50, device=device)

    def twice(sampler: Sampler) -> list[list[int]]:
        return [sampler.sample(logits).tolist() for _ in range(2)]

    first = twice(Sampler(config(50), torch.Generator(device).manual_seed(1)))
    assert first[0] != first[1]
    assert twice(Sampler(config(50), torch.Generator(device).manual_seed(1))) == first
    assert twice(Sampler(config(50), torch.Generator(device).manual_seed(2))) != first
    if device == "xla":  # a generator of the CPU has a seed, too
        assert twice(Sampler(config(50), torch.Generator().manual_seed(1))) == first
    torch.manual_seed(4)
    own = twice(Sampler(config(50)))
    torch.manual_seed(4)
    assert twice(Sampler(config(50))) == own


def test_ranks_choose_alike(nxd: Nxd) -> None:
    nxd(8, tp=4)
    tokens = per_rank(Sampler(config(20)).sample(torch.zeros(16, 20, device="xla")))
    assert all(torch.equal(t, tokens[0]) for t in tokens) and len(set(tokens[0].tolist())) > 3


def test_medusa() -> None:
    logits = torch.tensor([[0.0, 4.0, 2.0, 3.0], [9.0, 0.0, 1.0, 2.0]])
    assert Sampler(config(3, is_medusa=True)).sample(logits).tolist() == [[1, 3, 2], [0, 3, 2]]
    assert Sampler(config(1, is_medusa=True)).sample(logits).tolist() == [1, 0]


def test_in_a_graph() -> None:
    """A captured sampler draws from JAX's keys: no value is read, and another key gives other tokens."""
    import jax

    class Picks(torch.nn.Module):
        def forward(self, logits: torch.Tensor) -> torch.Tensor:
            return Sampler(config(4)).sample(logits)

    f = torch_bridge.to_jax(torch_bridge.capture(Picks(), torch.zeros(30, 9)))
    logits = jax.numpy.tile(jax.numpy.array([0.0, 9.0, 9.0, 0.0, 9.0, 9.0, 0.0, 0.0, 0.0]), (30, 1))
    found = [f({}, {}, jax.random.key(k), logits)[0].tolist() for k in (0, 1)]
    assert found[0] != found[1] and {*found[0], *found[1]} == {1, 2, 4, 5}


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"do_sample": False}, NotImplementedError, "do_sample=False, num_beams=1: only do_sample=True with num_beams=1 .* top_k=1"),
        ({"num_beams": 4}, NotImplementedError, "do_sample=True, num_beams=4"),
        ({"top_k": 0}, ValueError, r"top_k=0 must be a number from 1 \(greedy\)"),
        ({"top_k": None}, ValueError, "top_k=None must be"),
    ],
)
def test_configurations(given: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Sampler(SimpleNamespace(**{"do_sample": True, "num_beams": 1, "top_k": 5} | given))


@pytest.mark.parametrize("shape", [(9,), (2, 3), (1, 2, 9)])
def test_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"logits have shape \[.*\]: \[batch, vocabulary\] is wanted, with at least top_k=5"):
        Sampler(config(5)).sample(torch.zeros(shape))
