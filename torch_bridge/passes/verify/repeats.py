"""Rules of runs of repeated nodes: every iteration does the same, on inputs that are wired as the run says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from torch_bridge.ir.graph import number
from torch_bridge.lowerings import is_view
from torch_bridge.passes.find_repeats import Carried, Each, Here, Input, Run, Same, aval
from torch_bridge.passes.verify import report

AFTER = "find_repeats"


def check(graph: fx.Graph, runs: Sequence[Run]) -> None:
    """Raise `VerificationError` for the first rule that the runs of a graph break."""
    place = {n: k for k, n in enumerate(graph.nodes)}
    order = [n for n in graph.nodes if n.op == "call_function" and not is_view(n.target) and n.target is not number]
    at = {n: k for k, n in enumerate(order)}
    seen: set[fx.Node] = set()
    for run in runs:
        every = [n for nodes in run.nodes for n in nodes]
        if seen.intersection(every) or len(set(every)) < len(every):
            report.fail(AFTER, "no node is in two runs, or in one twice", report.in_graph(next(iter(seen.intersection(every)), every[0])))
        seen.update(every)
        if len({len(nodes) for nodes in run.nodes}) > 1 or run.count < 2:
            report.fail(AFTER, "a run has several iterations, of equal length", str([len(nodes) for nodes in run.nodes]))
        if any(n not in at for n in every) or [at[n] for n in every] != list(range(at[every[0]], at[every[0]] + len(every))):
            report.fail(AFTER, "a run is a stretch of the graph, in order", report.in_graph(every[0]))
        if run.place != {n: (t, j) for t, nodes in enumerate(run.nodes) for j, n in enumerate(nodes)}:
            report.fail(AFTER, "a run knows the place of each of its nodes", report.in_graph(every[0]))
        for j in range(run.period):
            _column(run, j, place)


def _column(run: Run, j: int, place: dict[fx.Node, int]) -> None:
    """The nodes at one offset of all iterations."""
    first = run.nodes[0][j]
    wanted = what(first)
    if len(run.inputs[j]) != len(read(first)) or len(run.views[j]) != len(run.inputs[j]):
        report.fail(AFTER, "a run knows every input of its nodes", f"{len(run.inputs[j])} of {len(read(first))}", report.in_graph(first))
    for t, nodes in enumerate(run.nodes):
        node = nodes[j]
        if what(node) != wanted:
            report.fail(AFTER, "all iterations of a run do the same", f"iteration {t}: {what(node)} for {wanted}", report.in_graph(node))
        for x, views, (source, through) in zip(run.inputs[j], run.views[j], read(node), strict=True):
            if [what(v) for v in through] != [what(v) for v in views]:
                report.fail(AFTER, "iterations read an input through the same views", f"iteration {t}: {through}", report.in_graph(node))
            if source is not _source(run, x, t, j, place):
                text = f"iteration {t} reads %{source.name} for {type(x).__name__}"
                report.fail(
                    AFTER, "an input is made in this iteration, the one before, or outside, as the run says", text, report.in_graph(node)
                )
            if aval(source) != aval(_source(run, x, 0, j, place)):  # type: ignore[arg-type]
                report.fail(
                    AFTER, "an input has one shape and dtype in all iterations", f"{aval(source)} in iteration {t}", report.in_graph(node)
                )


def _source(run: Run, x: Input, t: int, j: int, place: dict[fx.Node, int]) -> fx.Node | None:
    """What iteration t reads as an input of its j-th node; None if that cannot be."""
    if isinstance(x, Here):
        return run.nodes[t][x.offset] if x.offset < j else None
    if isinstance(x, Carried) and t:
        return run.nodes[t - 1][x.offset]
    found: fx.Node = x.first if isinstance(x, Carried) else x.node if isinstance(x, Same) else x.nodes[t]
    if isinstance(x, Each) and len(x.nodes) != run.count:
        return None
    before = found.target is number or place[found] < place[run.nodes[0][0]]  # numbers are there from the start
    return found if found not in run.place and before else None


def read(node: fx.Node) -> list[tuple[fx.Node, tuple[fx.Node, ...]]]:
    """The values among a node's arguments and the views through which it reads them, outermost last."""
    given: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), given.append)
    return [through(n) for n in given]


def through(node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """What a node is a view of, and the views."""
    views: tuple[fx.Node, ...] = ()
    while node.op == "call_function" and is_view(node.target):
        views = (node, *views)
        node = node.args[0]  # type: ignore[assignment]
    return node, views


def what(node: fx.Node) -> Any:
    """What a node does, but for its inputs."""
    rest = fx.node.map_arg((node.args, node.kwargs), lambda n: None)
    draws = "draw" in node.meta
    extra = (node.meta.get("draw_axes"), sorted(node.meta.get("key_axes") or ())) if draws else ()
    return node.target, repr(rest), aval(node), draws, extra
