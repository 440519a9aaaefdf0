"""Products that steps of a loop make with one weight are made for all steps at once, where no step waits for another's and it saves something."""

from __future__ import annotations

import operator
import random
from typing import Any

import pytest
import torch
from torch import fx

from tests.torch_bridge.passes.test_time_steps import Graph, sequence, total
from torch_bridge.ir.graph import number
from torch_bridge.ir.layout import contiguous_meta
from torch_bridge.passes import even_results, step_products
from torch_bridge.source import NOWHERE

aten = torch.ops.aten
STEPS, ROWS, IN, OUT = 6, 2, 3, 4
NEW = (aten.unbind.int, aten.cat.default, aten.reshape.default, aten.permute.default, operator.getitem)


class Run(fx.Interpreter):
    """Runs a graph on the CPU, which lacks the backward op of LSTM cells."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return (
            lstm_backward(*args)
            if target is aten._thnn_fused_lstm_cell_backward_impl.default
            else super().call_function(target, args, kwargs)
        )


def lstm_backward(dh: Any, dc: Any, c: Any, c_after: Any, gates: Any, biased: bool) -> Any:
    i, f, g, o = gates.chunk(4, 1)
    t = torch.tanh(c_after)
    dc = dc + dh * o * (1 - t * t)
    d = torch.cat([dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * (1 - g * g), dh * t * o * (1 - o)], 1)
    return d, dc * f, d.sum(0) if biased else None


def run(g: Graph) -> Any:
    return Run(fx.GraphModule(torch.nn.Module(), g.graph)).run(*g.given)


def rewritten(g: Graph, *results: fx.Node, fewest: int = 4) -> list[Any]:
    """The ops that compute something in the graph with these results, rewritten, which gives what it gave but for rounding."""
    g.graph.output(results)
    before = run(g)
    step_products.rewrite(g.graph, fewest)
    even_results.rewrite(g.graph, fewest)
    g.graph.lint()
    for node in g.graph.nodes:
        if node.op == "call_function" and node.target is not aten.unbind.int and "vals" not in node.meta:
            assert isinstance(node.meta["val"], torch.Tensor), node
    for x, y in zip(before, run(g), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    assert [tuple(x.shape) for x in before] == [tuple(n.meta["val"].shape) for n in g.graph.output_node().args[0]]
    return [n.target for n in g.graph.nodes if n.op == "call_function" and n.target not in NEW]


def many(g: Graph, op: Any, *args: Any, results: int) -> list[fx.Node]:
    """The results of an op that has several."""
    node = g.graph.call_function(op, args)
    metas = op(*fx.node.map_arg(args, lambda n: n.meta["val"]))
    node.meta.update(source=NOWHERE, vals=tuple(contiguous_meta(tuple(x.shape), x.dtype) for x in metas if x is not None))
    found = []
    for k in range(results):
        element = g.graph.call_function(operator.getitem, (node, k))
        element.meta.update(source=NOWHERE, val=contiguous_meta(tuple(metas[k].shape), metas[k].dtype))
        found.append(element)
    return found


def recurrent(g: Graph, steps: int = STEPS, rows: int = ROWS) -> tuple[list[fx.Node], list[fx.Node]]:
    """A loop of cells `h = tanh(h @ u)`, and what goes back through it: states and gradients, by step."""
    start, u = g.inputs[0], g.inputs[1]
    states = [start]
    for _ in range(steps):
        states.append(g(aten.tanh.default, g(aten.mm.default, states[-1], u)))
    grads: list[fx.Node] = []
    back = g(aten.permute.default, u, [1, 0])
    for state in reversed(states[1:]):
        grads.append(g(aten.tanh_backward.default, g(aten.mm.default, grads[-1], back) if grads else states[-1], state))
    return states, grads[::-1]


def cells(steps: int = STEPS, rows: int = ROWS) -> Graph:
    return Graph(sequence(rows, IN), sequence(IN, IN) / 2, sequence(IN, OUT))


def weight_gradient(g: Graph, grad: fx.Node, x: fx.Node) -> fx.Node:
    return g(aten.mm.default, g(aten.permute.default, grad, [1, 0]), x)


# -- sums -------------------------------------------------------------------------------------------


def test_the_gradient_of_a_weight_is_one_product() -> None:
    g = cells()
    states, grads = recurrent(g)
    terms = [weight_gradient(g, grads[t], states[t]) for t in reversed(range(STEPS))]
    ops = rewritten(g, total(g, terms))
    assert ops.count(aten.mm.default) == 2 * STEPS - 1 + 1
    assert aten.add.Tensor not in ops
    (cat, _) = [n for n in g.graph.nodes if n.target is aten.cat.default]
    places = [list(g.graph.nodes).index(n) for n in cat.args[0]]
    assert places == sorted(places, reverse=True), "in the order of the forward pass"


def test_gradients_of_biases_are_one_sum() -> None:
    g = cells()
    _, grads = recurrent(g)
    kept = [g(aten.sum.dim_IntList, x, [0], True) for x in grads]
    ops = rewritten(g, g(aten.reshape.default, total(g, kept), [IN]), total(g, [g(aten.sum.dim_IntList, x, [0]) for x in grads]))
    assert ops.count(aten.sum.dim_IntList) == 2
    assert aten.add.Tensor not in ops


@pytest.mark.parametrize("dims", [None, [], [0, 1], [1]])
def test_sums_over_other_dims_are_left(dims: list[int] | None) -> None:
    g = cells()
    states, _ = recurrent(g)
    ops = rewritten(g, total(g, [g(aten.sum.dim_IntList, h, dims) for h in states[1:]]))
    assert ops.count(aten.sum.dim_IntList) == STEPS


def test_micro_batches_keep_their_gradients_apart() -> None:
    g = Graph(*[sequence(ROWS, IN) for _ in range(STEPS)])
    terms = [weight_gradient(g, g(aten.exp.default, x), x) for x in g.inputs]
    ops = rewritten(g, total(g, terms))
    assert ops.count(aten.mm.default) == STEPS


@pytest.mark.parametrize(("name", "value"), [("ROWS", 1), ("BYTES", 100)])
def test_steps_of_many_rows_or_bytes_are_left(monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    monkeypatch.setattr(step_products, name, value)
    g = cells()
    states, grads = recurrent(g)
    heads = [g(aten.mm.default, x, g.inputs[2]) for x in states[1:]]
    ops = rewritten(g, total(g, [weight_gradient(g, x, y) for x, y in zip(grads, states, strict=False)]), *heads)
    assert ops.count(aten.mm.default) == 2 * STEPS - 1 + 2 * STEPS


def test_other_terms_stay_and_sums_that_others_read_do() -> None:
    g = cells()
    states, grads = recurrent(g)
    terms = [weight_gradient(g, x, y) for x, y in zip(grads, states, strict=False)]
    part = total(g, terms[:2])
    ops = rewritten(g, part, total(g, [g.inputs[1], part, *terms[2:]]))
    assert ops.count(aten.add.Tensor) == 3
    assert ops.count(aten.mm.default) == 2 * STEPS - 1 + 3


def test_the_gradient_of_an_embedding_is_one() -> None:
    g = Graph(sequence(ROWS, IN), sequence(IN, IN) / 2, torch.arange(STEPS * ROWS).reshape(ROWS, STEPS) % 5)
    _, grads = recurrent(g)
    ids = many(g, aten.unbind.int, g.inputs[2], 1, results=STEPS)
    terms = [g(aten.embedding_dense_backward.default, x, i, 7, -1, False) for x, i in zip(grads, ids, strict=True)]
    assert rewritten(g, total(g, terms)).count(aten.embedding_dense_backward.default) == 1


def test_gradients_of_embeddings_that_count_how_often_are_left() -> None:
    g = Graph(sequence(ROWS, IN), sequence(IN, IN) / 2, torch.arange(STEPS * ROWS).reshape(ROWS, STEPS) % 2)
    _, grads = recurrent(g)
    ids = many(g, aten.unbind.int, g.inputs[2], 1, results=STEPS)
    terms = [g(aten.embedding_dense_backward.default, x, i, 7, -1, True) for x, i in zip(grads, ids, strict=True)]
    assert rewritten(g, total(g, terms)).count(aten.embedding_dense_backward.default) == STEPS


# -- products ---------------------------------------------------------------------------------------


def test_products_of_what_is_there_before_the_loop() -> None:
    g = Graph(sequence(ROWS, IN), sequence(IN, IN) / 2, sequence(STEPS, ROWS, IN), sequence(IN, IN), sequence(IN))
    steps, h = many(g, aten.unbind.int, g.inputs[2], 0, results=STEPS), g.inputs[0]
    for x in steps:
        h = g(aten.tanh.default, g(aten.add.Tensor, g(aten.addmm.default, g.inputs[4], x, g.inputs[3]), g(aten.mm.default, h, g.inputs[1])))
    ops = rewritten(g, h)
    assert ops.count(aten.addmm.default) == 1
    assert ops.count(aten.mm.default) == STEPS
    assert aten.cat.default not in [n.target for n in g.graph.nodes], "they lie in one tensor"


def test_products_of_what_the_loop_gives_and_their_stack() -> None:
    g = cells()
    states, _ = recurrent(g)
    heads = [g(aten.mm.default, x, g.inputs[2]) for x in states[1:]]
    ops = rewritten(g, g(aten.stack.default, heads, 1), g(aten.cat.default, heads, -1), heads[2])
    assert ops.count(aten.mm.default) == 2 * STEPS - 1 + 1
    assert aten.stack.default not in ops


def test_products_that_the_next_step_waits_for_are_left() -> None:
    g = cells()
    states, grads = recurrent(g)
    assert rewritten(g, states[-1], grads[0]).count(aten.mm.default) == 2 * STEPS - 1


def test_products_in_two_loops_one_after_the_other_are_two() -> None:
    g = Graph(sequence(ROWS, IN), sequence(IN, IN), sequence(2 * STEPS, ROWS, IN))
    steps = many(g, aten.unbind.int, g.inputs[2], 0, results=2 * STEPS)
    first = [g(aten.mm.default, x, g.inputs[1]) for x in steps[:STEPS]]
    found = total(g, first)
    second = [g(aten.mm.default, g(aten.add.Tensor, found, x), g.inputs[1]) for x in steps[STEPS:]]
    assert rewritten(g, total(g, second)).count(aten.mm.default) == 2


def test_biases_with_rows_and_few_steps_are_left() -> None:
    g = Graph(sequence(STEPS, ROWS, IN), sequence(IN, OUT), sequence(ROWS, OUT))
    steps = many(g, aten.unbind.int, g.inputs[0], 0, results=STEPS)
    ops = rewritten(g, *[g(aten.addmm.default, g.inputs[2], x, g.inputs[1]) for x in steps])
    assert ops == [aten.addmm.default] * STEPS
    g = Graph(sequence(STEPS, ROWS, IN), sequence(IN, OUT))
    steps = many(g, aten.unbind.int, g.inputs[0], 0, results=STEPS)
    assert rewritten(g, *[g(aten.mm.default, x, g.inputs[1]) for x in steps], fewest=7) == [aten.mm.default] * STEPS


def test_products_by_other_numbers_are_left() -> None:
    g = Graph(sequence(STEPS, ROWS, IN), sequence(IN, OUT), sequence(OUT), torch.arange(1.0, STEPS + 1))
    steps = many(g, aten.unbind.int, g.inputs[0], 0, results=STEPS)
    numbers = [g.graph.call_function(number, (g.inputs[3], k, "float")) for k in range(STEPS)]
    for node in numbers:
        node.meta.update(val=1.0, vals=())
    ops = rewritten(g, *[g(aten.addmm.default, g.inputs[2], x, g.inputs[1], alpha=a) for x, a in zip(steps, numbers, strict=True)])
    assert ops.count(aten.addmm.default) == STEPS
    again = Graph(*g.given)
    steps = many(again, aten.unbind.int, again.inputs[0], 0, results=STEPS)
    node = again.graph.call_function(number, (again.inputs[3], 1, "float"))
    node.meta.update(val=1.0, vals=())
    ops = rewritten(again, *[again(aten.addmm.default, again.inputs[2], x, again.inputs[1], alpha=node) for x in steps])
    assert ops.count(aten.addmm.default) == 1


def test_embeddings_of_single_tokens_are_left() -> None:
    g = Graph(torch.arange(STEPS), sequence(STEPS, IN))
    ids = many(g, aten.unbind.int, g.inputs[0], 0, results=STEPS)
    assert rewritten(g, *[g(aten.embedding.default, g.inputs[1], i) for i in ids]) == [aten.embedding.default] * STEPS


def test_a_product_of_a_value_with_itself_is_left() -> None:
    g = Graph(*[sequence(IN, IN) for _ in range(STEPS)])
    assert rewritten(g, *[g(aten.mm.default, x, x) for x in g.inputs]) == [aten.mm.default] * STEPS


# -- cells of several results -----------------------------------------------------------------------


def lstm(g: Graph, needed: bool) -> tuple[list[fx.Node], fx.Node]:
    """The backward pass of LSTM cells: the gradients of gates, and the sum of those of a bias. needed: of a state before the first."""
    weight, c, gates = g.inputs
    dc, dh, found, biases = c, c, [], []
    for _ in range(STEPS - 1):
        d, dc, bias = many(g, aten._thnn_fused_lstm_cell_backward_impl.default, dh, dc, c, c, gates, True, results=3)
        dh = g(aten.mm.default, d, weight)
        found.append(d)
        biases.append(bias)
    d, *rest = many(g, aten._thnn_fused_lstm_cell_backward_impl.default, dh, dc, c, c, gates, True, results=3)
    biases.append(rest[-1])
    if not needed:
        g.graph.erase_node(rest[0])
    return [*found, d], total(g, biases)


def test_the_gradients_of_the_biases_of_cells_are_sums_of_those_of_gates() -> None:
    g = Graph(sequence(4 * IN, IN), sequence(ROWS, IN), sequence(ROWS, 4 * IN))
    grads, bias = lstm(g, needed=False)
    ops = rewritten(g, bias, grads[-1])
    assert ops.count(aten.sum.dim_IntList) == 1
    cells = [n for n in g.graph.nodes if n.target is aten._thnn_fused_lstm_cell_backward_impl.default]
    assert [cell.args[-1] for cell in cells] == [False] * STEPS
    read = [[user.args[1] for user in cell.users] for cell in cells]
    assert read == [[0, 1]] * STEPS, "the last one's like the others'"


def test_biases_of_cells_that_are_read_apart_are_made_by_them() -> None:
    g = Graph(sequence(4 * IN, IN), sequence(ROWS, IN), sequence(ROWS, 4 * IN))
    _, bias = lstm(g, needed=True)
    cells = [n for n in g.graph.nodes if n.target is aten._thnn_fused_lstm_cell_backward_impl.default]
    own = [user for cell in cells for user in cell.users if user.args[1] == 2]
    rewritten(g, bias, *own)
    assert [cell.args[-1] for cell in cells] == [True] * STEPS


def test_random_loops_keep_their_numbers() -> None:
    for seed in range(80):
        draw = random.Random(seed)
        g = Graph(sequence(ROWS, IN), sequence(IN, IN) / 2, sequence(STEPS, ROWS, IN), sequence(IN, IN) / 3)
        values = [g.inputs[0], *many(g, aten.unbind.int, g.inputs[2], 0, results=STEPS)]
        weights = [g.inputs[1], g.inputs[3], g(aten.permute.default, g.inputs[1], [1, 0])]
        wholes = [g(aten.mul.Tensor, g.inputs[1], g.inputs[3])]
        for _ in range(60):
            kind, x = draw.randrange(5), draw.choice(values[-8:])
            if kind < 2:
                values.append(g(aten.mm.default, x, draw.choice(weights)))
            elif kind == 2:
                values.append(g(aten.tanh.default, g(aten.add.Tensor, x, draw.choice(values))))
            elif kind == 3:
                wholes.append(g(aten.add.Tensor, wholes[-1], weight_gradient(g, x, draw.choice(values))))
            else:
                wholes.append(g(aten.add.Tensor, wholes[-1], draw.choice(wholes)))
        rewritten(g, *draw.sample(values, 3), wholes[-1], draw.choice(wholes), fewest=draw.choice([2, 3]))
