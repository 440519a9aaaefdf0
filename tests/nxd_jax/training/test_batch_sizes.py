"""Global batches over ranks and micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from nxd_jax.training.batch_sizes import BatchSizes


def config(gbs: int = 32, mbs: int = 2, **sizes: int) -> Any:
    return OmegaConf.create({"data": {"global_batch_size": gbs, "micro_batch_size": mbs}, "distributed_strategy": sizes})


def test_sizes() -> None:
    found = BatchSizes.of(config(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, context_parallel_size=2), 16)
    assert (found.dp_size, found.num_microbatches, found.per_rank) == (2, 8, 16)


def test_context_parallel_size_may_stand_anywhere() -> None:
    cfg = OmegaConf.merge(config(), {"model": {"context_parallel_size": 4}})
    assert BatchSizes.of(cfg, 8).dp_size == 2


def test_ranks_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"12 ranks .* cannot be divided by tensor_model_parallel_size=8, .*must be a multiple of 8"):
        BatchSizes.of(config(tensor_model_parallel_size=8), 12)


@pytest.mark.parametrize(("gbs", "near"), [(30, "24 or 32"), (5, "8 for example"), (0, "8 for example")])
def test_batches_that_do_not_divide(gbs: int, near: str) -> None:
    """(q) The original rounds down."""
    with pytest.raises(
        ValueError, match=rf"data.global_batch_size={gbs} must be a multiple of data.micro_batch_size=2 times 4 data-parallel ranks.*{near}"
    ):
        BatchSizes.of(config(gbs, tensor_model_parallel_size=2), 8)
