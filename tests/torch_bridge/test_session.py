"""A second session in one process: captures inside a step, abstract runs beside a real one, threads. The first is as if there were none."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm
from torch import nn

import torch_bridge
from torch_bridge import metrics
from torch_bridge.errors import DeadTensorError
from torch_bridge.mesh import world
from torch_bridge.mesh.abstract_arrays import AbstractArray, AbstractValueError
from torch_bridge.recorder.prefetch import Prefetcher
from torch_bridge.runtime import abstract, executor, session, steps

pytestmark = pytest.mark.usefixtures("clean_step")


class Training:
    """A small model and its losses; `between` is called in the middle of each step, with ops of it pending."""

    def __init__(self, seed: int = 0):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to("xla")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.x = torch.randn(6, 4).to("xla")
        self.losses: list[float] = []

    def step(self, between: Callable[[], Any] = lambda: None) -> None:
        loss = self.model(self.x).square().mean()
        between()
        loss.backward()
        between()
        self.optimizer.step()
        self.optimizer.zero_grad()
        between()
        xm.mark_step()
        self.losses.append(loss.item())


def trained(between: Callable[[], Any] = lambda: None, count: int = 4) -> list[float]:
    training = Training()
    for _ in range(count):
        training.step(between)
    return training.losses


def programs() -> int:
    return sum(len(found) for trace in session.current().traces.values() for found in trace.programs.values())


def untouched(do: Callable[[], Any]) -> Callable[[], Any]:
    """`do`, which must leave the pending segment as it is and run nothing of it."""

    def run() -> None:
        outer, segment = session.current(), session.current().current
        before = list(segment.nodes), list(segment.leaves), segment.next_vid, programs(), len(outer.recent)
        assert before[0], "nothing is pending: the test would prove nothing"
        do()
        assert session.current() is outer and outer.current is segment
        assert (segment.nodes, segment.leaves, segment.next_vid, programs(), len(outer.recent)) == before

    return run


def test_a_capture_inside_a_training_step() -> None:
    other = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    expected = trained()
    assert trained(untouched(lambda: torch_bridge.capture(other, torch.ones(2, 3)))) == expected


def test_a_training_inside_a_training_step() -> None:
    expected, inner = trained(), []

    def own() -> None:
        state = torch.get_rng_state()
        with session.opened():
            inner.append(trained(count=2))
        torch.set_rng_state(state)

    assert trained(untouched(own)) == expected
    assert inner == [expected[:2]] * 12


def test_an_abstract_run_inside_a_training_step() -> None:
    expected, met = trained(), []

    def shapes() -> None:
        run = abstract.Run()
        run.start()
        try:
            x = torch.zeros(1 << 20, 1 << 10, device="xla")
            y = (x @ torch.zeros(1 << 10, 4).to("xla")).sum(1)
            xm.mark_step()
            assert type(y._storage.held) is AbstractArray
            with pytest.raises(AbstractValueError):
                y.tolist()
        finally:
            run.stop()
        met.append(len(run.programs))

    assert trained(untouched(shapes)) == expected
    assert met == [1] * 12


def test_an_abstract_run_beside_a_real_one() -> None:
    """Two threads: one has shapes only, the other values."""
    expected = trained()
    turn, found, failed = threading.Barrier(2, timeout=60), [], []

    def shapes() -> None:
        run = abstract.Run()
        run.start()
        try:
            for _ in range(3):
                turn.wait()
                x = torch.ones(1 << 20, 1 << 10, device="xla") * 2
                turn.wait()
                xm.mark_step()
                found.append(type(x._storage.held) is AbstractArray)
        except BaseException as error:
            failed.append(error)
            turn.abort()
        finally:
            run.stop()

    thread = threading.Thread(target=shapes)
    thread.start()
    training = Training()
    for _ in range(3):
        turn.wait()
        loss = training.model(training.x).square().mean()
        turn.wait()
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        xm.mark_step()
        training.losses.append(loss.item())
    thread.join()
    assert not failed and found == [True] * 3
    assert training.losses == expected[:3]


def test_two_threads_with_sessions_of_their_own() -> None:
    expected = trained(count=6)
    turn, results, kept = threading.Barrier(2, timeout=60), {}, {}
    torch.manual_seed(0)
    trainings = [Training(), Training()]

    def work(k: int) -> None:
        with session.opened() as own:
            for _ in range(6):
                trainings[k].step(turn.wait)
            results[k], kept[k] = trainings[k].losses, own

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    before = programs()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: expected, 1: expected}
    assert kept[0] is not kept[1] and programs() == before
    assert len(kept[0].history.compilations) == len(kept[1].history.compilations) > 0


def test_threads_share_the_session_of_the_process() -> None:
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(session.current()))
    with session.opened() as own:
        thread.start()
        thread.join()
        assert session.current() is own is not seen[0]
    assert session.current() is seen[0]


def test_what_waits_in_another_session_is_run_there() -> None:
    outer = session.current()
    a = torch.arange(4.0).to("xla") * 2
    with session.opened() as own:
        assert (a + 1).tolist() == [1, 3, 5, 7]
        assert not outer.current.nodes and len(own.recent) == 1
        b = a * 10
        c = b.view(2, 2)
        c[0].add_(1)
    assert b.tolist() == [1, 21, 40, 60] and not own.current.nodes


def test_a_value_is_asked_for_where_it_waits() -> None:
    """`.item()` in the inner block of what the outer one recorded, and the other way round after an exception left it there."""
    a = torch.ones(3).to("xla") + 1
    with session.opened() as own:
        assert a.sum().item() == 6
    with pytest.raises(KeyError), session.opened() as own:
        b = torch.ones(3).to("xla") + 4
        raise KeyError
    assert own.current.nodes
    assert b.tolist() == [5, 5, 5] and not own.current.nodes
    with pytest.raises(KeyError), session.opened():
        c = torch.ones(3).to("xla") + 5
        raise KeyError
    assert (c * 2).tolist() == [12, 12, 12]


def test_writes_in_place_go_back_and_forth() -> None:
    w = torch.zeros(4).to("xla")
    view = w[1:3]
    w.add_(1)
    before = w * 1  # of the value that the inner block does not see change
    with session.opened():
        view.mul_(5)
        inner = w.sum()
    view.add_(100)
    with session.opened():
        w.sub_(1)
    assert before.tolist() == [1, 1, 1, 1]
    assert inner.item() == 12
    assert w.tolist() == [0, 104, 104, 0]


def test_a_whole_write_over_what_waits_elsewhere() -> None:
    w = torch.zeros(2).to("xla")
    w.add_(3)
    seen = w * 2
    with session.opened():
        w.copy_(torch.ones(2).to("xla") * 7)
    assert seen.tolist() == [6, 6] and w.tolist() == [7, 7]


def test_an_array_that_another_session_reads_is_not_taken_over() -> None:
    w = torch.ones(5, 3).to("xla")
    executor.sync()
    pending_read = w * 2
    with session.opened():
        w.add_(1)  # would be donated, were it not for the read that waits
        xm.mark_step()
    assert pending_read.tolist() == [[2.0] * 3] * 5 and w.tolist() == [[2.0] * 3] * 5


def test_a_failure_stays_where_it_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.ones(3).to("xla")
    before = w + 1
    with session.opened():
        w.mul_(2)
        lost = w * torch.ones(3).to("xla")
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(executor.Program, "compile", lambda *_: 1 / 0)
            xm.mark_step()
        with pytest.raises(DeadTensorError, match="ZeroDivisionError"):
            lost.tolist()
    assert before.tolist() == [2, 2, 2] and w.tolist() == [1, 1, 1]


def test_a_capture_cannot_be_asked_from_outside() -> None:
    kept: list[torch.Tensor] = []

    class Keeps(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(x + 1)
            return x

    torch_bridge.capture(Keeps(), torch.ones(2))
    with pytest.raises(DeadTensorError, match="capture"):
        kept[0].tolist()


def test_another_world_ends_the_steps_of_all_sessions() -> None:
    with pytest.raises(KeyError), session.opened() as own:
        a = torch.ones(3).to("xla") * 3
        raise KeyError
    before = world.current()
    try:
        world.configure(world.World(2))
        assert not own.current.nodes and not own.traces
    finally:
        world.configure(before)
    assert a.tolist() == [3, 3, 3]


def test_another_world_adopts_tensors_anew() -> None:
    """A write that records no op (a copy of an array) must not leave the old world's leaves in the segment."""
    executor.sync()
    w, source = torch.zeros(2, 3).to("xla"), torch.ones(2, 3).to("xla")
    w.copy_(source)
    segment = session.current().current
    assert not segment.nodes and w._storage.segment is segment and w._storage.vid < 0
    before = world.current()
    try:
        world.configure(world.World(2))
        assert session.current().current is not segment and not segment.leaves
        assert (w + 1).tolist() == [[2.0] * 3] * 2
    finally:
        world.configure(before)
    assert (w * 3).tolist() == [[3.0] * 3] * 2


def test_our_threads_record_where_they_were_started() -> None:
    """Step closures beside the next step, and loaders."""
    seen: list[Any] = []
    with session.opened() as own:
        xm.add_step_closure(lambda: seen.append(session.current()), (), run_async=True)
        xm.mark_step()
        steps.wait_closures()
        moved = list(Prefetcher([1, 2, 3], lambda x: (x, session.current()), 2, 2))
    assert seen == [own] and moved == [(k, own) for k in (1, 2, 3)]


def test_closures_belong_to_the_session_whose_step_ends() -> None:
    called: list[str] = []
    xm.add_step_closure(lambda: called.append("outer"))
    with session.opened():
        xm.add_step_closure(lambda: called.append("inner"))
        xm.mark_step()
        assert called == ["inner"]
    xm.mark_step()
    assert called == ["inner", "outer"]


def test_sessions_are_let_go_of() -> None:
    with session.opened() as own:
        x = torch.ones(2).to("xla") + 1
    ref = weakref.ref(own)
    del own
    gc.collect()
    assert ref() is None and x.tolist() == [2, 2]


def test_played_modules_play_in_any_session() -> None:
    model = torch_bridge.optimize(nn.Linear(3, 2).to("xla"))
    x = torch.ones(4, 3).to("xla")
    expected = [model(x).sum().item() for _ in range(5)]
    before = metrics.COUNTERS.get("UncachedCompile", 0)
    with session.opened():
        assert [model(x).sum().item() for _ in range(5)] == expected
    assert metrics.COUNTERS["UncachedCompile"] > before, "programs are each session's own"


def test_modules_are_recorded_in_two_sessions_at_once() -> None:
    """Each recording sees the storages of its own thread, whichever of the two began or ended last."""
    torch.manual_seed(0)
    turn = threading.Barrier(2, timeout=60)

    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            z = torch.zeros(3).to(x.device)
            z.add_(1)
            return y * z

    models = [torch_bridge.optimize(Turns().to("xla")) for _ in range(2)]
    expected = [[(models[k].linear(torch.full((2, 3), n + 1.0).to("xla"))).sum().item() for n in range(8)] for k in range(2)]
    found: dict[int, list[float]] = {}

    def work(k: int) -> None:
        with session.opened():
            found[k] = []
            for n in range(8):
                turn.wait()
                found[k].append(models[k](torch.full((2, 3), n + 1.0).to("xla")).sum().item())

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: expected[0], 1: expected[1]}


def test_a_module_that_opens_a_session_is_not_played() -> None:
    class Opens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = nn.Parameter(torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with session.opened():
                y = (x * 3).detach()
            return x + y + self.seen

    model = torch_bridge.optimize(Opens().to("xla"))
    for n in range(6):
        assert model(torch.full((2,), float(n)).to("xla")).tolist() == [4.0 * n] * 2
