"""The verifier: it lets the passes as they are through, and finds what each of them can break."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torch_bridge
from torch_bridge.config import environment
from torch_bridge.device import debug_modes
from torch_bridge.errors import VerificationError
from torch_bridge.ir.graph import GraphBuilder
from torch_bridge.ir.segment import Segment
from torch_bridge.passes import hoist_constants, scalar_inputs
from torch_bridge.passes.verify import report, segments
from torch_bridge.recorder import dispatch
from torch_bridge.runtime import executor

torch_bridge.register()

Break = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def compiled_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that a broken pass made stays, and nothing made before is used."""
    monkeypatch.setenv("NXD_JAX_EXECUTABLES", "0")
    executor.sync()
    executor.clear_cache()
    yield
    monkeypatch.undo()
    executor.STATE.current = Segment()
    segments._READ.clear()
    executor.clear_cache()


@dataclasses.dataclass(frozen=True)
class Fault:
    """program: what runs, ending in values; broken: seeds the fault; after, rule: what the error says; runs: without the verifier the program runs to its end
    (and may give anything), otherwise something else fails."""

    program: Callable[[], Any]
    broken: Break
    after: str
    rule: str
    runs: bool = True


# -- programs ---------------------------------------------------------------------------------------


def arithmetic() -> Any:
    """Two leaves of one shape that do not commute, a view, a number, a value that nobody keeps, a write through a view."""
    x, y = torch.arange(6.0).reshape(2, 3).to("xla"), torch.ones(2, 3).to("xla")
    z = (x - y) * 3.5 + (x + y).t().reshape(2, 3) * 1.5
    (x * y).sum()
    z[0] = y[1]
    return z.cpu()


def numbers() -> Any:
    """Different numbers of one type in different ops."""
    x = torch.ones(4).to("xla")
    return (torch.nn.functional.leaky_relu(x + 0.3, 0.25) * 0.3 - 0.7).cpu()


def training() -> Any:
    """A step that creates its optimizer's state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Dropout(0.5)).to("xla")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x = torch.ones(2, 3).to("xla")
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    return loss.detach().cpu(), [p.detach().cpu() for p in model.parameters()]


# -- faults -----------------------------------------------------------------------------------------


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


def _orders_leaves(leaves: Any, self: GraphBuilder) -> list[int]:
    return leaves(self)[::-1]


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
    "GraphBuilder orders leaves otherwise": Fault(
        arithmetic,
        changed(GraphBuilder, "_leaves", _orders_leaves),
        "GraphBuilder",
        "the graph takes the leaves that its results depend on, in order",
    ),
    "GraphBuilder keeps dead nodes": Fault(
        arithmetic, changed(GraphBuilder, "_live_nodes", _forgets_a_node), "GraphBuilder", "the graph has the nodes that its results need"
    ),
    "GraphBuilder swaps operands": Fault(
        arithmetic, changed(GraphBuilder, "build", _reads_the_other), "GraphBuilder", "a node reads the values that it was recorded on"
    ),
    "scalar_inputs has one input for all": Fault(
        numbers, changed(scalar_inputs, "_labels", _one_input_for_all), "scalar_inputs", "numbers that share an input are equal", runs=False
    ),
    "scalar_inputs shares across ops": Fault(
        numbers, changed(scalar_inputs, "_labels", _shares_across_ops), "scalar_inputs", "numbers that share an input come from one op"
    ),
}


def test_the_switch() -> None:
    """NXD_JAX_VERIFY: on while tests run, off by default."""
    before = report.ON
    try:
        for text, on in (("1", True), ("0", False), ("", False)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("NXD_JAX_VERIFY", text)
                debug_modes.configure(environment.check(), dispatch.dispatch)
            assert report.ON is on
    finally:
        report.switch(before)
    assert before, "tests/conftest.py switches it on"


def test_what_comes_after_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that had a value keep it, pending ones say what happened, and the next step runs."""
    x = torch.ones(2).to("xla")
    y = x * 2
    with pytest.MonkeyPatch.context() as patch:
        changed(GraphBuilder, "_leaves", lambda leaves, self: [*leaves(self), -1])(patch)
        with pytest.raises(VerificationError):
            y.cpu()
    assert x.tolist() == [1, 1]
    with pytest.raises(torch_bridge.errors.DeadTensorError, match="VerificationError: after GraphBuilder"):
        y.cpu()
    assert (x * 3).tolist() == [3, 3]


def test_sources_after_the_programs_are_forgotten() -> None:
    """`clear_cache` while a step is recorded that was predicted: its ops keep their lines."""

    def step(clear: bool) -> list[int]:
        x = torch.ones(3).to("xla")
        y = x * 2
        if clear:
            executor.clear_cache()
        z = y.sin()
        executor.STATE.current.unpredict()
        lines = [s.line for s in executor.STATE.current.sources]
        z.cpu()
        return lines

    for _ in range(3):
        first = step(False)
    assert len(first) == 2 and first == step(True)


@pytest.mark.parametrize("program", sorted({f.program for f in FAULTS.values()}, key=lambda p: p.__name__))
def test_the_passes_as_they_are(program: Callable[[], Any]) -> None:
    program()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    fault.broken(monkeypatch)
    with pytest.raises(VerificationError) as found:
        fault.program()
    text = str(found.value)
    assert text.startswith(f"after {fault.after}, a rule of torch_bridge does not hold: ") and fault.rule in text.splitlines()[0]
    assert "Found: " in text and "bug of torch_bridge" in text and "NXD_JAX_VERIFY=1" in text


@pytest.mark.parametrize("name", FAULTS)
def test_nothing_else_finds_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the verifier a broken program runs, or fails in another way."""
    fault = FAULTS[name]
    monkeypatch.setattr(report, "ON", False)
    fault.broken(monkeypatch)
    if fault.runs:
        fault.program()
        return
    with pytest.raises(Exception) as found:
        fault.program()
    assert not isinstance(found.value, VerificationError)
