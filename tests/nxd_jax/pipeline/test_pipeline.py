"""The names of `neuronx_distributed.pipeline`: scripts that run without stages import them."""

from __future__ import annotations

import neuronx_distributed as nxd_api
import pytest
import torch
from neuronx_distributed.pipeline import NxDPPModel, model, partition

from tests.nxd_jax.conftest import Nxd

ADVICE = "pipeline parallelism is not there yet; use tensor_parallel_size and context_parallel_size"


def test_no_model_is_a_pipeline(nxd: Nxd) -> None:
    nxd(2)
    config = nxd_api.neuronx_distributed_config()
    wrapped = nxd_api.initialize_parallel_model(config, lambda: torch.nn.Linear(1, 1))
    assert not isinstance(wrapped, NxDPPModel) and issubclass(NxDPPModel, torch.nn.Module)
    assert NxDPPModel is model.NxDPPModel is nxd_api.pipeline.NxDPPModel
    config = nxd_api.neuronx_distributed_config(pipeline_parallel_size=2, pipeline_config={})
    with pytest.raises(NotImplementedError, match=ADVICE):
        nxd_api.initialize_parallel_model(config, lambda: torch.nn.Linear(1, 1))


def test_a_pipeline_says_what_to_do_instead() -> None:
    with pytest.raises(
        NotImplementedError, match=f"neuronx_distributed.pipeline.NxDPPModel: {ADVICE}.*pipeline_parallel_size=1.*zero_one_enabled"
    ):
        NxDPPModel(torch.nn.Linear(1, 1), num_microbatches=2)


@pytest.mark.parametrize(
    ("stages", "layers", "ends"), [(4, 40, [9, 19, 29]), (4, 19, [3, 8, 13]), (3, 5, [0, 2]), (1, 7, []), (3, 3, [0, 1])]
)
def test_layers_of_stages(stages: int, layers: int, ends: list[int]) -> None:
    names = [f"layers.{k}" for k in range(layers)]
    assert partition.create_partitions(stages, names) == [names[k] for k in ends]


def test_fewer_layers_than_stages() -> None:
    with pytest.raises(AssertionError, match="2 layers cannot make 3 stages: each needs one"):
        partition.create_partitions(3, ["a", "b"])


def test_stages_go_round(nxd: Nxd) -> None:
    assert [partition.stage_to_pipeline_parallel_rank(s, 2) for s in range(4)] == [0, 1, 0, 1]
    nxd(4, pp=4)
    assert partition.stage_to_pipeline_parallel_rank(5) == 1
