"""Rules of mesh axes: what every value of a graph varies over follows from its inputs, and an update that differs among ranks was told of."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from torch_bridge import lowerings
from torch_bridge.ir.segment import Segment
from torch_bridge.lowerings import AxesRule
from torch_bridge.mesh import random_state, sharding, world
from torch_bridge.mesh.sharding import NONE, Axes
from torch_bridge.passes import check_replicas
from torch_bridge.passes.verify import report

AFTER = "varying_axes"


def check(graph: fx.Graph, inputs: Sequence[Axes]) -> None:
    """Raise `VerificationError` for the first node whose axes are not those that its inputs and its op imply. inputs: of the leaves."""
    _Walk(inputs).run(graph)


class _Walk:
    """axes: of each node so far; entries: of each entry of an op's lists of results."""

    def __init__(self, inputs: Sequence[Axes]):
        self.axes: dict[fx.Node, Axes] = {}
        self.entries: dict[fx.Node, list[Axes]] = {}
        self.inputs = list(inputs)
        self.every: Axes = frozenset(a for a, n in world.current().axes.items() if n > 1)

    def run(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            own = frozenset(a for a in node.meta.get("draw_axes") or () if a in self.every)
            before = self._of(node)
            self.axes[node] = before | own
            if node.meta.get("axes") != self.axes[node]:
                self._wrong(
                    "a value varies over the axes of its inputs, but for what its op adds or takes away", node, "axes", self.axes[node]
                )
            if "draw" in node.meta and node.meta.get("key_axes") != self._of_key(node, before, own):
                self._wrong(
                    "ranks draw the same numbers but along the axes that were asked for", node, "key_axes", self._of_key(node, before, own)
                )

    def _wrong(self, rule: str, node: fx.Node, what: str, wanted: Axes) -> None:
        found = node.meta.get(what)
        text = found if found is None else sorted(found)
        report.fail(AFTER, rule, f"{text} for {sorted(wanted)}", report.in_graph(node))

    def _of(self, node: fx.Node) -> Axes:
        if node.op == "placeholder":
            return self.inputs.pop(0) if self.inputs else NONE
        if node.target is operator.getitem:
            return self._picked(node)
        given = _union(self.axes[n] for n in node.all_input_nodes)
        op = lowerings.lookup(node.target)
        if op is not None and op.entrywise:
            self.entries[node] = [self._after(node, x) for x in self._columns(node)]
        if op is not None and op.rank_table is not None:
            return given | frozenset(world.axes_of_table(node.args[op.rank_table]))  # type: ignore[arg-type]
        return self._after(node, given)

    def _columns(self, node: fx.Node) -> list[Axes]:
        """Over the entries of an op's lists: what is at each place of any of them, and all that is in no list."""
        arguments: list[Any] = [*node.args, *node.kwargs.values()]
        lists = [x for x in arguments if isinstance(x, (list, tuple))]
        alone = _union(self.axes[x] for x in arguments if isinstance(x, fx.Node))
        found = [alone] * len(lists[0])
        for row in lists:
            if len(row) == len(found):
                found = [a | self.axes[x] if isinstance(x, fx.Node) else a for a, x in zip(found, row, strict=True)]
        return found

    def _picked(self, node: fx.Node) -> Axes:
        path: list[Any] = []
        source: Any = node
        while source.target is operator.getitem:
            path.insert(0, source.args[1])
            source = source.args[0]
        entries = self.entries.get(source)
        depth = 2 if entries is not None and len(source.target._schema.returns) > 1 else 1
        return self.axes[source] if entries is None or len(path) < depth else entries[path[-1]]

    def _after(self, node: fx.Node, given: Axes) -> Axes:
        """What an op that may be a collective leaves of its inputs' axes."""
        op = lowerings.lookup(node.target)
        if op is None or not op.collective:
            return given
        groups = str(node.args[-1])
        agree = op.axes is AxesRule.REMOVES
        if op.axes is AxesRule.EVERY:
            return self.every
        if groups.startswith("["):
            return self._after_lists(json.loads(groups), given, agree)
        over = self.every & frozenset(groups.split(","))
        return given - over if agree else given | over

    def _after_lists(self, groups: list[list[int]], given: Axes, agree: bool) -> Axes:
        """What ranks in lists leave: an axis stays out if a step along it leads, from any rank, to the same group (whose ranks agree), or, of what does not
        vary along it, to a group that lies in the same way."""
        ranks = world.current().order
        at = dict(zip(ranks, zip(*([world.coordinates(a)[r] for r in ranks] for a in self.every), strict=True), strict=True))
        group_of = {r: [r] for r in ranks} | {r: group for group in groups for r in group}
        found = set()
        for k, axis in enumerate(self.every):
            steps = [(a, b) for a in ranks for b in ranks if at[a][:k] + at[a][k + 1 :] == at[b][:k] + at[b][k + 1 :]]
            same = agree and all(group_of[a] is group_of[b] for a, b in steps)
            alike = axis not in given and all(_lies(group_of[a], a, at) == _lies(group_of[b], b, at) for a, b in steps)
            if not same and not alike:
                found.add(axis)
        return frozenset(found)

    @staticmethod
    def _of_key(node: fx.Node, given: Axes, own: Axes) -> Axes:
        found = given if random_state.independent() else NONE
        return found if any(isinstance(x, tuple) for x in node.meta.get("draw_axes") or ()) else found | own


def _lies(group: Sequence[int], rank: int, at: Mapping[int, tuple[int, ...]]) -> list[tuple[int, ...] | None]:
    """Where a group's ranks are, seen from one of them."""
    return [tuple(there - here for there, here in zip(at[r], at[rank], strict=True)) if r in at else None for r in group]


def _union(of: Iterable[Axes]) -> Axes:
    return frozenset().union(*of)


def check_drift(segment: Segment, results: dict[int, Axes]) -> None:
    """After `check_replicas`: every parameter whose new value differs among ranks that share it was told of. results: axes of new values, by id."""
    for ref, leaf in segment.saved_with_leaves():
        storage = ref()
        if storage is None or storage.segment is not segment or storage.facts is None or storage.facts.owner is None:
            continue
        specs = [sharding.spec_of(segment.leaves[-leaf - 1]), *([] if storage.spec is None else [storage.spec])]
        apart = results.get(storage.vid, NONE) - _union(map(sharding.axes_of, specs))
        name = storage.facts.owner[1]  # the whole path takes a look at every module that there is
        if (
            apart
            and not check_replicas.all_have_another(storage)
            and not any(path.split(".")[-1] == name for path in check_replicas._reported)
        ):
            path = check_replicas.path_of(storage)
            report.fail(
                "check_replicas", "parameters that drift apart are told of", f"'{path}' differs over {sorted(apart)}, and nothing was said"
            )
