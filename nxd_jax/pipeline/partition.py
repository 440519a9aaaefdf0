"""`neuronx_distributed.pipeline.partition`: which layers make a stage, what stages give to one another, and which weights they share.

A stage ends with a node of the traced model that has a mark (`cut_after`).
"""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.fx.passes.split_module import split_module

from nxd_jax.parallel_layers import parallel_state
from nxd_jax.pipeline import layer_nodes

MARK = "partition"
"""In a node's `meta`: the node is the last of its stage."""


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


def cut_after(traced_model: fx.GraphModule, layer: str) -> None:
    """Let a stage end with a layer (dotted name), where it is called last. RuntimeError for one that is no node, AssertionError for a second cut there."""
    node = next((node for node in reversed(traced_model.graph.nodes) if node.op == "call_module" and node.target == layer), None)
    if node is None:
        known = [str(node.target) for node in traced_model.graph.nodes if node.op == "call_module"]
        raise RuntimeError(f"the traced model has no layer {layer!r} to cut after; its layers are {', '.join(known) or 'none'}")
    if MARK in node.meta:
        raise AssertionError(f"the model is cut after {layer!r} already")
    node.meta[MARK] = True


def stage_numbers(traced_model: fx.GraphModule) -> dict[fx.Node, int]:
    """The stage of each node of a model that has been cut. A field of an object is taken in the stage that has made it: objects do not go to others.

    So is what a layer has collected beside its result (`layer_nodes`).
    """
    stage = 0
    found: dict[fx.Node, int] = {}
    for node in traced_model.graph.nodes:
        part = node.target is getattr or layer_nodes.is_part(node)
        found[node] = found[node.args[0]] if part and isinstance(node.args[0], fx.Node) else stage
        stage += MARK in node.meta
    return found


@dataclass
class PipelineIO:
    """`partition.PipelineIO`: a value that one stage gets from the one before.

    Attributes:
        name: of the node that made it.
        input_idx: which argument of the stage it is; None: the stage only hands it on.
        output_idx: which result of the stage before it is; None: that one only handed it on.
        metadata: what is known of its tensors.
        obj: the value itself, if it is no tensor.
    """

    name: str
    input_idx: int | None = None
    output_idx: int | None = None
    metadata: Any = None
    obj: Any = None

    def __str__(self) -> str:
        return f"{self.name}_{self.input_idx}_{self.output_idx}"

    __repr__ = __str__


def partition_traced_model(traced_model: fx.GraphModule, qualname_map: dict[str, str] | None = None) -> fx.GraphModule:
    """`partition.partition_traced_model`: a module whose children `submod_0`, `submod_1`, ... are the stages.

    qualname_map: filled with the name in the traced model of each module and parameter of a stage, by its new name. The traced model stays as it is.
    """
    stages = stage_numbers(traced_model)
    return split_module(traced_model, traced_model, stages.__getitem__, qualname_map, keep_original_order=True)


def analyze_pipeline_module(
    top_mod: fx.GraphModule,
) -> tuple[dict[int, OrderedDict[str, PipelineIO]], dict[int, dict[str, int]], dict[int, int], dict[int, int]]:
    """`partition.analyze_pipeline_module`: how the stages of `partition_traced_model` are connected.

    Returns four dicts by stage: what it gets from the stage before, by name (what that one made, then what it handed on); which argument each of the model's
    inputs is; how many arguments it has; how many results. A value that a later stage needs is handed on by the stages between; inputs of the model are not.
    What the model returns of earlier stages is handed on to the last one.
    """
    calls = [node for node in top_mod.graph.nodes if node.op == "call_module"]
    stage_of = {node: stage for stage, node in enumerate(calls)}
    results = {node: _results(top_mod.get_submodule(node.target)) for node in calls}
    last_use = _last_uses(top_mod, stage_of)
    connections: dict[int, OrderedDict[str, PipelineIO]] = {}
    inputs: dict[int, dict[str, int]] = {}
    alive: list[fx.Node] = []
    for stage, call in enumerate(calls):
        arguments = {value: k for k, value in reversed(list(enumerate(call.args))) if isinstance(value, fx.Node)}
        made = {_name(value, results): _index(value) for value in alive if _producer(value) is calls[stage - 1]} if stage else {}
        connections[stage] = OrderedDict(
            (name, PipelineIO(name, arguments.get(value), made.get(name))) for value in alive for name in [_name(value, results)]
        )
        inputs[stage] = {
            str(value.target): k for value, k in sorted(arguments.items(), key=lambda item: item[1]) if value.op == "placeholder"
        }
        own = [value for value in last_use if _producer(value) is call and last_use[value] > stage]
        alive = sorted(own, key=_index) + [value for value in alive if last_use[value] > stage]
    counts = {stage: len(call.args) for stage, call in enumerate(calls)}
    return connections, inputs, counts, {stage: len(results[call]) for stage, call in enumerate(calls)}


def _results(stage: nn.Module) -> list[str]:
    """Names of what a stage gives."""
    assert isinstance(stage, fx.GraphModule)
    (found,) = next(node for node in reversed(stage.graph.nodes) if node.op == "output").args
    return [str(value) for value in (found if isinstance(found, tuple | list) else (found,))]


def _last_uses(top_mod: fx.GraphModule, stage_of: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """The last stage that needs each value which a stage makes; what the model returns is needed by the last stage."""
    last = len(stage_of) - 1
    found: dict[fx.Node, int] = {}
    for node in top_mod.graph.nodes:
        if node.op not in ("call_module", "output"):
            continue
        for value in node.all_input_nodes:
            if value.op != "placeholder":
                found[value] = max(found.get(value, 0), stage_of.get(node, last))
    return found


def _producer(value: fx.Node) -> fx.Node:
    """The call of the stage that makes a value."""
    return _producer(value.args[0]) if value.target is operator.getitem else value  # type: ignore[arg-type]


def _index(value: fx.Node) -> int:
    """Which result of its stage a value is."""
    return value.args[1] if value.target is operator.getitem else 0  # type: ignore[return-value]


def _name(value: fx.Node, results: dict[fx.Node, list[str]]) -> str:
    return results[_producer(value)][_index(value)]


def analyze_shared_weights_across_stages(top_module: nn.Module, partitions: Sequence[nn.Module]) -> list[list[tuple[str, int]]]:
    """`partition.analyze_shared_weights_across_stages`: parameters that several ranks have: lists of (name in the stage, pipeline rank), by rank.

    A weight that a rank has in two stages, or twice in one, stands there once.
    """
    size = parallel_state.get_pipeline_model_parallel_size() if parallel_state.model_parallel_is_initialized() else 1
    size = len(partitions) if size == 1 else size
    holders: dict[int, dict[int, str]] = {id(parameter): {} for parameter in top_module.parameters()}
    for stage, module in enumerate(partitions):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            holders.setdefault(id(parameter), {}).setdefault(stage_to_pipeline_parallel_rank(stage, size), name)
    return [[(name, rank) for rank, name in found.items()] for found in holders.values() if len(found) > 1]
