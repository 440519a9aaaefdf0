"""Rules of a compiled program: what goes in and comes out, by shape, dtype and label, and which buffers it takes over (`passes/verify`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import PartitionSpec

from torch_bridge.ir import dtypes
from torch_bridge.mesh import places, sharding
from torch_bridge.mesh.sharding import NONE
from torch_bridge.passes.verify import report

if TYPE_CHECKING:
    from torch_bridge.compiler.program_spec import Execution, ProgramSpec
    from torch_bridge.compiler.shard_mapping import RankLabels

Aval = tuple[tuple[int, ...], Any]


def check(spec: ProgramSpec, run: Execution) -> None:
    """Raise `VerificationError` for the first rule that the spec of a program for this execution breaks."""
    inputs = [(tuple(a.shape), np.dtype(a.dtype)) for a in spec.avals]
    results = _results(spec)
    if spec.labels is None:
        labels_in: Sequence[Any] = [None] * len(inputs)
        labels_out: Sequence[Any] = [None] * len(results)
    else:
        labels_in, labels_out = spec.labels.inputs, spec.labels.outputs
        spec.labels.check(spec, run)
    _ports("inputs", spec.ports.inputs, spec.ports.stacked_inputs, list(zip(inputs, labels_in, strict=True)))
    _ports("results", spec.ports.outputs, spec.ports.stacked_outputs, list(zip(results, labels_out, strict=True)))
    if spec.plan is not None:
        _stacks(spec)
    if sorted(spec.ports.order) != list(range(len(spec.ports.outputs))):
        _fail("every result leaves once", f"{spec.ports.order} of {len(spec.ports.outputs)} results")
    _taken_over(spec, run, list(zip(inputs, labels_in, strict=True)), list(zip(results, labels_out, strict=True)))


def check_results(spec: ProgramSpec, found: Sequence[Any], after: str) -> None:
    """Raise `VerificationError` unless a program's function returned what its graph says, in the order of its ports."""
    ports, avals = spec.ports, _results(spec)
    if len(found) != len(ports.order):
        report.fail(after, "a program returns a value for each port", f"{len(found)} for {len(ports.order)}")
    for at, value in zip(ports.order, found, strict=True):
        members = ports.outputs[at]
        shape, dtype = avals[members[0]]
        shape = (len(members), *shape) if ports.stacked_outputs[at] else shape
        if (tuple(value.shape), value.dtype) != (shape, dtype):
            where = report.in_graph(spec.outputs[members[0]])
            report.fail(
                after, "a result has the shape and dtype of its node", f"{value.dtype}{list(value.shape)} for {dtype}{list(shape)}", where
            )


def _results(spec: ProgramSpec) -> list[Aval]:
    return [(tuple(n.meta["val"].shape), np.dtype(dtypes.to_jax(n.meta["val"].dtype))) for n in spec.outputs]


def _fail(rule: str, found: str) -> None:
    report.fail("program_io", rule, found)


def _stacks(spec: ProgramSpec) -> None:
    """The loops find their stacks where the plan has them."""
    ports, plan = spec.ports, spec.plan
    assert plan is not None
    for what, planned, ported, stacked in (
        ("inputs", tuple(map(tuple, plan.stacked_inputs())), ports.inputs, ports.stacked_inputs),
        ("results", tuple(tuple(members) for _, members in plan.stacked), ports.outputs, ports.stacked_outputs),
    ):
        if ported[: len(planned)] != planned or list(stacked) != [k < len(planned) for k in range(len(ported))]:
            _fail("stacks come in and leave as the plan has them, before all else", f"{what} {ported[: len(planned)]} for {planned}")


def _ports(what: str, ports: Sequence[tuple[int, ...]], stacked: Sequence[bool], members: Sequence[Any]) -> None:
    """Each input or result goes through one port, in a stack with others like it or alone."""
    if sorted(i for port in ports for i in port) != list(range(len(members))):
        _fail(f"the {what} go through one port each", f"{ports} for {len(members)} {what}")
    for port, many in zip(ports, stacked, strict=True):
        if not many and len(port) != 1:
            _fail("a port that is no stack has one member", f"{what} {port}")
        if any(members[i] != members[port[0]] for i in port):
            _fail("the members of a stack have one shape, dtype and label", f"{what} {port}: {[members[i] for i in port][:4]}")


def _taken_over(spec: ProgramSpec, run: Execution, inputs: Sequence[Any], results: Sequence[Any]) -> None:
    """An input that is taken over meets its own new value: JAX gives buffers away in the order of inputs, among equal shapes."""
    ports = spec.ports
    if list(ports.donated) != sorted(set(ports.donated)):
        _fail("inputs that are taken over are named once, in order", str(ports.donated))
    new: dict[int, set[int]] = {}
    for ref, leaf in run.segment.saved_with_leaves():
        storage = ref()
        if storage is not None and storage.segment is run.segment:
            new.setdefault(leaf, set()).add(storage.vid)
    for given, result in zip(ports.donated, ports.order, strict=False):
        if ports.stacked_inputs[given] != ports.stacked_outputs[result] or len(ports.inputs[given]) != len(ports.outputs[result]):
            _fail("a stack takes over a stack", f"input {given}, {ports.inputs[given]}, by {ports.outputs[result]}")
        for i, k in zip(ports.inputs[given], ports.outputs[result], strict=True):
            leaf = spec.inputs[i]
            if leaf >= 0 or not run.free[-leaf - 1]:
                _fail("only buffers that nobody else holds are taken over", f"leaf {leaf}")
            if -leaf - 1 in spec.part.shared:
                _fail("a buffer is taken over by the last part that reads it", f"leaf {leaf}")
            if inputs[i] != results[k]:
                _fail("an input is taken over by a result of its shape, dtype and label", f"{inputs[i]} by {results[k]}")
            if spec.results[k] not in new.get(leaf, ()):
                _fail(
                    "an input is taken over by its own new value",
                    f"leaf {leaf} by value {spec.results[k]}, its storage waits for {sorted(new.get(leaf, ()))}",
                )


def check_labels(spec: ProgramSpec, labels: RankLabels, run: Execution) -> None:
    """Labels of inputs are those of their arrays; labels of results say all axes that they vary over, as their storages want them."""
    for vid, label, aval in zip(spec.inputs, labels.inputs, spec.avals, strict=True):
        if vid < 0:
            array = run.segment.leaves[-vid - 1]
            lies = places.label_at(sharding.spec_of(array), spec.part.place)
            shape = sharding.global_shape(aval.shape, label)
        else:
            lies = places.label_at(run.passed[vid].label, spec.part.place)
            shape = sharding.global_shape(run.passed[vid].aval.shape, label)
        if label != lies:
            report.fail("shard_mapping", "an input is labelled as its array lies", f"{label} for {lies}")
        _fits(label, shape, f"value {vid}")
    for k, (node, label, wanted) in enumerate(zip(spec.outputs, labels.outputs, labels.wanted, strict=True)):
        varied, said = node.meta["axes"], sharding.axes_of(label)
        if not varied <= said:
            found = f"{label} for {sorted(varied)}"
            report.fail("shard_mapping", "the label of a result has all axes that it varies over", found, report.in_graph(node))
        asked = NONE if wanted is None else sharding.axes_of(wanted)
        if wanted is not None and (not said.issuperset(sharding.ordered(asked)) or (varied <= asked and label != wanted)):
            report.fail("shard_mapping", "a result is labelled as its storage wants", f"{label} for {wanted}", report.in_graph(node))
        _fits(label, sharding.global_shape(tuple(node.meta["val"].shape), label), f"result {k}")


def _fits(spec: PartitionSpec, shape: Sequence[int], what: str) -> None:
    unknown = sharding.axes_of(spec) - set(sharding.mesh().axis_names)
    if unknown or len(spec) > len(shape) or any(n % sharding.count(part) for n, part in zip(shape, spec, strict=False)):
        report.fail("shard_mapping", "a label names axes of the mesh and divides the dims", f"{spec} for {list(shape)} ({what})")
