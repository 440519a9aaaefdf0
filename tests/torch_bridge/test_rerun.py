"""Programs that are run again on other arrays (`replay.rerun`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch_xla

from torch_bridge.mesh import random_state
from torch_bridge.precision import stochastic_rounding
from torch_bridge.replay import rerun
from torch_bridge.replay.rerun import Ran, Rerun
from torch_bridge.runtime import executor


def ran(record: Callable[[], Any]) -> tuple[Ran, Any]:
    """What runs for what is recorded, and what that gave."""
    torch_xla.sync()
    found = record()
    with rerun.noted() as programs:
        executor.sync()
    assert len(programs) == 1
    return programs[0], found


def held(t: Any) -> Any:
    return t._storage.held


def lasting(*tensors: Any) -> dict[int, Any]:
    return {id(held(t)): t._storage for t in tensors}


def device(*values: float) -> torch.Tensor:
    t = torch.tensor(values).to("xla")
    torch_xla.sync()
    return t


def learned(record: Callable[[], Any], slots: Sequence[Any], keep: dict[int, Any]) -> Rerun:
    arrays = [held(t) for t in slots]
    program, out = ran(record)
    found = rerun.learn(program, arrays, keep)
    assert found is not None
    del out
    return found


def test_other_arrays_in_a_slot() -> None:
    x, w = device(1.0, 2.0), device(3.0, 4.0)
    program = learned(lambda: x * w + 1.0, [x], lasting(w))
    assert program.slots() == {0} and not program.written
    other = device(10.0, 20.0)
    found = program.run([held(other)])
    assert found is not None and found[0].tolist() == [31.0, 81.0]
    assert x.tolist() == [1.0, 2.0] and w.tolist() == [3.0, 4.0]


def test_what_lasts_is_written() -> None:
    x, total = device(1.0, 2.0), device(0.5, 0.5)
    program = learned(lambda: total.add_(x * 2.0), [x], lasting(total))
    assert [storage for _, storage in program.written] == [total._storage]
    writes = total._storage.writes
    for k in range(3):
        assert program.run([held(device(float(k), 1.0))]) is not None
    assert total.tolist() == [8.5, 10.5] and total._storage.writes == writes + 3


def test_an_array_that_somebody_holds_is_not_overwritten() -> None:
    x, total = device(1.0, 2.0), device(0.5, 0.5)
    program = learned(lambda: total.add_(x), [x], lasting(total))
    before = held(total)
    assert program.run([held(x)]) is not None
    assert not before.is_deleted() and before.tolist() == [1.5, 2.5] and total.tolist() == [2.5, 4.5]


def test_a_weight_with_another_value_is_not_what_was_learned() -> None:
    x, w = device(1.0, 2.0), device(3.0, 4.0)
    program = learned(lambda: x * w, [x], lasting(w))
    w.add_(1.0)
    assert program.run([held(x)]) is None  # pending
    torch_xla.sync()
    assert program.run([held(x)]) is None


def test_nothing_in_a_slot() -> None:
    x = device(1.0)
    program = learned(lambda: x + 1.0, [x], {})
    assert program.run([None]) is None


def test_draws_are_those_that_are_named() -> None:
    x = device(0.0, 0.0, 0.0)
    torch.manual_seed(1)
    program = learned(lambda: x + torch.rand_like(x), [x], {})
    assert program.draws == [(random_state.DEFAULT.seed, random_state.DEFAULT.offset - 1)]
    torch.manual_seed(2)
    expected = (x + torch.rand_like(x)).tolist()
    found = program.run([held(x)], [(2, 0)])
    assert found is not None and found[0].tolist() == expected


@pytest.mark.parametrize("case", ["unknown", "twice", "slot that lasts", "made of a number"])
def test_what_is_not_learned(case: str) -> None:
    x, w = device(1.0, 2.0), device(3.0, 4.0)
    slots: list[Any] = [held(x)]
    keep = lasting(w)
    filled = torch.zeros(2, device="xla")
    if case == "unknown":
        keep = {}
    elif case == "twice":
        slots.append(held(x))
    elif case == "slot that lasts":
        keep = lasting(w, x)
    else:
        keep = {**keep, 0: filled._storage}
    program, _ = ran(lambda: filled.add_(x) if case == "made of a number" else x * w)
    assert rerun.learn(program, slots, keep) is None


def test_where_a_program_alone_is_not_all() -> None:
    from torch_bridge.runtime import session
    from torch_bridge.runtime.observers import Observer

    torch_xla.sync()
    assert rerun.usual()
    x = device(1.0) + 1.0
    assert not rerun.usual()  # something is recorded
    torch_xla.sync()
    observer = Observer()
    session.current().observe(observer)
    try:
        assert not rerun.usual()
    finally:
        session.current().unobserve(observer)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert not rerun.usual()
    assert rerun.usual() and x.item() == 2.0


def test_each_run_rounds_with_random_words_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As runs that are recorded do: what is rounded stochastically is right on average."""
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1")
    x = torch.full((64,), 1.001, dtype=torch.float32).to("xla")
    torch_xla.sync()
    stochastic_rounding.restart()
    expected = []
    for _ in range(3):
        expected.append((x * 1.0).to(torch.bfloat16))
        torch_xla.sync()
    stochastic_rounding.restart()
    program = learned(lambda: (x * 1.0).to(torch.bfloat16), [x], {})
    for k in (1, 2):
        found = program.run([held(x)])
        assert found is not None and found[-1].tolist() == expected[k].tolist() != expected[0].tolist()


def test_which_runs_are_alike() -> None:
    x, y, w = device(1.0, 2.0), device(3.0, 4.0), device(5.0, 6.0)
    slots = [x, y]
    first, again, swapped = (learned(record, slots, lasting(w)) for record in (lambda: x * w - y, lambda: x * w - y, lambda: y * w - x))
    assert first.program is again.program is swapped.program
    assert first.is_like(again) and not first.is_like(swapped)
