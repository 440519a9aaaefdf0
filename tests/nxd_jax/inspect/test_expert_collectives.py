"""What a step with experts sends, by arithmetic: slots to the ranks of their experts and back, or all tokens seen by all; and over which links."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch_xla

import nxd_jax
from nxd_jax import inspect
from nxd_jax.inspect.collectives import Collective
from nxd_jax.tensor_parallel import parallel_groups
from nxd_jax.topology import Topology
from tests.nxd_jax.modules.moe.training import EXPERTS, HIDDEN, SEQUENCE, Layout

INNER, LAYERS = 12, 2

LAYOUTS = [
    Layout(4, ep=2, factor=1.0),
    Layout(4, ep=2),
    Layout(8, ep=4, tp=2, factor=0.5, rows=4),
    Layout(8, ep=2, tp=2, rows=4),
    Layout(4, ep=2, factor=1.0, checkpoint=True),
    Layout(8, cp=2, ep=4),
    Layout(8, cp=2, ep=2, factor=1.0),
]


def step_of(layout: Layout) -> inspect.Inspection:
    """A training step; within an abstract run."""
    model, optimizer = layout.make()
    given = torch.zeros(layout.rows, SEQUENCE, dtype=torch.int64).to("xla")
    model(given, given).backward()
    optimizer.step()
    torch_xla.sync()
    return inspect.look()


def predicted(layout: Layout) -> Counter[tuple[Any, ...]]:
    """(kind, dtype, phase) along ep, of all layers: how many, and bytes."""
    tokens, k = layout.rows * SEQUENCE, layout.k
    rows: Counter[tuple[Any, ...]] = Counter()

    def send(kind: str, dtype: str, phase: str, elements: int, times: int = 1) -> None:
        size = {"float32": 4, "int64": 8}[dtype]
        rows[kind, dtype, phase, "count"] += LAYERS * times
        rows[kind, dtype, phase, "bytes"] += LAYERS * times * elements * size

    if layout.factor is not None:  # every expert's slots, there and back, and gradients the other way
        slots = min(tokens, math.ceil(tokens * k * layout.factor / EXPERTS))
        send("all-to-all", "float32", "forward", EXPERTS * slots * HIDDEN, 2)
        # a layer that is computed again does both once more: the mixture's weights need what came back
        send("all-to-all", "float32", "backward", EXPERTS * slots * HIDDEN, 2 + 2 * layout.checkpoint)
        return rows
    send("all-gather", "float32", "forward", tokens * HIDDEN)
    send("all-gather", "float32", "forward", tokens * k)  # weights of the mixture
    send("all-gather", "int64", "forward", tokens * k)  # whose they are
    send("reduce-scatter", "float32", "forward", layout.ep * tokens * HIDDEN)
    send("all-gather", "float32", "backward", tokens * HIDDEN)
    send("reduce-scatter", "float32", "backward", layout.ep * tokens * HIDDEN)
    send("reduce-scatter", "float32", "backward", layout.ep * tokens * k)
    return rows


def ep_axes(step: inspect.Inspection) -> tuple[str, ...]:
    """Those of expert parallel groups: within them lie context-parallel ones, or the other way round."""
    return tuple(a for a in ("ep", "cp") if step.axes[a] > 1 and (a == "ep" or list(step.axes).index("ep") < list(step.axes).index("cp")))


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_are_what_arithmetic_predicts(layout: Layout) -> None:
    with nxd_jax.abstract_run(layout.ranks):
        step = step_of(layout)
        found: Counter[tuple[Any, ...]] = Counter()
        for c in step.collectives.where(axes=ep_axes(step)):
            if c.phase == "outside":  # norms of experts' gradients
                continue
            assert c.ranks == layout.ep and ".mlp.expert_mlps" in c.module, c
            assert c.line.startswith("training.py:") or (not c.line and layout.checkpoint and c.phase == "backward"), c
            found[c.kind, c.dtype, c.phase, "count"] += c.count
            found[c.kind, c.dtype, c.phase, "bytes"] += c.bytes
        assert found == predicted(layout)
        assert sorted(map(sorted, step.groups(ep_axes(step)))) == sorted(parallel_groups.lists("ep"))


@pytest.mark.parametrize("factor", [None, 1.0])
def test_tensor_parallel_ranks_sum_gradients_of_tokens(factor: float | None) -> None:
    """Not of rows, of which there are k for each token (and ep times as many without a capacity). Forward, results are summed once."""
    layout = Layout(4, tp=2, ep=2, k=2, factor=factor)
    tokens = layout.rows * SEQUENCE
    with nxd_jax.abstract_run(layout.ranks):
        sums = step_of(layout).collectives.where(kind="all-reduce", axes=("tp",))
        found: Counter[str] = Counter()
        for c in sums:
            if ".mlp" in c.module or not c.module:  # a backward pass in bulk has no module; that of other layers has theirs
                found[c.phase] += c.bytes
        found.pop("outside", None)  # norms
        output, affinities = tokens * HIDDEN * 4, tokens * EXPERTS * 4
        assert found == {"forward": LAYERS * output, "backward": LAYERS * (output + affinities)}


def gradient_bytes(layout: Layout) -> tuple[int, int]:
    """Of experts, and of all else, on one rank."""
    experts = LAYERS * EXPERTS // layout.ep * 3 * HIDDEN * INNER // layout.tp * 4
    others = 4 * (2 * 16 * HIDDEN + LAYERS * (2 * HIDDEN + 2 * 2 * HIDDEN * HIDDEN // layout.tp + EXPERTS * HIDDEN))
    return experts, others


@pytest.mark.parametrize("layout", [Layout(8, ep=2, tp=2, factor=1.0), Layout(8, ep=4, factor=1.0)], ids=str)
def test_gradients_of_experts_are_averaged_over_those_that_hold_them(layout: Layout) -> None:
    with nxd_jax.abstract_run(layout.ranks):
        step = step_of(layout)
        sums = [sum(c.bytes for c in step.collectives.where(phase="outside", axes=axes)) for axes in (("dp",), ("dp", "ep"))]
        assert sums == list(gradient_bytes(layout))


def test_costs_count_routed_rows() -> None:
    """Without a capacity each choice of a token is a row, whichever expert it goes to; with one, each slot is."""
    flops = {}
    for factor in (None, 1.0, 0.5):
        layout = Layout(1, factor=factor)
        with nxd_jax.abstract_run(1):
            flops[factor] = sum(c.flops for c in step_of(layout).costs.by("module") if "expert_mlps" in c.module)
    rows = 2 * SEQUENCE * 2
    assert flops[None] == flops[1.0] == LAYERS * 3 * 2 * rows * 3 * HIDDEN * INNER
    assert flops[0.5] == flops[None] // 2


@pytest.mark.parametrize(("tp", "hops"), [(4, {0, 1}), (2, {1, 2})])
def test_tokens_take_the_shortest_ways(tp: int, hops: set[int]) -> None:
    """All-to-alls of 4 expert parallel ranks on a trn1.32xlarge: bytes times hops are on the links."""
    machine = Topology("trn1.32xlarge")
    layout = Layout(32, tp=tp, ep=4, factor=1.0, rows=4)
    with nxd_jax.abstract_run(instance="trn1.32xlarge"):
        step = step_of(layout)
        sent = step.collectives.where(kind="all-to-all")
        assert {c.axes for c in sent} == {("ep",)} and sum(c.count for c in sent) == 8
        found = inspect.traffic.traffic(machine, sent, step.groups)
        size = sum(c.bytes for c in sent) / layout.ep
        pairs = [(a, b) for group in parallel_groups.lists("ep") for a in group for b in group if a != b]
        assert {machine.hops(a, b) for a, b in pairs} == hops
        assert sum(found.local.values()) == sum(machine.hops(a, b) == 0 for a, b in pairs) * size
        assert sum(found.links.values()) == pytest.approx(sum(machine.hops(a, b) for a, b in pairs) * size)
        assert {c.kind for c in sent} == {"all-to-all"} and isinstance(sent[0], Collective)


def test_the_machine_by_groups() -> None:
    """NxD's data-parallel groups, though the mesh divides their axis."""
    pytest.importorskip("matplotlib")
    machine = Topology("trn1.32xlarge")
    with nxd_jax.abstract_run(instance="trn1.32xlarge"):
        step = step_of(Layout(32, tp=4, ep=4, factor=1.0))
        drawn = step.topology_picture()
        assert sorted(a.get_title() for a in drawn.axes if a.get_title()) == [f"cores by {kind}" for kind in ("dp", "edp", "ep", "tp")]
        wanted = machine.groups(tp=4, ep=4)
        for axis in drawn.axes:
            kind = axis.get_title().removeprefix("cores by ")
            if kind:
                assert len(axis.get_legend().get_texts()) == min(len(wanted[kind]), 9)
    with nxd_jax.abstract_run(8):
        step = step_of(Layout(8, cp=2, ep=4))
        assert sorted(a.get_title() for a in step.topology_picture().axes if a.get_title()) == [
            f"cores by {kind}" for kind in ("cp", "dp", "edp", "ep")
        ]
