"""Numbers that change between steps, such as the starts of slices: one program for all of them, eager torch's values, and others as they were."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as met
from torch import nn

import torch_bridge
from tests.torch_bridge.changing_numbers import static_families  # noqa: F401
from torch_bridge.compiler import overlapping_writes
from torch_bridge.ir import bounded, layout, number_families, view_entries
from torch_bridge.ir.bounded import Bounded
from torch_bridge.passes import automatic_dynamic
from torch_bridge.recorder.schema import info
from torch_bridge.replay.player import states
from torch_bridge.runtime import executor

torch_bridge.register()

Step = Callable[[int], list[torch.Tensor]]


def _compiled() -> int:
    found: Any = met.metric_data("CompileTime")
    return int(found[0]) if found else 0


def _run(make: Callable[[str], Step], device: str, steps: int) -> tuple[list[torch.Tensor], list[int]]:
    """What each step gives, and how many programs were compiled until its end."""
    torch.manual_seed(0)
    random.seed(0)
    step, found, counts, before = make(device), [], [], _compiled()
    for k in range(steps):
        found += [t.detach().cpu().clone() for t in step(k)]
        torch_xla.sync()
        counts.append(_compiled() - before)
    return found, counts


def _sgd(module: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    for p in module.parameters():
        p.grad = None
    loss.backward()
    with torch.no_grad():
        for p in module.parameters():
            p.sub_(p.grad, alpha=0.1)
    return [loss, *module.parameters()]


def _batches(device: str) -> Step:
    x, y, model = torch.randn(64, 6).to(device), torch.randint(0, 3, (64,)).to(device), nn.Linear(6, 3).to(device)
    return lambda k: _sgd(model, nn.functional.cross_entropy(model(x[4 * k : 4 * k + 4]), y[4 * k : 4 * k + 4]))


def _windows(device: str) -> Step:
    """Ids and labels of a language model, one apart."""
    data, model = torch.randint(0, 20, (99,)).to(device), nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)).to(device)

    def step(k: int) -> list[torch.Tensor]:
        rows = [random.randint(0, 90) for _ in range(3)]
        ids, labels = torch.stack([data[i : i + 8] for i in rows]), torch.stack([data[i + 1 : i + 9] for i in rows])
        return _sgd(model, nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.view(-1)))

    return step


def _rows(device: str) -> Step:
    x, model = torch.randn(9, 4, 6).to(device), nn.Linear(6, 3).to(device)
    return lambda k: _sgd(model, model(x[k]).square().mean())


def _crops(device: str) -> Step:
    images, conv = torch.randn(2, 3, 9, 9).to(device), nn.Conv2d(3, 2, 3).to(device)

    def step(k: int) -> list[torch.Tensor]:
        i, j = random.randint(0, 4), random.randint(0, 4)
        return _sgd(conv, conv(images[:, :, i : i + 5, j : j + 5]).square().mean())

    return step


def _gradients(device: str) -> Step:
    w = torch.randn(20, 3).to(device).requires_grad_()

    def step(k: int) -> list[torch.Tensor]:
        w.grad = None
        loss = (w[k : k + 4].sin() * w[k + 1 : k + 5]).sum() + w[k].square().sum() + w[3:5].sum()
        loss.backward()
        assert w.grad is not None
        return [loss, w.grad]

    return step


def _queue(device: str) -> Step:
    """As MoCo's: columns are overwritten, one block after the other."""
    queue, new = torch.randn(5, 12).to(device), torch.randn(9, 5, 4).to(device)

    def step(k: int) -> list[torch.Tensor]:
        at = 4 * k % 12
        similar = new[k].t() @ queue
        queue[:, at : at + 4] = new[k]
        return [similar, queue]

    return step


def _ring(device: str) -> Step:
    rows, counts = torch.zeros(7, 3).to(device), torch.zeros(7, dtype=torch.int64).to(device)

    def step(k: int) -> list[torch.Tensor]:
        rows[k % 7] = torch.arange(3.0, device=device) * k
        counts[k % 7] += k + 1
        rows[(k + 3) % 7, 1] *= 2
        return [rows, counts]

    return step


def _shifted(device: str) -> Step:
    """Written are other places than are read."""
    x = torch.arange(40.0).reshape(20, 2).to(device)

    def step(k: int) -> list[torch.Tensor]:
        x[k + 1 : k + 5] = x[k : k + 4].clone()
        return [x]

    return step


def _half(device: str) -> Step:
    x, y = torch.randn(12, 4).bfloat16().to(device), torch.zeros(12, 4).bfloat16().to(device)

    def step(k: int) -> list[torch.Tensor]:
        y[k : k + 3] = x[k + 1 : k + 4].float() * 2
        return [y, x[k : k + 2].sum()]

    return step


def _scatters(device: str) -> Step:
    x = torch.zeros(12, 4).to(device)

    def step(k: int) -> list[torch.Tensor]:
        return [x.slice_scatter(x[:2] + k, 0, k, k + 2), x.select_scatter(x[0] + k, 0, k), torch.narrow_copy(x, 0, k, 2)]

    return step


def _from_the_end(device: str) -> Step:
    w = torch.randn(20, 3).to(device).requires_grad_()

    def step(k: int) -> list[torch.Tensor]:
        w.grad = None
        loss = w[-k - 6 : -k - 2].square().sum() + w[-k - 1].sin().sum() + w.narrow(0, -k - 9, 3).sum()
        loss.backward()
        assert w.grad is not None
        return [loss, w.grad]

    return step


def _lists(device: str) -> Step:
    """Entries of lists that share memory: one after the other."""
    x = torch.randn(30, 2).to(device)

    def step(k: int) -> list[torch.Tensor]:
        torch._foreach_add_([x[k : k + 4], x[k + 2 : k + 6]], 1)
        torch._foreach_mul_([x[k + 10 : k + 12], x[k + 12 : k + 14]], [x[k + 12 : k + 14], x[k + 10 : k + 12]])
        torch._foreach_add_([x[k + 20], x[k + 21]], [x[k], x[k + 1]])
        return [x]

    return step


MOVING = [_batches, _windows, _rows, _crops, _gradients, _queue, _ring, _shifted, _half, _scatters, _from_the_end, _lists]


@pytest.mark.parametrize("make", MOVING)
def test_starts_that_change_between_steps(make: Callable[[str], Step]) -> None:
    found, counts = _run(make, "xla", 8)
    expected, _ = _run(make, "cpu", 8)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert counts[3:] == [counts[3]] * 5, f"programs after each step: {counts}"


def test_a_second_start_is_enough() -> None:
    assert _run(_batches, "xla", 6)[1] == [1, 2, 2, 2, 2, 2]


def test_starts_that_stay_are_constants() -> None:
    """Of a loop within a step, too."""

    def make(device: str) -> Step:
        x, cell = torch.randn(3, 6, 4).to(device), nn.GRUCell(4, 4).to(device)

        def step(k: int) -> list[torch.Tensor]:
            h = torch.zeros(3, 4, device=device)
            for t in range(5):
                h = cell(x[:, t], h)
            return _sgd(cell, h.square().sum())

        return step

    assert _run(make, "xla", 4)[1] == [1, 1, 1, 1]
    targets = {n.target for graph in executor.last_graphs() for n in graph.nodes}
    assert torch.ops.aten.select.int in targets and torch.ops.aten.select_copy.int not in targets


def test_slices_of_two_lines_that_are_alike_keep_their_own_programs() -> None:
    x = torch.arange(12.0).to("xla")
    before = _compiled()
    for _ in range(2):
        first = x[0:4] * 2
        torch_xla.sync()
        second = x[4:8] * 2
        torch_xla.sync()
    assert first.tolist() == [0, 2, 4, 6] and second.tolist() == [8, 10, 12, 14]
    assert _compiled() - before == 2
    assert all(n.target is not torch.ops.aten.narrow_copy.default for graph in executor.last_graphs() for n in graph.nodes)


def test_slices_with_gaps_have_a_program_for_each_start() -> None:
    x = torch.arange(12.0).to("xla")
    before = _compiled()
    for k in range(3):
        y = x[k : k + 8 : 2] * 2
        assert y.tolist() == [2 * k, 2 * k + 4, 2 * k + 8, 2 * k + 12]
    assert _compiled() - before == 3


def test_writes_where_it_reads_are_done_in_place() -> None:
    x = torch.arange(12.0).to("xla")
    for k in range(3):
        x[k : k + 4] *= 2
        torch_xla.sync()
    (graph,) = [g for g in executor.last_graphs() if any(n.target is torch.ops.aten.narrow_copy.default for n in g.nodes)]
    overlapping_writes.mark(graph)
    (write,) = [n for n in graph.nodes if n.target is torch.ops.aten.slice_scatter.default]
    assert overlapping_writes.APART not in write.meta
    assert x.tolist() == [0, 4, 16, 24, 16, 10, 6, 7, 8, 9, 10, 11]


def test_captured_modules_have_constants() -> None:
    """What a graph is made of does not depend on what ran before."""
    x = torch.arange(12.0).to("xla")
    for k in range(3):
        _ = x[k : k + 4] * 2
        torch_xla.sync()
    module = nn.Module()
    module.forward = lambda x: x[5:9] * 2
    graph = torch_bridge.capture(module, x).graph
    assert torch.ops.aten.slice.Tensor in {n.target for n in graph.nodes}


def test_an_op_in_place_sees_where_views_overlap() -> None:
    """What torch refuses depends on where views start, which the signature of an op leaves out."""
    x = torch.arange(12.0).to("xla")
    x[0:4].add_(x[4:8])
    with pytest.raises(RuntimeError, match="single memory location"):
        x[0:4].add_(x[1:5])
    assert x.tolist() == [4, 6, 8, 10, 4, 5, 6, 7, 8, 9, 10, 11]


# -- other numbers --------------------------------------------------------------------------------


def _on(device: str, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(0)).to(device)


def _drop(device: str, k: int) -> torch.Tensor:
    x = _on(device, 4, 8).requires_grad_()
    nn.functional.dropout(x, 0.1 + 0.1 * k).square().sum().backward()
    assert x.grad is not None
    return x.grad


def _norm(device: str, k: int) -> torch.Tensor:
    """As SWA's `update_bn` does it: the share of a batch shrinks."""
    mean, var = torch.zeros(3).to(device), torch.ones(3).to(device)
    nn.functional.batch_norm(_on(device, 4, 3, 5), mean, var, training=True, momentum=1 / (k + 2))
    return torch.stack([mean, var])


def _decode(device: str, k: int) -> torch.Tensor:
    """A cache that is filled position by position, with a mask over what is not there yet."""
    cache, new = _on(device, 2, 12, 4), _on(device, 2, 1, 4)
    cache[:, k : k + 1] = new
    places = torch.arange(k, k + 1, device=device)
    later = torch.arange(12, device=device) > places[:, None]
    return (new @ cache.transpose(1, 2)).masked_fill(later, -torch.inf).softmax(-1) @ cache


OTHERS: dict[str, Callable[[str, int], torch.Tensor]] = {
    "arange": lambda device, k: torch.arange(k - 2, k + 6, device=device) * 2,
    "arange of floats": lambda device, k: torch.arange(k, k + 6, dtype=torch.float32, device=device) / 3,
    "arange in steps": lambda device, k: torch.arange(3 * k, 3 * k - 10, -k - 1, device=device)[:2] * 2,
    "tril": lambda device, k: torch.tril(_on(device, 6, 6), k - 3),
    "triu": lambda device, k: torch.triu(_on(device, 2, 6, 5), diagonal=k - 3),
    "roll": lambda device, k: torch.roll(_on(device, 5, 6), (k, 1 - 3 * k), (0, 1)),
    "roll flat": lambda device, k: torch.roll(_on(device, 5, 6), k),
    "decode": _decode,
    "batch norm": _norm,
}
DRAWS: dict[str, Callable[[str, int], torch.Tensor]] = {
    "dropout": _drop,
    "uniform": lambda device, k: torch.empty(50, device=device).uniform_(-k - 0.1, k + 0.3),
    "uniform, half": lambda device, k: torch.empty(50, dtype=torch.bfloat16, device=device).uniform_(-1, k + 0.3),
    "uniform, double": lambda device, k: torch.empty(50, dtype=torch.float64, device=device).uniform_(-k, 1e-3),
    "normal": lambda device, k: torch.empty(50, device=device).normal_(0.1 * k, 0.1 + k),
    "normal of a size": lambda device, k: torch.normal(0.1 * k, 0.1 + k, (50,), device=device),
    "bernoulli": lambda device, k: torch.empty(50, device=device).bernoulli_(0.1 + 0.1 * k),
}


def _one_by_one(of: Callable[[str, int], torch.Tensor], device: str = "xla") -> tuple[list[torch.Tensor], list[int]]:
    return _run(lambda device: lambda k: [of(device, k)], device, 8)


@pytest.mark.parametrize("name", OTHERS)
def test_other_numbers_that_change(name: str) -> None:
    found, counts = _one_by_one(OTHERS[name])
    torch.testing.assert_close(found, _one_by_one(OTHERS[name], "cpu")[0])
    assert counts[-1] == counts[4], f"programs after each step: {counts}"


@pytest.mark.parametrize("name", [*DRAWS, "roll"])
def test_as_inputs_they_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = DRAWS.get(name) or OTHERS[name]
    found, counts = _one_by_one(of)
    assert counts[-1] == counts[5], f"programs after each step: {counts}"
    for family in number_families._FAMILIES.values():
        family.dynamic = False
    monkeypatch.setattr(automatic_dynamic, "learn", lambda *args: False)
    executor.clear_cache()
    constants, counts = _one_by_one(of)
    assert counts[-1] >= 8
    torch.testing.assert_close(found, constants, rtol=0.0, atol=0.0)


class _Window(nn.Module):
    """Reads a part of what it is given. start: where; part of what `optimize` asks before each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.start = nn.Linear(3, 3), nn.Dropout(0.0), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.linear(x[self.start : self.start + 2]))


def test_a_played_module_goes_on_when_its_numbers_become_inputs() -> None:
    """It was recorded with a constant, and the recording that checks it has an input: they are the same."""
    torch.manual_seed(0)
    eager = _Window()
    played = torch_bridge.optimize(copy.deepcopy(eager).to("xla"))
    x = torch.randn(8, 3)
    for start in (0, 0, 0, 3, 3, 0, 0, 5, 5, 5, 5, 3, 3, 3, 0, 0, 0):
        eager.start = played.start = start
        eager(x).square().sum().backward()
        played(x.to("xla")).square().sum().backward()
        torch_xla.sync()
        torch.testing.assert_close(played.linear.weight.grad.cpu(), eager.linear.weight.grad)
    for p in (0.1, 0.1, 0.1, 0.2, 0.2, 0.1, 0.1, 0.3, 0.3, 0.3, 0.1):
        played.drop.p = p
        played(x.to("xla")).square().sum().backward()
        torch_xla.sync()
    (state,) = [found for found in states() if found.module == "_Window"]
    assert not state.reason and state.played > 8


def test_a_probability_of_another_kind_has_a_program_of_its_own() -> None:
    """0, 1 and what is next to them take other ways than those between."""
    torch.manual_seed(0)
    chances = [0.2, 0.4, 0.0, 1.0, 1e-7, 1 - 1e-7, 0.6]
    found = [nn.functional.dropout(torch.ones(2000, device="xla"), p).count_nonzero().item() / 2000 for p in chances]
    assert found[2] == 1 and found[3] == 0
    assert all(abs(f - (1 - p)) < 0.05 for f, p in zip(found, chances, strict=True))


def test_starts_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over random windows never ends. What may be recorded again is the same as before."""
    x = torch.randn(2000, 3).to("xla").requires_grad_()
    tables: list[Bounded[Any, Any]] = [
        view_entries._READS,
        view_entries._WRITES,
        view_entries._STEP_ENTRIES,
        info(torch.ops.aten.slice.Tensor).cache,
        info(torch.ops.aten.slice_backward.default).cache,
    ]
    kept, before = x[0:4].detach(), _compiled()
    for k in range(300):
        if k == 3:
            for table in tables:
                monkeypatch.setattr(table, "_most", len(table) + 20)
            monkeypatch.setattr(bounded, "MOST", 20)
            known, sizes = len(layout._ELSEWHERE), list(map(len, tables))
        x.grad = None
        x[3 * k : 3 * k + 4].sum().backward()
        with torch.no_grad():
            x[2 * k : 2 * k + 2] *= 0.5
        torch_xla.sync()
    assert _compiled() - before == 2
    assert all(len(table) <= 2 * size + 40 for table, size in zip(tables, sizes, strict=True))
    assert len(layout._ELSEWHERE) <= known + 2 * max(sizes) + 100
    assert x[0:4]._layout is kept._layout and x[8:12]._layout is x[8:12]._layout  # type: ignore[attr-defined]
