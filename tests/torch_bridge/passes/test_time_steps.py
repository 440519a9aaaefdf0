"""Graphs that read, write and add up steps of a sequence are rewritten to others with the same numbers."""

from __future__ import annotations

import operator
import random
from typing import Any

import pytest
import torch
from torch import fx

from torch_bridge.ir.layout import contiguous_meta
from torch_bridge.passes import time_steps
from torch_bridge.source import NOWHERE

aten = torch.ops.aten
STEPS = 6


class Graph:
    """Builds a graph as the recorder leaves it: aten ops with meta tensors."""

    def __init__(self, *inputs: torch.Tensor):
        self.graph = fx.Graph()
        self.given = inputs
        self.inputs = []
        for k, x in enumerate(inputs):
            node = self.graph.placeholder(f"arg{k}")
            node.meta["val"] = contiguous_meta(tuple(x.shape), x.dtype)
            self.inputs.append(node)

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(op, args, kwargs)
        metas = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        made = op(*metas[0], **{**metas[1], **({"device": "meta"} if op is aten.full.default else {})})
        node.meta.update(source=NOWHERE, val=contiguous_meta(tuple(made.shape), made.dtype))
        return node

    def rewritten(self, *results: fx.Node, fewest: int = 4) -> list[Any]:
        """The ops of the graph with these results, rewritten, which gives just what it gave."""
        self.graph.output(results)
        before = self._run()
        time_steps.rewrite(self.graph, fewest)
        self.graph.lint()
        for node in self.graph.nodes:
            if node.op == "call_function" and node.target not in (aten.unbind.int,):
                assert isinstance(node.meta["val"], torch.Tensor), node
                assert node.meta["source"] is NOWHERE
        after = self._run()
        for x, y in zip(before, after, strict=True):
            assert torch.equal(x, y)
        return [n.target for n in self.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]

    def _run(self) -> Any:
        return fx.GraphModule(torch.nn.Module(), self.graph)(*self.given)


def sequence(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dim", [0, 1, -2])
def test_reads_of_a_sequence_are_entries_of_one_list(dim: int) -> None:
    shape = {0: (STEPS, 2, 3), 1: (2, STEPS, 3), -2: (2, STEPS, 3)}[dim]
    g = Graph(sequence(*shape))
    reads = [g(aten.select.int, g.inputs[0], dim, t if t % 2 else t - STEPS) for t in range(STEPS)]
    ops = g.rewritten(*[g(aten.tanh.default, x) for x in reads])
    assert ops == [aten.unbind.int] + [aten.tanh.default] * STEPS


def test_slices_of_the_same_length_and_strided_ones_are_steps() -> None:
    g = Graph(sequence(2 * STEPS, 3))
    blocks = [g(aten.slice.Tensor, g.inputs[0], 0, 2 * t, 2 * t + 2) for t in range(STEPS)]
    strided = [g(aten.slice.Tensor, g.inputs[0], 0, t, t + STEPS + 1, STEPS) for t in range(STEPS)]
    ops = g.rewritten(*[g(aten.neg.default, x) for x in (*blocks, *strided)])
    assert ops.count(aten.unbind.int) == 2
    assert aten.slice.Tensor not in ops


def test_reads_through_equal_views_are_entries_of_one_list() -> None:
    g = Graph(sequence(2, STEPS, 4))
    reads = []
    for t in range(STEPS):
        part = g(aten.slice.Tensor, g.inputs[0], 2, 1, 3)
        reads.append(g(aten.select.int, part, 1, t))
    other = g(aten.slice.Tensor, g.inputs[0], 2, 0, 3)
    ops = g.rewritten(other, *[g(aten.tanh.default, x) for x in reads])
    assert ops.count(aten.unbind.int) == 1
    assert aten.select.int not in ops


def test_windows_that_overlap_are_left() -> None:
    g = Graph(sequence(STEPS + 2, 3))
    ops = g.rewritten(*[g(aten.slice.Tensor, g.inputs[0], 0, t, t + 3) for t in range(STEPS)])
    assert ops == [aten.slice.Tensor] * STEPS


def test_slices_and_writes_that_name_no_end_are_left() -> None:
    g = Graph(sequence(STEPS, 2))
    buffer, reads = g.inputs[0], []
    for t in range(1, STEPS):
        reads.append(g(aten.slice.Tensor, g.inputs[0], 0, t))
        buffer = g(aten.slice_scatter.default, buffer, g(aten.tanh.default, reads[-1]), 0, t)
    assert aten.unbind.int not in g.rewritten(*reads, buffer)


def test_few_reads_are_left() -> None:
    g = Graph(sequence(STEPS, 3))
    assert g.rewritten(*[g(aten.select.int, g.inputs[0], 0, t) for t in range(3)]) == [aten.select.int] * 3


def test_reads_through_views_keep_them() -> None:
    g = Graph(sequence(3, STEPS))
    turned = g(aten.permute.default, g.inputs[0], [1, 0])
    first = g(aten.exp.default, g.inputs[0])
    ops = g.rewritten(first, *[g(aten.tanh.default, g(aten.select.int, turned, 0, t)) for t in range(STEPS)])
    assert ops.index(aten.unbind.int) < ops.index(aten.exp.default)  # before what may be a loop


def backward(g: Graph, grad: fx.Node, t: int, steps: int = STEPS) -> fx.Node:
    return g(aten.select_backward.default, grad, [2, steps, 3], 1, t)


def total(g: Graph, terms: list[fx.Node]) -> fx.Node:
    found = terms[0]
    for term in terms[1:]:
        found = g(aten.add.Tensor, found, term)
    return found


@pytest.mark.parametrize("order", ["forward", "backward", "some"])
def test_gradients_of_steps_are_one_stack(order: str) -> None:
    g = Graph(*[sequence(2, 3) + t for t in range(STEPS)])
    times = {"forward": range(STEPS), "backward": range(STEPS - 1, -1, -1), "some": [4, 1, 3, 2]}[order]
    ops = g.rewritten(total(g, [backward(g, g.inputs[t], t) for t in times]))
    assert ops == [aten.full.default] * (order == "some") + [aten.stack.default]


def test_gradients_of_blocks_are_one_stack() -> None:
    g = Graph(*[sequence(2, 3) + t for t in range(STEPS)])
    terms = [g(aten.slice_backward.default, g.inputs[t], [2 * STEPS, 3], 0, 2 * t, 2 * t + 2, 1) for t in range(STEPS)]
    assert g.rewritten(total(g, terms)) == [aten.stack.default, aten.reshape.default]


def part(g: Graph, grad: fx.Node, t: int, first: int, width: int = 3) -> fx.Node:
    """The gradient of `x[..., first : first + width][:, t]`."""
    return g(aten.slice_backward.default, backward(g, grad, t), [2, STEPS, 9], 2, first, first + width, 1)


def parts(firsts: list[int], others: int, fewest: int = 4) -> list[Any]:
    """The ops for gradients of such parts of one value, step by step, and of other uses of it."""
    g = Graph(*[sequence(2, 3) * 10**t for t in range(STEPS)], *[sequence(2, STEPS, 9) / 3 + k for k in range(others)])
    terms = [part(g, g.inputs[(t + k) % STEPS], t, first) for t in range(STEPS) for k, first in enumerate(firsts)]
    return g.rewritten(total(g, [*g.inputs[STEPS:], *terms]), fewest=fewest)


def test_gradients_of_parts_of_a_value_have_a_stack_for_each_part() -> None:
    stacked = [aten.stack.default, aten.slice_backward.default]
    assert sorted(map(str, parts([0, 3, 6], 1))) == sorted(map(str, 3 * stacked + 3 * [aten.add.Tensor]))
    assert parts([0, 1], 0).count(aten.stack.default) == 2
    assert parts([2], 1).count(aten.stack.default) == 1


def test_gradients_of_parts_that_would_be_added_in_another_order_are_left() -> None:
    assert aten.stack.default not in parts([0, 1, 2], 0)
    assert aten.stack.default not in parts([0, 2], 1)
    assert aten.stack.default not in parts([0], 2)
    assert aten.stack.default not in parts([0, 3], 0, fewest=STEPS + 1)


def test_one_other_gradient_is_added_to_the_stack() -> None:
    g = Graph(sequence(2, STEPS, 3), *[sequence(2, 3) + t for t in range(STEPS)])
    terms = [backward(g, g.inputs[t + 1], t) for t in range(STEPS)]
    assert g.rewritten(total(g, [*terms[:2], g.inputs[0], *terms[2:]])) == [aten.stack.default, aten.add.Tensor]


def test_steps_that_are_read_twice_are_added_in_their_order() -> None:
    g = Graph(*[sequence(2, 3) * 10**t for t in range(STEPS)])
    terms = [backward(g, g.inputs[(t + k) % STEPS], t) for t in range(STEPS) for k in range(3)]
    ops = g.rewritten(total(g, terms))
    assert ops == [aten.add.Tensor] * 2 * STEPS + [aten.stack.default]


def test_what_would_be_added_in_another_order_is_left() -> None:
    g = Graph(sequence(2, STEPS, 3), *[sequence(2, 3) * 10**t for t in range(STEPS)])
    twice = [backward(g, g.inputs[t + 1], t) for t in range(STEPS) for _ in range(2)]
    assert aten.stack.default not in g.rewritten(total(g, [*twice[:3], g.inputs[0], *twice[3:]]))
    g = Graph(sequence(2, STEPS, 3), *[sequence(2, 3) * 10**t for t in range(STEPS)])
    terms = [backward(g, g.inputs[t + 1], t) for t in range(STEPS)]
    assert aten.stack.default not in g.rewritten(total(g, [g.inputs[0], *terms, g(aten.exp.default, g.inputs[0])]))


def test_sums_and_gradients_that_others_read_are_left() -> None:
    g = Graph(*[sequence(2, 3) + t for t in range(STEPS)])
    terms = [backward(g, g.inputs[t], t) for t in range(STEPS)]
    part = total(g, terms[:3])
    assert aten.stack.default not in g.rewritten(part, total(g, [part, *terms[3:]]))
    g = Graph(*[sequence(2, 3) + t for t in range(STEPS)])
    terms = [backward(g, g.inputs[t], t) for t in range(STEPS)]
    assert aten.stack.default not in g.rewritten(total(g, terms), *terms[1:4])


def test_writes_of_all_steps_are_one_stack() -> None:
    g = Graph(sequence(2, STEPS, 3), *[sequence(2, 3) + t for t in range(STEPS)])
    buffer = g.inputs[0]
    for t in range(STEPS):
        buffer = g(aten.select_scatter.default, buffer, g.inputs[t + 1], 1, t)
    assert g.rewritten(buffer) == [aten.stack.default]


def test_the_last_write_counts_and_a_fill_stays() -> None:
    g = Graph(*[sequence(2, 3) + t for t in range(STEPS)])
    buffer = g(aten.full.default, (2, STEPS, 3), 7.0, dtype=torch.float32)
    for t in (0, 1, 2, 4, 1):
        buffer = g(aten.select_scatter.default, buffer, g.inputs[(2 * t + 1) % STEPS], 1, t)
    ops = g.rewritten(buffer)
    assert ops[-1] is aten.stack.default
    assert aten.select_scatter.default not in ops


def test_a_buffer_of_other_values_that_is_written_in_part_is_left() -> None:
    g = Graph(sequence(2, STEPS, 3), *[sequence(2, 3) + t for t in range(STEPS)])
    buffer = g.inputs[0]
    for t in range(STEPS - 1):
        buffer = g(aten.select_scatter.default, buffer, g.inputs[t + 1], 1, t)
    assert g.rewritten(buffer) == [aten.select_scatter.default] * (STEPS - 1)


def test_reads_between_writes_see_what_was_written() -> None:
    g = Graph(sequence(2, STEPS, 3), *[sequence(2, 3) + t for t in range(STEPS)])
    buffer, reads = g.inputs[0], []
    for t in range(STEPS):
        reads += [g(aten.select.int, buffer, 1, k) for k in range(STEPS)]
        buffer = g(aten.select_scatter.default, buffer, g.inputs[t + 1], 1, t)
    g.rewritten(buffer, *reads)


def test_random_programs_of_reads_writes_and_sums_keep_their_numbers() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        g = Graph(sequence(2, STEPS, 3), *[sequence(2, 3) * 10 ** draw.randrange(4) for _ in range(STEPS)])
        pieces, wholes = list(g.inputs[1:]), [g.inputs[0], g(aten.full.default, (2, STEPS, 3), 0, dtype=torch.float32)]
        for _ in range(40):
            kind, t = draw.randrange(6), draw.randrange(STEPS)
            if kind == 0:
                pieces.append(g(aten.select.int, draw.choice(wholes[-3:]), 1, t))
            elif kind == 1:
                pieces.append(g(aten.add.Tensor, draw.choice(pieces[-4:]), draw.choice(pieces)))
            elif kind == 2:
                wholes.append(g(aten.select_scatter.default, wholes[-1], draw.choice(pieces[-4:]), 1, t))
            elif kind == 3:
                wholes.append(backward(g, draw.choice(pieces[-4:]), t))
            elif kind == 4:
                first, piece = draw.randrange(2), g(aten.slice.Tensor, draw.choice(pieces[-4:]), 1, 0, 2)
                inner = g(aten.select_backward.default, piece, [2, STEPS, 2], 1, t)
                wholes.append(g(aten.add.Tensor, wholes[-1], g(aten.slice_backward.default, inner, [2, STEPS, 3], 2, first, first + 2, 1)))
            else:
                wholes.append(g(aten.add.Tensor, wholes[-1], draw.choice(wholes[-4:])))
        g.rewritten(*draw.sample(pieces, 3), wholes[-1], draw.choice(wholes), fewest=draw.choice([2, 3]))


def test_a_graph_without_inputs() -> None:
    g = Graph()
    zeros = g(aten.full.default, [STEPS, 2], 0.0)
    assert g.rewritten(*(g(aten.select.int, zeros, 0, t) for t in range(STEPS))) == [aten.full.default, aten.unbind.int]
