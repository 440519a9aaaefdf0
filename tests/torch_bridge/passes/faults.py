"""Passes broken on purpose: for each of them, what the verifier must find."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
from jax.sharding import PartitionSpec

from tests.torch_bridge.passes.small_programs import (
    arithmetic,
    captured,
    drifting,
    halved,
    layered,
    numbers,
    played,
    prepared,
    ranked,
    rounded,
    training,
    training_in_place,
    unequal,
)
from torch_bridge.compiler import interpret, interpret_loops, shard_mapping
from torch_bridge.compiler.program_io import Ports
from torch_bridge.ir.graph import GraphBuilder
from torch_bridge.ir.segment import Segment
from torch_bridge.passes import check_replicas, cut_segment, find_repeats, fold_repeats, hoist_constants, scalar_inputs, varying_axes
from torch_bridge.passes.find_repeats import Carried
from torch_bridge.precision import rewrite_roundings
from torch_bridge.replay.tape import Recording

Break = Callable[[pytest.MonkeyPatch], None]


@dataclasses.dataclass(frozen=True)
class Fault:
    """program: what runs, ending in values; broken: seeds the fault; after, rule: what the error says; runs: without the verifier the program runs to its end
    (and may give anything), otherwise something else fails."""

    program: Callable[[], Any]
    broken: Break
    after: str
    rule: str
    runs: bool = True


def changed(owner: Any, name: str, change: Callable[..., Any]) -> Break:
    """`change(original, *args, **kwargs)` in place of a function or method."""

    def seed(monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def broken(*args: Any, **kwargs: Any) -> Any:
            return change(original, *args, **kwargs)

        monkeypatch.setattr(owner, name, broken)

    return seed


def _swap(row: Any, i: int, j: int) -> Any:
    row = list(row)
    row[i], row[j] = row[j], row[i]
    return row


def _counts_too_far(emit: Any, self: Segment, *args: Any) -> int:
    vid = emit(self, *args)
    self.next_vid += 1
    return vid


def _writes_what_is_read(write: Any, self: Segment, storage: Any, vid: int) -> None:
    """A storage gets the value before the one that is meant."""
    write(self, storage, vid - 1 if vid > 2 else vid)


def _loses_numbers(emit: Any, self: Segment, entry: Any, ids: Any, numbers: Any = (), draw: Any = None) -> int:
    return emit(self, entry, ids, (), draw)


def _reads_later(emit: Any, self: Segment, entry: Any, ids: Any, *args: Any) -> int:
    return emit(self, entry, tuple(self.next_vid if v >= 0 else v for v in ids), *args)


def _renumbers_leaves(insert: Any, segment: Segment, fills: Any) -> Any:
    """The first two leaves of equal shape change places for those who read them."""
    leaves, leaf_of, constant = insert(segment, fills)
    shapes = [a.shape for a in segment.leaves]
    first, second = next((i, j) for j in range(len(shapes)) for i in range(j) if shapes[i] == shapes[j])
    leaf_of[-first - 1], leaf_of[-second - 1] = leaf_of[-second - 1], leaf_of[-first - 1]
    return leaves, leaf_of, constant


def _drops_a_leaf(insert: Any, segment: Segment, fills: Any) -> Any:
    leaves, leaf_of, constant = insert(segment, fills)
    return leaves[:-1], leaf_of, constant


def _misplaces_numbers(rewrite: Any, segment: Segment, fills: Any) -> None:
    rewrite(segment, fills)
    segment.numbers = [(i + 1, values) for i, values in segment.numbers]


def _forgets_what_is_read(rewrite: Any, segment: Segment, fills: Any) -> None:
    """Storages that are only read keep the ids that they had."""
    holders = [s for ref in segment.holders.values() if (s := ref()) is not None and s.vid < 0]
    before = [s.vid for s in holders]
    rewrite(segment, fills)
    for storage, vid in zip(holders, before, strict=True):
        storage.vid = vid


def _orders_inputs(inputs: Any, self: GraphBuilder) -> list[int]:
    return inputs(self)[::-1]


def _forgets_a_node(live: Any, self: GraphBuilder) -> list[bool]:
    """What nothing needs is there too."""
    return [True] * len(live(self))


def _reads_the_other(build: Any, self: GraphBuilder, *args: Any, **kwargs: Any) -> Any:
    """The inputs of the first op that reads two values change places."""
    graph = build(self, *args, **kwargs)
    node = next(n for n in graph.nodes if n.op == "call_function" and len(set(n.all_input_nodes)) == 2 and "draw" not in n.meta)
    node.args = (node.args[1], node.args[0], *node.args[2:])
    return graph


def _one_input_for_all(labels: Any, nodes: Any, sources: Any, numbers: Any, kind: type, coarser: Any) -> list[Any]:
    return [0] * len(labels(nodes, sources, numbers, kind, coarser))


def _shares_across_ops(labels: Any, *args: Any) -> list[Any]:
    """Whatever is equal when it is compiled shares an input, although it need not stay equal."""
    return [value for *_, value, _ in labels(*args)]


def _forgets_tp(union: Any, of: Any) -> Any:
    return union(of) - {"tp"}


def _reduces_nothing(after: Any, node: Any, axes: Any, every: Any) -> Any:
    return axes | every


def _keeps_one_key(spread: Any, graph: Any, inputs: Any) -> None:
    spread(graph, inputs)
    for node in graph.nodes:
        if "draw" in node.meta:
            node.meta["key_axes"] = frozenset({"dp"})


def _says_nothing(check: Any, *args: Any) -> None:
    pass


def _labels_as_shared(label: Any, varied: Any, wanted: Any) -> Any:
    return PartitionSpec()


def _same_name(name: Any, node: Any, given: Any) -> Any:
    """Whatever the constants among the arguments are, a node counts as repeated."""
    target, _, *rest = name(node, given)
    return target, None, *rest


def _carries_the_wrong_value(run: Any, *args: Any) -> Any:
    found = run(*args)
    if found is not None:
        for row in found.inputs:
            row[:] = [find_repeats.Same(x.first) if isinstance(x, Carried) else x for x in row]
    return found


def _cuts_a_run(find: Any, *args: Any, **kwargs: Any) -> Any:
    """The last iteration lacks a node."""
    found = find(*args, **kwargs)
    for run in found[:1]:
        run.nodes[-1] = run.nodes[-1][:-1]
    return found


def _loses_results(need: Any, self: fold_repeats.Plan, nodes: Any) -> None:
    pass


def _stores_the_wrong_way(enter: Any, self: fold_repeats.Plan, loop: Any) -> None:
    """A loop says that it stores in the other order after others have noted its places."""
    enter(self, loop)
    loop.refs = {x: fold_repeats.Slice(ref.series, len(x.nodes) - 1 - ref.first, -ref.step) for x, ref in loop.refs.items()}


def _mixes_a_stack(results: Any, self: fold_repeats.Plan) -> Any:
    return [(series, [*members[1:], members[0]]) for series, members in results(self)]


def _groups_twice(members: Any, self: fold_repeats.Plan, *args: Any) -> Any:
    found = members(self, *args)
    return [*found, *found[:1]]


def _leaves_twice(paired: Any, self: Ports, updates: Any) -> Ports:
    ports = paired(self, updates)
    return dataclasses.replace(ports, order=(ports.order[0], *ports.order[:-1]))


def _takes_over_others(paired: Any, self: Ports, updates: Any) -> Ports:
    """Each input gets the new value of the next."""
    ports = paired(self, updates)
    count = len(ports.donated)
    return dataclasses.replace(ports, order=(*ports.order[1:count], ports.order[0], *ports.order[count:]))


def _loses_a_row(of: Any, inputs: int, results: int, stacks_in: Any = (), stacks_out: Any = ()) -> Ports:
    return of(inputs, results, [port[:-1] for port in stacks_in], stacks_out)


def _passes_too_little(cut: Any, *args: Any) -> Any:
    """A part computes again what the one before has computed."""
    first, *rest = cut(*args)
    return (first, *(dataclasses.replace(part, given=frozenset()) for part in rest))


def _frees_leaves_early(cut: Any, *args: Any) -> Any:
    return tuple(dataclasses.replace(part, shared=frozenset()) for part in cut(*args))


def _runs_backwards(cut: Any, *args: Any) -> Any:
    return cut(*args)[::-1]


def _rounds_to_float32(rewrite: Any, *args: Any, **kwargs: Any) -> Any:
    return tuple(x.astype("float32") for x in rewrite(*args, **kwargs))


def _transposes(run: Any, *args: Any, **kwargs: Any) -> Any:
    return tuple(x.T for x in run(*args, **kwargs))


def _stacks_too_few(run: Any, self: interpret_loops.Evaluation) -> Any:
    alone, stacked = run(self)
    return alone, [x[:-1] for x in stacked]


def _reads_in_another_order(read_all: Any, self: Segment, storages: Any, views: Any) -> Any:
    """A tape is played on its externals, the last one first."""
    return read_all(self, storages, views)[::-1]


def _names_the_value_before(relative: Any, self: Recording, vid: int, *args: Any) -> int:
    found = relative(self, vid, *args)
    return found - 1 if found > 0 else found


def _splices_too_few(splice: Any, self: Segment, nodes: Any, values: int, *args: Any) -> None:
    splice(self, nodes, values - 1, *args)


FAULTS: dict[str, Fault] = {
    "recording counts results twice": Fault(
        arithmetic, changed(Segment, "emit", _counts_too_far), "recording", "an input is a leaf or", runs=False
    ),
    "recording writes another value": Fault(
        arithmetic,
        changed(Segment, "write", _writes_what_is_read),
        "recording",
        "an op reads the shapes and dtypes that it was recorded for",
    ),
    "recording loses numbers": Fault(
        numbers, changed(Segment, "emit", _loses_numbers), "recording", "a node has the lifted numbers", runs=False
    ),
    "recording reads a later value": Fault(
        arithmetic, changed(Segment, "emit", _reads_later), "recording", "an input is a leaf or the result of an earlier node", runs=False
    ),
    "hoist_constants swaps leaves": Fault(
        training,
        changed(hoist_constants, "_insert_leaves", _renumbers_leaves),
        "hoist_constants",
        "every storage waits for the same computation",
    ),
    "hoist_constants drops a leaf": Fault(
        training, changed(hoist_constants, "_insert_leaves", _drops_a_leaf), "hoist_constants", "a leaf", runs=False
    ),
    "hoist_constants misplaces numbers": Fault(
        training, changed(hoist_constants, "_rewrite", _misplaces_numbers), "hoist_constants", "a node has the lifted numbers", runs=False
    ),
    "hoist_constants forgets storages that are read": Fault(
        prepared,
        changed(hoist_constants, "_rewrite", _forgets_what_is_read),
        "hoist_constants",
        "a leaf has the shape and dtype of the storage",
    ),
    "GraphBuilder orders leaves otherwise": Fault(
        arithmetic,
        changed(GraphBuilder, "_inputs", _orders_inputs),
        "GraphBuilder",
        "the graph takes the leaves that its results depend on, in order",
    ),
    "GraphBuilder keeps dead nodes": Fault(
        arithmetic, changed(GraphBuilder, "_live_nodes", _forgets_a_node), "GraphBuilder", "the graph has the nodes that its results need"
    ),
    "GraphBuilder swaps operands": Fault(
        arithmetic, changed(GraphBuilder, "build", _reads_the_other), "GraphBuilder", "a node reads the values that it was recorded on"
    ),
    "GraphBuilder swaps operands of a capture": Fault(
        captured, changed(GraphBuilder, "build", _reads_the_other), "GraphBuilder", "a node reads the values that it was recorded on"
    ),
    "scalar_inputs has one input for all": Fault(
        numbers, changed(scalar_inputs, "_labels", _one_input_for_all), "scalar_inputs", "numbers that share an input are equal", runs=False
    ),
    "scalar_inputs shares across ops": Fault(
        numbers, changed(scalar_inputs, "_labels", _shares_across_ops), "scalar_inputs", "numbers that share an input come from one op"
    ),
    "varying_axes forgets an axis": Fault(
        ranked, changed(varying_axes, "union", _forgets_tp), "varying_axes", "a value varies over the axes of its inputs"
    ),
    "varying_axes lets a reduction reduce nothing": Fault(
        ranked, changed(varying_axes, "_after", _reduces_nothing), "varying_axes", "a value varies over the axes of its inputs"
    ),
    "varying_axes draws along another axis": Fault(
        ranked, changed(varying_axes, "spread", _keeps_one_key), "varying_axes", "ranks draw the same numbers but along the axes"
    ),
    "check_replicas says nothing": Fault(
        drifting, changed(check_replicas, "check", _says_nothing), "check_replicas", "parameters that drift apart are told of"
    ),
    "shard_mapping labels all results as shared": Fault(
        ranked, changed(shard_mapping, "_label", _labels_as_shared), "shard_mapping", "the label of a result has all axes"
    ),
    "find_repeats takes other constants for equal": Fault(
        unequal, changed(find_repeats, "_name", _same_name), "find_repeats", "all iterations of a run do the same"
    ),
    "find_repeats carries nothing": Fault(
        layered,
        changed(find_repeats, "_run", _carries_the_wrong_value),
        "find_repeats",
        "an input is made in this iteration, the one before",
    ),
    "find_repeats cuts an iteration": Fault(
        layered, changed(find_repeats, "find", _cuts_a_run), "find_repeats", "a run has several iterations, of equal length", runs=False
    ),
    "fold_repeats loses results": Fault(
        layered,
        changed(fold_repeats.Plan, "_need", _loses_results),
        "fold_repeats",
        "a loop gives every value that is read after it",
        runs=False,
    ),
    "fold_repeats reads layers in the other order": Fault(
        layered,
        changed(fold_repeats.Plan, "_enter", _stores_the_wrong_way),
        "fold_repeats",
        "a loop reads in each iteration the value that is meant",
    ),
    "fold_repeats mixes the results of a stack": Fault(
        layered, changed(fold_repeats.Plan, "_stacked_results", _mixes_a_stack), "fold_repeats", "a loop reads in each iteration"
    ),
    "fold_repeats groups entries twice": Fault(
        layered, changed(fold_repeats.Plan, "_members", _groups_twice), "fold_repeats", "an entry of an op on lists is in one group"
    ),
    "program_io lets a result leave twice": Fault(
        training, changed(Ports, "paired", _leaves_twice), "program_io", "every result leaves once"
    ),
    "program_io takes over another buffer": Fault(
        training_in_place, changed(Ports, "paired", _takes_over_others), "program_io", "an input is taken over by"
    ),
    "program_io loses a row of a stack": Fault(
        layered, changed(Ports, "of", _loses_a_row), "program_io", "stacks come in and leave as the plan"
    ),
    "cut_segment passes too little": Fault(
        halved, changed(cut_segment, "cut", _passes_too_little), "cut_segment", "a node is computed in one part"
    ),
    "cut_segment frees leaves early": Fault(
        halved, changed(cut_segment, "cut", _frees_leaves_early), "cut_segment", "a part takes over no leaf that a later one reads"
    ),
    "cut_segment runs parts backwards": Fault(
        halved, changed(cut_segment, "cut", _runs_backwards), "cut_segment", "a part takes values of parts before it", runs=False
    ),
    "rewrite_roundings changes a dtype": Fault(
        rounded,
        changed(rewrite_roundings, "rewrite", _rounds_to_float32),
        "rewrite_roundings",
        "a result has the shape and dtype of its node",
    ),
    "interpret transposes": Fault(
        arithmetic, changed(interpret, "run", _transposes), "interpret", "a result has the shape and dtype of its node", runs=False
    ),
    "interpret_loops drops a row": Fault(
        layered,
        changed(interpret_loops.Evaluation, "run", _stacks_too_few),
        "interpret_loops",
        "a result has the shape and dtype",
        runs=False,
    ),
    "replay takes externals for each other": Fault(
        played, changed(Segment, "read_all", _reads_in_another_order), "replay", "a tape is played on tensors of the shapes and dtypes"
    ),
    "replay records other values": Fault(
        played, changed(Recording, "_relative", _names_the_value_before), "replay", "an op reads the shapes and dtypes"
    ),
    "replay splices too few values": Fault(
        played, changed(Segment, "splice", _splices_too_few), "replay", "a tape begins where the segment ends"
    ),
}
