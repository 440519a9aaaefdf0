"""How far a script may be ahead of the devices (`runtime.in_flight`): each place has its own count."""

from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.ranks.conftest import Hosted, hosted  # noqa: F401
from torch_bridge.config.settings import SETTINGS
from torch_bridge.mesh.places import HERE, Place, along
from torch_bridge.recorder import placed
from torch_bridge.runtime import executor, session
from torch_bridge.runtime.in_flight import InFlight

A, B = Place("a"), Place("b")


class Result:
    """Stands for an array of an execution. waited: those that were waited for, in order."""

    waited: list[str] = []

    def __init__(self, name: str, deleted: bool = False, error: Exception | None = None):
        self.name = name
        self.deleted = deleted
        self.error = error
        self.ready = False

    def is_deleted(self) -> bool:
        return self.deleted

    def is_ready(self) -> bool:
        return self.ready

    def block_until_ready(self) -> None:
        self.waited.append(self.name)
        if self.error is not None:
            raise self.error
        self.ready = True


@pytest.fixture(autouse=True)
def _nobody_waited() -> None:
    Result.waited = []


def queued(*names: str) -> tuple[InFlight, list[Result]]:
    """Executions at the places that the first letters of their names say."""
    found, results = InFlight(), [Result(name) for name in names]
    for result in results:
        found.add({"a": A, "b": B}[result.name[0]], result)
    return found, results


def test_places_wait_for_their_own_executions() -> None:
    flight, results = queued("a1", "b1", "a2", "b2", "a3", "a4")
    assert len(flight) == 6
    assert not flight.over(4) and flight.over(3)
    flight.wait(3)
    assert Result.waited == ["a1"], "the oldest of the place that has too many, and nobody of the other"
    assert not flight.over(3)
    flight.wait()
    assert sorted(Result.waited) == ["a1", "a2", "a3", "a4", "b1", "b2"]
    assert not flight and all(result.ready for result in results)


def test_results_that_nobody_has_are_not_waited_for() -> None:
    flight, results = queued("a1", "a2", "a3")
    results[1].deleted = True
    del results[0]
    flight.wait()
    assert Result.waited == ["a3"]


def test_an_error_of_an_execution_is_raised_once() -> None:
    flight, results = queued("a1", "a2")
    results[0].error = RuntimeError("lost")
    with pytest.raises(RuntimeError, match="lost"):
        flight.wait()
    flight.wait()
    assert Result.waited == ["a1", "a2"]


def test_idle_once_the_last_execution_has_finished() -> None:
    flight, results = queued("a1", "b1")
    assert not flight.is_idle()
    results[1].ready = True
    assert flight.is_idle(), "the one that was queued last"
    assert InFlight().is_idle()
    del results[1]
    results[0].ready = True
    assert flight.is_idle()


def test_stages_queue_as_much_as_one_device_alone(monkeypatch: pytest.MonkeyPatch, hosted: Hosted) -> None:  # noqa: F811
    """Four places may have four times as many executions in flight as one."""
    hosted(4, pp=4)
    seen: list[dict[Place, int]] = []

    def wait(flight: InFlight, beyond: int = 0) -> None:
        seen.append({place: len(queue) for place, queue in flight._queues.items()})
        waits(flight, beyond)

    waits = InFlight.wait
    monkeypatch.setattr(InFlight, "wait", wait)
    found = [placed.moved(torch.full((4,), float(k)).to("xla"), along("pp", k)) for k in range(4)]
    executor.wait_all()
    seen.clear()
    for _ in range(SETTINGS.max_in_flight):
        for k in range(4):
            found[k] = found[k] + 1
            executor.sync()
    assert not seen, "no place had more than may be"
    for _ in range(2):
        found[1] = found[1] + 1
        executor.sync()
    assert [most[along("pp", 1)] for most in seen] == [SETTINGS.max_in_flight + 1] * 2
    assert all(most[along("pp", k)] <= SETTINGS.max_in_flight for most in seen for k in (0, 2, 3)) and HERE not in seen[0]
    assert [x.tolist() for x in found] == [[k + SETTINGS.max_in_flight + 2.0 * (k == 1)] * 4 for k in range(4)]
    assert not session.current().in_flight.over(SETTINGS.max_in_flight)
