"""Prefill and 64 decodes, one token at a time, equal one forward over the whole text, at each tensor-parallel degree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.nxd_jax.trace import nets

STEPS = 64


@pytest.fixture
def long_text(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Token ids, for the decoder with 8 heads and a cache of their length."""
    for name, value in (("HEADS", 8), ("HEAD", nets.WIDTH // 8), ("LENGTH", nets.PROMPT + STEPS)):
        monkeypatch.setattr(nets, name, value)
    return nets.tokens(nets.PROMPT + STEPS)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_64_decodes_equal_the_full_forward(tp: int, long_text: torch.Tensor, tmp_path: Path) -> None:
    model = nets.built.__wrapped__(tp).model(workdir=tmp_path)
    wanted = nets.reference(long_text)
    first = model(long_text[:, : nets.PROMPT], torch.arange(nets.PROMPT))["logits"]
    torch.testing.assert_close(first, wanted[:, : nets.PROMPT])
    for k in range(nets.PROMPT, nets.PROMPT + STEPS):
        found = model(pos=torch.tensor([k]), ids=long_text[:, k : k + 1])
        torch.testing.assert_close(found["logits"], wanted[:, k : k + 1], msg=lambda text, k=k: f"token {k}: {text}")
    assert found["calls"].tolist() == [5.0 + 1 + STEPS]
    for rank in range(tp):
        cache = model.read_from_neuron_buffer("cache_k", rank)
        assert cache.shape[2] == 8 // tp and cache.abs().amin(dim=(0, 2, 3)).count_nonzero() == nets.PROMPT + STEPS
