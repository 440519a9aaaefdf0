"""`neuronx_distributed.pipeline.partition`: which layers make a stage. Cutting a recorded model is not there yet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from nxd_jax import _later
from nxd_jax.parallel_layers import parallel_state


def even_sizes(layers: int, stages: int) -> list[int]:
    """How many layers each stage has: as many as any other, or one more for the last stages if they do not come out even. AssertionError for too few layers."""
    size, more = divmod(layers, stages)
    if not size:
        raise AssertionError(
            f"{layers} layers cannot make {stages} stages: each needs one. Use fewer stages (pipeline_parallel_size, virtual_pipeline_size)"
        )
    return [size + (stage >= stages - more) for stage in range(stages)]


def create_partitions(pipeline_parallel_size: int, model_layer_names: Sequence[str]) -> list[str]:
    """`partition.create_partitions`: the last layer of each stage but the last one's. Layers left over go to the last stages, one each.

    Raises AssertionError for fewer layers than stages.
    """
    sizes = even_sizes(len(model_layer_names), pipeline_parallel_size)
    return [model_layer_names[end - 1] for end in itertools.accumulate(sizes[:-1])]


def stage_to_pipeline_parallel_rank(stage: int, pp_size: int | None = None) -> int:
    """`partition.stage_to_pipeline_parallel_rank`: the rank of a stage; with several stages on a rank they go round."""
    return stage % (parallel_state.get_pipeline_model_parallel_size() if pp_size is None else pp_size)


def analyze_pipeline_module(*args: Any, **kwargs: Any) -> Any:
    """`partition.analyze_pipeline_module`: raises NotImplementedError."""
    raise _refused("analyze_pipeline_module")


def analyze_shared_weights_across_stages(*args: Any, **kwargs: Any) -> Any:
    """`partition.analyze_shared_weights_across_stages`: raises NotImplementedError."""
    raise _refused("analyze_shared_weights_across_stages")


def partition_traced_model(*args: Any, **kwargs: Any) -> Any:
    """`partition.partition_traced_model`: raises NotImplementedError."""
    raise _refused("partition_traced_model")


def _refused(name: str) -> NotImplementedError:
    return NotImplementedError(f"neuronx_distributed.pipeline.partition.{name}: {_later.PIPELINE}")
