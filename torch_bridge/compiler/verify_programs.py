"""Rules of a compiled program: what goes in and comes out, by shape, dtype and label, and which buffers it takes over (`passes/verify`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from torch_bridge.ir import dtypes
from torch_bridge.ir.segment import Segment
from torch_bridge.mesh import sharding
from torch_bridge.mesh.sharding import NONE
from torch_bridge.passes.verify import report

Aval = tuple[tuple[int, ...], Any]


def check(program: Any, segment: Segment, outs: Sequence[int]) -> None:
    """Raise `VerificationError` for the first rule that a `program.Program` breaks which has its labels and its ports."""
    inputs = [(tuple(a.shape), np.dtype(a.dtype)) for a in program.leaf_avals]
    results = _results(program)
    if program.ranks is None:
        labels_in: Sequence[Any] = [None] * len(inputs)
        labels_out: Sequence[Any] = [None] * len(results)
    else:
        labels_in, labels_out = program.ranks.inputs, program.ranks.outputs
        _labels(program, segment)
    _ports("inputs", program.ports.inputs, program.ports.stacked_inputs, list(zip(inputs, labels_in, strict=True)))
    _ports("results", program.ports.outputs, program.ports.stacked_outputs, list(zip(results, labels_out, strict=True)))
    if program.plan is not None:
        _stacks(program)
    if sorted(program.ports.order) != list(range(len(program.ports.outputs))):
        _fail("every result leaves once", f"{program.ports.order} of {len(program.ports.outputs)} results")
    _taken_over(program, segment, outs, list(zip(inputs, labels_in, strict=True)), list(zip(results, labels_out, strict=True)))


def check_results(program: Any, found: Sequence[Any], after: str) -> None:
    """Raise `VerificationError` unless a program's function returned what its graph says, in the order of its ports."""
    ports, avals = program.ports, _results(program)
    if len(found) != len(ports.order):
        report.fail(after, "a program returns a value for each port", f"{len(found)} for {len(ports.order)}")
    for at, value in zip(ports.order, found, strict=True):
        members = ports.outputs[at]
        shape, dtype = avals[members[0]]
        shape = (len(members), *shape) if ports.stacked_outputs[at] else shape
        if (tuple(value.shape), value.dtype) != (shape, dtype):
            where = report.in_graph(program._outputs()[members[0]])
            report.fail(
                after, "a result has the shape and dtype of its node", f"{value.dtype}{list(value.shape)} for {dtype}{list(shape)}", where
            )


def _results(program: Any) -> list[Aval]:
    return [(tuple(n.meta["val"].shape), np.dtype(dtypes.to_jax(n.meta["val"].dtype))) for n in program._outputs()]


def _fail(rule: str, found: str) -> None:
    report.fail("program_io", rule, found)


def _stacks(program: Any) -> None:
    """The loops find their stacks where the plan has them."""
    ports, plan = program.ports, program.plan
    for what, planned, ported, stacked in (
        ("inputs", [tuple(p) for p in plan.stacked_inputs()], ports.inputs, ports.stacked_inputs),
        ("results", [tuple(members) for _, members in plan.stacked], ports.outputs, ports.stacked_outputs),
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


def _taken_over(program: Any, segment: Segment, outs: Sequence[int], inputs: Sequence[Any], results: Sequence[Any]) -> None:
    """An input that is taken over meets its own new value: JAX gives buffers away in the order of inputs, among equal shapes."""
    ports = program.ports
    if list(ports.donated) != sorted(set(ports.donated)):
        _fail("inputs that are taken over are named once, in order", str(ports.donated))
    new: dict[int, set[int]] = {}
    for ref, leaf in segment.saved:
        storage = ref()
        if storage is not None and storage.segment is segment:
            new.setdefault(-leaf - 1, set()).add(storage.vid)
    for given, result in zip(ports.donated, ports.order, strict=False):
        if ports.stacked_inputs[given] != ports.stacked_outputs[result] or len(ports.inputs[given]) != len(ports.outputs[result]):
            _fail("a stack takes over a stack", f"input {given}, {ports.inputs[given]}, by {ports.outputs[result]}")
        for i, k in zip(ports.inputs[given], ports.outputs[result], strict=True):
            leaf = program.used[i]
            if not program.donate[leaf]:
                _fail("only buffers that nobody else holds are taken over", f"leaf {leaf}")
            if inputs[i] != results[k]:
                _fail("an input is taken over by a result of its shape, dtype and label", f"{inputs[i]} by {results[k]}")
            if outs[k] not in new.get(leaf, ()):
                _fail(
                    "an input is taken over by its own new value",
                    f"leaf {leaf} by value {outs[k]}, its storage waits for {sorted(new.get(leaf, ()))}",
                )


def _labels(program: Any, segment: Segment) -> None:
    """Labels of leaves are those of their arrays; labels of results say all axes that they vary over, as their storages want them."""
    ranks = program.ranks
    for i, leaf in enumerate(program.used):
        spec, array = ranks.inputs[i], segment.leaves[leaf]
        if spec != sharding.spec_of(array):
            report.fail("shard_mapping", "an input is labelled as its array lies", f"{spec} for {sharding.spec_of(array)}")
        _fits(spec, tuple(array.shape), f"leaf {leaf}")
    for k, (node, spec, wanted) in enumerate(zip(program._outputs(), ranks.outputs, ranks.wanted, strict=True)):
        varied, said = node.meta["axes"], sharding.axes_of(spec)
        if not varied <= said:
            found = f"{spec} for {sorted(varied)}"
            report.fail("shard_mapping", "the label of a result has all axes that it varies over", found, report.in_graph(node))
        asked = NONE if wanted is None else sharding.axes_of(wanted)
        if wanted is not None and (not said.issuperset(sharding.ordered(asked)) or (varied <= asked and spec != wanted)):
            report.fail("shard_mapping", "a result is labelled as its storage wants", f"{spec} for {wanted}", report.in_graph(node))
        _fits(spec, sharding.global_shape(tuple(node.meta["val"].shape), spec), f"result {k}")


def _fits(spec: PartitionSpec, shape: Sequence[int], what: str) -> None:
    unknown = sharding.axes_of(spec) - set(sharding.mesh().axis_names)
    if unknown or len(spec) > len(shape) or any(n % sharding.count(part) for n, part in zip(shape, spec, strict=False)):
        report.fail("shard_mapping", "a label names axes of the mesh and divides the dims", f"{spec} for {list(shape)} ({what})")
