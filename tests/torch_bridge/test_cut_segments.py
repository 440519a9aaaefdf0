"""A segment as several programs: the same numbers as one program gives, and nothing lost when one of them fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla.core.xla_model as xm
from torch import nn

from tests.torch_bridge.ranks.conftest import Hosted, hosted  # noqa: F401
from torch_bridge import metrics
from torch_bridge.compiler import cache_keys
from torch_bridge.compiler.program import Program
from torch_bridge.ir.segment import Segment
from torch_bridge.mesh.places import Place, along
from torch_bridge.passes.cut_segment import Part, cut
from torch_bridge.recorder import sharded
from torch_bridge.runtime import abstract, executor, session

aten = torch.ops.aten
Placement = Callable[[Segment], Sequence[Place]]

# -- where a list of nodes is cut ------------------------------------------------------------------


class Op:
    """Stands for an entry: a call with this many results."""

    def __init__(self, n_outs: int = 1):
        self.n_outs = n_outs


def shown(parts: Sequence[Part]) -> list[tuple[str, tuple[int, ...], list[int], list[int]]]:
    return [(part.place.name, part.results, sorted(part.given), sorted(part.shared)) for part in parts]


A, B = Place("a"), Place("b")


def test_a_value_is_passed_to_the_part_that_reads_it() -> None:
    nodes = [(Op(), -1), (Op(), 0, -2), (Op(), 0)]
    assert shown(cut(nodes, [1, 2], [A, B, A])) == [("a", (0, 2), [], [1]), ("b", (1,), [0, 2], [])]


def test_a_place_that_waits_for_another_has_two_parts() -> None:
    """There, elsewhere and back: the third node needs what the second place makes of the first's."""
    nodes = [(Op(), -1), (Op(), 0), (Op(), 1, -1)]
    parts = cut(nodes, [2], [A, B, A])
    assert shown(parts) == [("a", (0,), [], [0]), ("b", (1,), [0], [0]), ("a", (2,), [0, 1], [])]


def test_nodes_that_nothing_needs_are_in_no_part() -> None:
    nodes = [(Op(2), -1), (Op(), 0), (Op(), 1)]
    assert shown(cut(nodes, [2], [A, B, B])) == [("a", (0,), [], []), ("b", (2,), [0], [])]


def test_what_only_a_later_part_reads_is_computed_there() -> None:
    """The second node turns a weight over for the fourth, which waits for another place: no copy of the weight goes from part to part."""
    nodes = [(Op(), -1), (Op(), -2), (Op(), 0), (Op(), 1, 2)]
    parts = cut(nodes, [3], [A, A, B, A])
    assert shown(parts) == [("a", (0,), [], [1]), ("b", (2,), [0], [1]), ("a", (3,), [0, 2], [])]


def test_what_would_take_its_input_along_stays() -> None:
    """The third node is read later alone, but the second, which it reads, is needed elsewhere at once: one of the two has to be passed on."""
    nodes = [(Op(), -1), (Op(), 0), (Op(), 0), (Op(), 1), (Op(), 2, 3)]
    parts = cut(nodes, [4], [A, A, A, B, A])
    assert shown(parts) == [("a", (1, 2), [], []), ("b", (3,), [1, 2], []), ("a", (4,), [1, 2, 3], [])]


def test_every_node_needs_a_place() -> None:
    with pytest.raises(ValueError, match="a place for each of the 2 recorded nodes, got 1"):
        cut([(Op(), -1), (Op(), 0)], [1], [A])


# -- programs --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def whole_again() -> Iterator[None]:
    executor.sync()
    executor.clear_cache()
    yield
    session.current().placement = None
    session.current().begin()
    executor.clear_cache()


def in_thirds(segment: Segment) -> list[Place]:
    """By the order of recording: the last third starts within the backward pass."""
    count = len(segment.nodes)
    return [Place(f"stage {3 * i // count}") for i in range(count)]


def scattered(seed: int) -> Placement:
    """Each node at one of three places, the same in every step."""

    def places(segment: Segment) -> list[Place]:
        chosen = random.Random(seed)
        return [Place(f"place {chosen.randrange(3)}") for _ in segment.nodes]

    return places


def training(placement: Placement | None, steps: int = 4) -> tuple[list[float], list[np.ndarray]]:
    """Losses and weights of a model with dropout, a schedule, clipping and a buffer, trained with this placement from the second step on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 6), nn.Linear(6, 1)).to(
        "xla"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    x = torch.randn(5, 6).to("xla")
    losses = []
    for step in range(steps):
        session.current().placement = placement if step else None
        loss = model(x * (step + 1)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        xm.mark_step()
        session.current().placement = None
        losses.append(loss.item())
    return losses, [p.detach().cpu().numpy() for p in [*model.parameters(), *model.buffers()]]


def agree(found: tuple[list[float], list[np.ndarray]], expected: tuple[list[float], list[np.ndarray]]) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-5)
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


def compiled() -> int:
    """Programs made so far."""
    return metrics.COUNTERS.get("UncachedCompile", 0)


@pytest.mark.core(keep=2)
@pytest.mark.parametrize("placement", [in_thirds, *map(scattered, range(3))], ids=["thirds", "scattered 0", "scattered 1", "scattered 2"])
def test_a_training_step_as_several_programs(placement: Placement) -> None:
    """Dropout draws the same, the learning rate is an input of whichever program reads it, and later steps compile nothing."""
    expected = training(None)
    executor.clear_cache()
    before = compiled()
    agree(training(placement), expected)
    made = [p for trace in session.current().traces.values() for found in trace.programs.values() for p in found]
    assert len(made) >= 4 and compiled() - before == len(made)
    assert all(p.executions in (1, 3) for p in made)
    assert sum(p.executions for p in made) == 1 + 3 * (len(made) - 1)


def test_the_last_part_that_reads_a_weight_takes_it_over() -> None:
    training(in_thirds)
    trace = max(session.current().traces.values(), key=lambda t: len(t.programs))
    specs = [p.spec for found in trace.programs.values() for p in found if len(p.spec.part.place.name)]
    assert [s.part.place.name for s in specs] == ["stage 0", "stage 1", "stage 2"]
    assert specs[-1].ports.donated, "weights and moments are written in place"
    taken = [s.inputs[i] for s in specs for at in s.ports.donated for i in s.ports.inputs[at]]
    assert len(taken) == len(set(taken)) and all(v < 0 for v in taken)
    assert any(v >= 0 for v in specs[-1].inputs), "and gradients come from the part before"


def test_a_program_that_cannot_be_compiled_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first program would have run already, and taken weights over, if they were compiled one by one."""
    model = nn.Linear(3, 3).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xm.mark_step()
    before = [p.tolist() for p in model.parameters()]
    compiled, made = Program.compile, []

    def broken(self: Program, args: Any) -> None:
        made.append(self.spec.part.place.name)
        if len(made) == 3:
            raise RuntimeError("no room for another program")
        compiled(self, args)

    def step() -> None:
        model(torch.ones(2, 3).to("xla")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.current().placement = in_thirds
        xm.mark_step()

    with monkeypatch.context() as patch:
        patch.setattr(Program, "compile", broken)
        with pytest.raises(RuntimeError, match="no room for another program"):
            step()
    assert made == ["stage 0", "stage 1", "stage 2"]
    session.current().placement = None
    assert [p.tolist() for p in model.parameters()] == before
    optimizer.zero_grad()
    step()
    session.current().placement = None
    assert [p.tolist() for p in model.parameters()] != before


def test_layers_are_folded_within_their_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(placement: Placement | None) -> list[float]:
        torch.manual_seed(0)
        layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU()) for _ in range(8)]
        ).to("xla")
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
        found = []
        for _ in range(3):
            session.current().placement = placement
            loss = layers(torch.ones(2, 4).to("xla")).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            xm.mark_step()
            session.current().placement = None
            found.append(loss.item())
        return found

    def by_passes(segment: Segment) -> list[Place]:
        return [Place("backward" if source.backward else "forward") for source in sources(segment)]

    monkeypatch.setenv("NXD_JAX_FOLD", "4")
    expected = losses(None)
    np.testing.assert_allclose(losses(by_passes), expected, rtol=1e-5)
    specs = [p.spec for p in session.current().recent if p.spec.part.place.name]
    assert {s.part.place.name for s in specs if s.plan is not None} >= {"forward", "backward"}


def sources(segment: Segment) -> Sequence[Any]:
    return segment.sources if segment.predicted is None else segment.predicted.sources[: len(segment.nodes)]


def test_an_abstract_run_of_several_programs() -> None:
    run = abstract.Run()
    run.start()
    try:
        session.current().placement = in_thirds
        x = torch.ones(4, 4).to("xla")
        y = ((x @ x).tanh() @ x).relu() @ x
        xm.mark_step()
        assert len(run.programs) == 3 and tuple(y.shape) == (4, 4)
        for recorded in run.programs.values():
            recorded.compile(abstract.QUICK)
    finally:
        run.stop()


def test_the_names_of_executables_tell_parts_apart() -> None:
    """A program that takes what another gives is named for the shapes of that, before it exists."""
    training(in_thirds, steps=2)
    programs = [p for p in session.current().recent if p.spec.part.place.name]
    names = []
    for program in programs:
        values = [np.zeros(a.shape, a.dtype) for a in program.signature]
        names.append(cache_keys.digest(cache_keys.parts(program.spec, values)))
    assert len(set(names)) == len(programs) == 3


# -- ranks -----------------------------------------------------------------------------------------


def ranks_train(placement: Callable[[], Placement] | None) -> list[Any]:
    """Two layers with tensor parallelism, written with collectives, on each dp rank's own batch."""
    import torch_xla

    torch.manual_seed(0)
    first, second = (
        sharded.from_ranks(lambda r, k=k: torch.randn(4, 4, generator=torch.Generator().manual_seed(k + r % 2)), ("tp",)) for k in (1, 7)
    )
    found = []
    for step in range(3):
        x = (
            sharded.from_ranks(lambda r, step=step: torch.full((2, 4), 1.0 + step + r // 2), ("pp",))
            if step < 0
            else torch.full((2, 4), 1.0 + step).to("xla")
        )
        hidden = xm.all_reduce("sum", torch.tanh(x @ first), groups=[[0, 1], [2, 3]])
        out = xm.all_reduce("sum", hidden @ second, groups=[[0, 1], [2, 3]])
        first = first - 0.01 * (x.t() @ out)
        second = second - 0.01 * (hidden.t() @ out)
        session.current().placement = None if placement is None else placement()
        torch_xla.sync()
        session.current().placement = None
        found.append([[s.tolist() for s in sharded.shards(t)] for t in (out, first, second)])
    return found


def test_several_programs_of_ranks(hosted: Hosted) -> None:  # noqa: F811
    """On the mesh of the world: what differs by rank is passed on as it lies."""
    hosted(4, pp=2, tp=2)
    expected = ranks_train(None)
    np.testing.assert_allclose(np.array(ranks_train(lambda: in_thirds), dtype=object).tolist()[0][0], expected[0][0], rtol=1e-6)
    for one, other in zip(ranks_train(lambda: in_thirds), expected, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def stages() -> Placement:
    """The forward half of the nodes on the first pp rank's devices, the rest on the second's."""
    halves = [along("pp", k) for k in range(2)]

    def places(segment: Segment) -> list[Place]:
        return [halves[2 * i // len(segment.nodes)] for i in range(len(segment.nodes))]

    return places


def test_programs_on_meshes_of_their_own(hosted: Hosted) -> None:  # noqa: F811
    """Each runs on its part of the devices; what comes out stays there, and is read for all ranks."""
    hosted(4, pp=2, tp=2)
    expected = ranks_train(None)
    for one, other in zip(ranks_train(stages), expected, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    programs = [p for p in session.current().recent if p.spec.part.place.name]
    devices = [frozenset(d.id for d in p.spec.labels.mesh.devices.flat) for p in programs]
    assert set(devices) == {frozenset({0, 1}), frozenset({2, 3})}


def test_ops_that_name_ranks_which_are_elsewhere(hosted: Hosted) -> None:  # noqa: F811
    hosted(4, pp=2, tp=2)
    x = torch.ones(2, 4).to("xla")
    y = xm.all_reduce("sum", x * 2, groups=[[0, 2], [1, 3]]) + 1
    session.current().placement = stages()
    with pytest.raises(
        NotImplementedError,
        match=r"all_reduce\.default at test_cut_segments\.py:\d+ names ranks along pp, and its tensor lies at 'pp 0' alone",
    ):
        executor.sync()
    assert y is not None
