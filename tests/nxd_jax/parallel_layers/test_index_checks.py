"""`NXD_JAX_CHECK_INDICES` and layers that share out a vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nxd_jax.parallel_layers import ParallelEmbedding, parallel_cross_entropy
from tests.nxd_jax.conftest import Nxd
from tests.torch_bridge.test_index_checks import checked

__all__ = ["checked"]


def test_vocabulary_parallel_layers(nxd: Nxd, checked: Callable[..., None]) -> None:
    """They mask what other ranks hold, so an index past the whole vocabulary would give zeros on all of them."""
    checked()
    nxd(2, tp=2)
    embedding = ParallelEmbedding(10, 4).to("xla")
    logits = torch.zeros(3, 5, device="xla")
    good = torch.tensor([0, 9, 5], device="xla")
    assert embedding(good).isfinite().all().item()
    assert parallel_cross_entropy(logits, torch.tensor([0, -100, 9], device="xla")).isfinite().all().item()
    with pytest.raises(
        IndexError,
        match=r"ParallelEmbedding: index 10 .*0 to 9 are allowed \(the 10 rows of the full table\).*parallel_layers/test_index_checks.py",
    ):
        embedding(torch.tensor([0, 10], device="xla")).cpu()
    with pytest.raises(IndexError, match=r"parallel_cross_entropy: index 10 .*0 to 9 or -100 are allowed \(the 10 classes"):
        parallel_cross_entropy(logits, torch.tensor([0, -100, 10], device="xla")).cpu()
