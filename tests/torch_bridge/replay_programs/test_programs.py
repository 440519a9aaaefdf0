"""The programs of this package on `xla` with `NXD_JAX_REPLAY=all`, against eager torch on the CPU."""

from __future__ import annotations

import pytest

import torch_bridge
from tests.torch_bridge.replay_programs import PLAYED, PROGRAMS, Program, cases, difference, outcome
from tests.torch_bridge.replay_programs.generated import SEEDS, generated, source
from tests.torch_bridge.replaying import compile_fast  # noqa: F401

torch_bridge.register()

EVERY = cases(PROGRAMS.values())
FIRST = [(p.name, p.forms[0]) for p in PROGRAMS.values()]
"""Each program once; the thorough tests have the other form of each too."""
SECOND = [case for case in EVERY if case not in FIRST]


@pytest.fixture(autouse=True)
def everything_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every module that is moved to xla is played, as far as it can be."""
    monkeypatch.setenv("NXD_JAX_REPLAY", "all")


def check(program: Program, form: str) -> int:
    """Compare with eager torch; how many calls were played."""
    found = outcome(program.body, "xla", form)
    said = difference(outcome(program.body, "cpu", form).notes, found.notes)
    assert not said, f"differs from eager torch, with {found.played} calls played: {said}"
    return found.played


@pytest.mark.core(keep=20)
@pytest.mark.parametrize(("name", "form"), FIRST)
def test_does_as_eager_torch(name: str, form: str) -> None:
    check(PROGRAMS[name], form)


@pytest.mark.thorough(keep=30)
@pytest.mark.parametrize(("name", "form"), SECOND)
def test_does_as_eager_torch_in_its_other_form(name: str, form: str) -> None:
    check(PROGRAMS[name], form)


@pytest.mark.parametrize("name", PLAYED)
def test_is_played_and_does_as_eager_torch(name: str) -> None:
    program = PLAYED[name]
    assert check(program, program.forms[-1]), "no call was played"


@pytest.mark.thorough(keep=10)
@pytest.mark.parametrize("name", [p.name for p in PLAYED.values() if len(p.forms) > 1])
def test_is_played_as_a_script(name: str) -> None:
    assert check(PLAYED[name], "script"), "no call was played"


@pytest.mark.thorough(keep=30)
@pytest.mark.parametrize(("name", "form"), EVERY)
def test_a_careless_player_is_found_out(name: str, form: str) -> None:
    """Each program can fail: it ends otherwise if the third call is played for ever."""
    program = PROGRAMS[name]
    expected = outcome(program.body, "cpu", form).notes
    assert not difference(expected, outcome(program.body, "cpu", form).notes), "eager torch differs from itself"
    found = difference(expected, outcome(program.body, "cpu", form, careless=True).notes)
    assert bool(found) != bool(program.careless), found or "a player that always plays the third call does as eager torch does"


def test_enough_programs() -> None:
    """Few are such that even a careless player is right about them."""
    assert len(PROGRAMS) > 400 and len(PLAYED) > 50
    assert len([p for p in PROGRAMS.values() if p.careless]) < len(PROGRAMS) / 10


@pytest.mark.thorough(keep=40)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_generated_program_does_as_eager_torch(seed: int) -> None:
    body = generated(seed)
    found = outcome(body, "xla")
    said = difference(outcome(body, "cpu").notes, found.notes)
    assert not said, f"differs from eager torch, with {found.played} calls played: {said}\n{source(seed)}"


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("seeds", [SEEDS[k : k + 40] for k in range(0, len(SEEDS), 40)])
def test_generated_programs_can_fail(seeds: range) -> None:
    """They end without errors, and a player that always plays the third call gets every one of them wrong."""
    for seed in seeds:
        expected = outcome(generated(seed), "cpu").notes
        assert not [note for note in expected if note[0] == "ended by" or (len(note) == 3 and isinstance(note[1], str))], source(seed)
        assert difference(expected, outcome(generated(seed), "cpu", careless=True).notes), source(seed)
