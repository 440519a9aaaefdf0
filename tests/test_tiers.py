"""Which tests run, and in which order."""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import durations, tiers
from tests.conftest import pytest_collection_modifyitems, pytest_ignore_collect


class Item:
    """A collected test with marks."""

    def __init__(self, name: str, **marks: int):
        self.nodeid = f"tests/{name}"
        self._marks = {mark: SimpleNamespace(kwargs={"keep": keep}) for mark, keep in marks.items()}

    def get_closest_marker(self, name: str) -> Any:
        return self._marks.get(name)


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of `_items` take little."""
    known = durations.known
    monkeypatch.setattr(durations, "known", lambda *of: known(*of) | ({} if of else {"a.py": {}}))


def _items() -> list[Any]:
    much = [Item(f"a.py::much[{k}]", thorough=3) for k in range(7)]
    both = [Item(f"a.py::both[{k}]", thorough=4, core=2) for k in range(8)]
    return [
        Item("a.py::one"),
        *much,
        Item("a.py::alone", thorough=0),
        *both,
        Item("models/test_x.py::two"),
        Item("notebooks/test_x.py::three"),
    ]


def _run(
    arguments: list[str], everything: bool = False, tier: str = "all", share: tuple[int, int] | None = None, **more: Any
) -> tuple[list[str], list[str]]:
    """(what runs, what is left out)."""
    items = _items()
    left_out: list[str] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(_name(item) for item in items))
    given = {"--all": everything, "--tier": tier, "--share": share}
    config = SimpleNamespace(getoption=given.__getitem__, args=arguments, hook=hook, **more)
    pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
    return [_name(item) for item in items], sorted(left_out)


def _name(item: Any) -> str:
    return item.nodeid.rpartition("::")[2]


FEW = ["one", "much[0]", "much[2]", "much[4]", "both[0]", "both[2]", "both[4]", "both[6]", "two", "three"]


def test_some_thorough_cases_run_spread_over_all() -> None:
    ran, left_out = _run(["tests"])
    assert ran == FEW
    assert left_out == ["alone", "both[1]", "both[3]", "both[5]", "both[7]", "much[1]", "much[3]", "much[5]", "much[6]"]


@pytest.mark.parametrize("arguments, everything", [(["tests"], True), (["tests/a.py::much"], False)])
def test_all_run_when_asked_for(arguments: list[str], everything: bool) -> None:
    ran, left_out = _run(arguments, everything)
    assert len(ran) == 19 and not left_out


def test_each_test_has_one_tier() -> None:
    assert _run(["tests"], tier="core")[0] == ["one", "much[0]", "much[2]", "much[4]", "both[0]", "both[4]"]
    assert _run(["tests"], tier="deep")[0] == ["both[2]", "both[6]", "two"]
    assert _run(["tests"], tier="processes")[0] == ["three"]


@pytest.mark.parametrize(
    "each, core, deep",
    [(0.0, [0, 2, 4, 6], []), (0.4, [0, 4], [2, 6]), (1.5, [0], [2]), (3.0, [0], []), (9.0, [], [0])],
)
def test_a_function_has_as_many_cases_in_a_tier_as_take_its_limit(
    each: float, core: list[int], deep: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases 0, 2, 4 and 6 of 8 run without `--all`. Whoever names no tier gets them all."""
    monkeypatch.setattr(tiers, "SECONDS", {"core": 1.0, "deep": 2.0})
    monkeypatch.setattr(tiers, "LONGEST", 3.0)
    items = [Item(f"a.py::both[{k}]", thorough=4) for k in range(8)]
    selection = tiers.Selection(items, {"a.py": {"both": (each * 4, 4)}})
    for tier, ran in (("core", core), ("deep", deep), ("all", [0, 2, 4, 6])):
        assert [k for k, item in enumerate(items) if selection.runs(item, False, tier)] == ran
    assert all(selection.runs(item, True) for item in items)


def test_a_file_of_long_functions_has_its_quickest_in_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "LONGEST", 1.0)
    monkeypatch.setattr(tiers, "LONGEST_ALONE", 2.0)
    taken = {"long.py": {"a": (1.8, 1), "b": (1.6, 1)}, "mixed.py": {"a": (1.8, 1), "b": (0.9, 1)}, "longer.py": {"a": (2.5, 1)}}
    items = [Item(f"{file}::{name}") for file, functions in taken.items() for name in functions]
    selection = tiers.Selection(items, taken)
    assert [item.nodeid for item in items if selection.runs(item, False, "core")] == ["tests/long.py::b", "tests/mixed.py::b"]
    assert all(selection.runs(item, False, "deep") != selection.runs(item, False, "core") for item in items)


def test_a_file_without_numbers_may_take_long() -> None:
    """New ones whose durations nobody has kept, that is: two or three cases of a function are core."""
    items = [Item(f"new.py::cases[{k}]") for k in range(50)]
    selection = tiers.Selection(items, {})
    cases = int(tiers.SECONDS["core"] / tiers.UNKNOWN)
    assert sum(selection.runs(item, False, "core") for item in items) == cases
    assert sum(selection.runs(item, False, "core") for item in items) + sum(selection.runs(item, False, "deep") for item in items) < 20
    assert all(selection.runs(item, False) for item in items)


def test_shares_of_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short files are in every share, long ones in one, whole; all together are all."""
    files = {f"models/test_{k}.py": {"a": (1.5, 1), "b": (0.6, 2)} for k in range(20)}
    monkeypatch.setattr(durations, "known", lambda: {"models/test_short.py": {"a": (1.9, 1)}, **files})
    items = [Item(f"{file}::{name}") for file in ("models/test_short.py", *files) for name in ("a", "b[0]", "b[1]")]
    monkeypatch.setitem(globals(), "_items", lambda: list(items))
    monkeypatch.setitem(globals(), "_name", lambda item: item.nodeid)
    shares = [_run(["tests"], tier="deep", share=(k, 3))[0] for k in range(3)]
    every = [item.nodeid for item in items]
    assert all(share[:3] == every[:3] and len(share) % 3 == 0 and 6 < len(share) < 50 for share in shares)
    assert sorted(name for share in shares for name in share[3:]) == sorted(every[3:])
    assert all(
        {name.partition("::")[0] for name in one[3:]}.isdisjoint(n.partition("::")[0] for n in other[3:])
        for one, other in itertools.pairwise(shares)
    )
    assert _run(["tests"], tier="deep")[0] == every


@pytest.mark.parametrize("text", ["3/3", "1", "/3", "a/3", "-1/3", "1/0", "1.5/3"])
def test_a_share_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"give K/N with 0 <= K < N"):
        tiers.share_of(text)
    assert tiers.share_of("2/3") == (2, 3)


def test_thorough_cases_are_never_core() -> None:
    assert _run(["tests"], True, "core") == _run(["tests"], False, "core")
    assert len(_run(["tests"], True, "deep")[0]) == 3 + 9
    assert _run(["tests"], True, "processes")[0] == ["three"]


def test_the_tiers_of_all_tests(request: pytest.FixtureRequest) -> None:
    """Disjoint and complete, whatever part of the tests runs here."""
    items = request.session.items
    selection = tiers.Selection(items, durations.known())
    assert set(selection.tiers) == set(items) and set(selection.tiers.values()) <= set(tiers.TIERS)
    for everything in (False, True):
        ran = Counter(item for tier in tiers.TIERS for item in items if selection.runs(item, everything, tier))
        asked = {item for item in items if selection.runs(item, everything)}
        assert set(ran.values()) <= {1} and set(ran) == (asked if everything else asked - selection.beyond)
    functions = {tiers.place_of(item) for item in items if selection.runs(item, False)}
    assert functions == {tiers.place_of(item) for tier in tiers.TIERS for item in items if selection.runs(item, False, tier)}


def _is_there(name: str) -> bool:
    path, _, function = name.partition("::")
    place = tiers.TESTS / path
    if not place.exists() or not (place.is_dir() or place.name.startswith("test_")):
        return False
    return not function or function in [n.name for n in ast.parse(place.read_text()).body if isinstance(n, ast.FunctionDef)]


def test_the_tables_name_what_there_is() -> None:
    assert [name for name in (*tiers.TABLE, *tiers.THOROUGH) if not _is_there(name)] == []
    assert not _is_there("models/test_none.py") and not _is_there("test_tiers.py::test_none") and not _is_there("tiers.py")


def test_the_tables_say_nothing_twice() -> None:
    """A name is in one table, and would be in another tier without it."""
    assert len(tiers.TABLE) == len(tiers.CORE) + len(tiers.DEEP) + len(tiers.PROCESSES)
    around = {name: name.partition("::")[0] if "::" in name else name.rpartition("/")[0] for name in tiers.TABLE}
    assert [name for name, place in around.items() if tiers.tier_of(place) == tiers.TABLE[name]] == []


def test_the_narrowest_name_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "TABLE", {"a": "deep", "a/test_b.py": "core", "a/test_b.py::test_c": "processes"})
    places = {
        "a/test_x.py::test_c": "deep",
        "a/test_b.py::test_d": "core",
        "a/test_b.py::test_c": "processes",
        "ab/test_b.py::test_c": "core",
    }
    assert {place: tiers.tier_of(place) for place in places} == places


@pytest.mark.parametrize(
    "tier, left_out",
    [("core", ["models", "notebooks"]), ("deep", ["notebooks"]), ("processes", ["models/test_optimizers.py"]), ("all", [])],
)
def test_files_without_a_test_of_the_tier_are_not_imported(tier: str, left_out: list[str]) -> None:
    config = SimpleNamespace(getoption={"--tier": tier}.__getitem__)
    places = [".", "models", "models/test_optimizers.py", "notebooks", "test_readme.py", "nxd_jax"]
    found = [place for place in places if pytest_ignore_collect(tiers.TESTS / place, config)]  # type: ignore[arg-type]
    assert set(left_out) <= set(found) and not {".", "nxd_jax"} & set(found)
    assert pytest_ignore_collect(Path("/elsewhere"), config) is None  # type: ignore[arg-type]


RUN = """<testsuites><testsuite>
<testcase classname="tests.nxd_jax.test_a" name="test_long[1]" time="9"><properties><property name="cpu_seconds" value="1.5"/></properties></testcase>
<testcase classname="tests.nxd_jax.test_a" name="test_long[2]" time="2.04"/>
<testcase classname="tests.nxd_jax.test_a" name="test_short" time="0.06"/>
<testcase classname="tests.nxd_jax.test_a" name="test_shorter" time="0.05"/>
<testcase classname="tests.test_b" name="test_it" time="20"/>
</testsuite></testsuites>"""


def test_durations_are_kept(tmp_path: Path) -> None:
    (tmp_path / "run.xml").write_text(RUN)
    durations.write(durations.together(durations.measured(tmp_path / "run.xml")), tmp_path / "kept.json")
    kept = {"nxd_jax/test_a.py": {"test_long": [3.5, 2], "others": [0.1, 2]}, "test_b.py": {"test_it": [20.0, 1]}}
    assert durations.known(tmp_path / "kept.json") == kept
    assert durations.known(tmp_path / "none.json") == {}
    twice = durations.measured(tmp_path / "run.xml", tmp_path / "run.xml")
    assert {f: {n: (s * 2, c * 2) for n, (s, c) in own.items()} for f, own in durations.measured(tmp_path / "run.xml").items()} == twice


def test_what_was_not_run_keeps_its_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tiers, "TESTS", tmp_path)
    for name in ("test_b.py", "test_c.py"):
        (tmp_path / name).touch()
    kept = {"test_a.py": {"test_x": (1.0, 1)}, "test_b.py": {"test_y": (2.0, 1), "test_z": (3.0, 1)}}
    new = {"test_b.py": {"test_y": (4.0, 2)}, "test_c.py": {"test_x": (1.0, 1)}}
    assert durations.updated(kept, new) == {"test_b.py": {"test_y": (4.0, 2), "test_z": (3.0, 1)}, "test_c.py": {"test_x": (1.0, 1)}}


KEPT = {
    "a.py": {"much": (7.0, 7), durations.OTHERS: (1.0, 10)},
    "models/test_x.py": {"two": (9.0, 1)},
    "notebooks/test_x.py": {"three": (4.5, 1)},
}


def test_cases_of_a_function_count_alike_and_so_do_functions_that_take_little() -> None:
    items = [item for item in _items() if _name(item) in ("one", "alone", "much[0]", "much[1]", "two")]
    assert durations.by_file(items, KEPT) == pytest.approx({"a.py": 2.2, "models/test_x.py": 9.0})
    assert durations.by_file(items, {}) == pytest.approx({"a.py": 4 * tiers.UNKNOWN, "models/test_x.py": tiers.UNKNOWN})


def test_workers_start_with_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durations, "known", lambda: KEPT)
    assert _run(["tests"], workerinput={})[0] == ["two", "three", *FEW[:-2]]
    assert _run(["tests"], everything=True, workerinput={})[0][:2] == ["two", "one"]
    assert _run(["tests"])[0] == FEW


def test_a_run_that_is_written_down_says_what_it_took_of_the_processor(tmp_path: Path) -> None:
    item = SimpleNamespace(user_properties=[])
    plugin = durations.CpuTime()
    plugin.pytest_runtest_logstart()
    sum(range(2_000_000))
    for when in ("call", "teardown"):
        plugin.pytest_runtest_makereport(item, SimpleNamespace(when=when))  # type: ignore[arg-type]
    [(name, seconds)] = item.user_properties
    assert name == durations.PROPERTY and 0.0 < seconds < 60


@pytest.mark.skipif(not durations.FILE.exists(), reason="no durations are kept")
def test_the_kept_durations_are_of_files_that_exist() -> None:
    gone = [file for file in durations.known(durations.FILE) if not (tiers.TESTS / file).exists()]
    assert len(gone) < 20, f"run `python -m tests.durations` with a new run: {gone}"
