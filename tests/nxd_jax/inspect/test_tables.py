"""Tables as text, rich, HTML, pandas and JSON; rows by what they hold; files that are whole or not there; numbers as people read them."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
from typing import Any

import pytest
from rich.console import Console

from nxd_jax.inspect import Column, Table, units
from nxd_jax.inspect.tables import plain, write
from tests.nxd_jax.inspect.pages import read_html


@dataclasses.dataclass(frozen=True)
class Row:
    """A row."""

    kind: str
    size: int
    axes: tuple[str, ...] = ()
    more: Any = None


ROWS = [Row("all-reduce", 2048, ("dp", "tp")), Row("a <b> & 'c'", 10), Row("permute", 3, more=0.5)]
COLUMNS = [
    Column("kind", "kind"),
    Column("along", lambda r: " x ".join(r.axes)),
    Column("bytes", "size", units.size, number=True),
    Column("more", "more"),
]


def table(most: int | None = None, note: str = "a note") -> Table[Row]:
    return Table("Title", ROWS, COLUMNS, note, most)


def test_text_is_aligned() -> None:
    assert str(table()).splitlines() == [
        "Title",
        "kind         along       bytes  more",
        "all-reduce   dp x tp  2.00 KiB",
        "a <b> & 'c'               10 B",
        "permute                    3 B  0.5",
        "a note",
    ]
    assert repr(table()) == str(table())


def test_rows_that_are_left_out_are_counted() -> None:
    short = table(most=1)
    assert str(short).splitlines()[-2:] == ["... and 2 more rows (.all() shows them)", "a note"]
    assert "permute" not in str(short) and "permute" not in short.html() and "2 more rows" in short.html()
    assert "permute" in str(short.all())
    assert len(short) == 3 and len(short.data()) == 3, "only what is shown is shorter"


def test_no_rows() -> None:
    empty = Table("", [], COLUMNS)
    assert str(empty) == "(nothing)"
    assert not empty.data() and empty.to_json() == "[]" and len(empty) == 0
    assert read_html(empty.html()).cells == [["kind", "along", "bytes", "more"]]


def test_rows_by_what_they_hold() -> None:
    t = table(most=1)
    assert t[0] is ROWS[0] and t[-1] is ROWS[2] and list(t) == ROWS
    assert t[1:].rows == tuple(ROWS[1:]) and isinstance(t[1:], Table)
    assert t[1:].most == 1 and t[1:].note == "a note" and t[1:].title == "Title"
    assert t.where(kind="permute").rows == (ROWS[2],)
    assert t.where(lambda r: r.size < 100).rows == tuple(ROWS[1:])
    assert t.where(lambda r: r.size < 100, axes=(), more=None).rows == (ROWS[1],)
    with pytest.raises(AttributeError, match=r"where\(color=\.\.\.\): rows of this table have kind, size, axes, more"):
        t.where(color="red")


def test_html_is_well_formed_and_escaped() -> None:
    page = read_html(table().html())
    assert page.cells == [
        ["kind", "along", "bytes", "more"],
        ["all-reduce", "dp x tp", "2.00 KiB", ""],
        ["a <b> & 'c'", "", "10 B", ""],
        ["permute", "", "3 B", "0.5"],
    ]
    assert "b" not in page.tags and page.text.startswith("Title") and page.text.endswith("a note")
    assert table()._repr_html_() == table().html()


def test_long_texts_are_broken_and_short_ones_are_not() -> None:
    """A table is no wider than its page; numbers and short names stay in one piece."""
    page = Table("", [Row("all-reduce", 3, ("model.layers.0.self_attention.query_key_value",))], COLUMNS).html()
    assert page.count("overflow-wrap:anywhere") == 2 and page.count("white-space:nowrap") == 6


def test_rich_shows_the_same() -> None:
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table(most=2))
    console.file.close()
    text = console.export_text()
    for part in ("Title", "all-reduce", "dp x tp", "2.00 KiB", "a <b> & 'c'", "... and 1 more rows", "a note"):
        assert part in text
    assert "permute" not in text


def test_brackets_are_no_markup_of_rich() -> None:
    """Shapes and module paths have brackets, which rich would take for styles."""
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    rows = [Row("float32[2, 3] [bold]layers[/bold]", 1)]
    console.print(Table("sizes [red]", rows, COLUMNS, "at x.py:1 [layers.0]"))
    console.file.close()
    text = console.export_text()
    assert "float32[2, 3] [bold]layers[/bold]" in text and "sizes [red]" in text and "[layers.0]" in text


def test_data_json_and_pandas(tmp_path: pathlib.Path) -> None:
    data = [{"kind": r.kind, "size": r.size, "axes": list(r.axes), "more": r.more} for r in ROWS]
    assert table().data() == data
    assert json.loads(table().save(tmp_path / "new" / "t.json").read_text()) == data == json.loads(table().to_json())
    pandas = pytest.importorskip("pandas")
    frame = table().to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == ["kind", "size", "axes", "more"] and frame["size"].sum() == 2061


def test_without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install pandas.*data\(\) gives the rows"):
        table().to_pandas()


def test_plain_values() -> None:
    assert plain({1: table()[0:1], "x": {2, }, "y": pathlib.Path("a")}) == {
        "1": [{"kind": "all-reduce", "size": 2048, "axes": ["dp", "tp"], "more": None}],
        "x": [2],
        "y": "a",
    }  # fmt: skip
    assert plain([True, None, 1.5]) == [True, None, 1.5]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_json_has_no_nan(value: float) -> None:
    """RFC 8259 has no such numbers; a reader other than Python's refuses the file."""
    t = Table("", [Row("x", 1, more=value)], COLUMNS)
    made = t.to_json()
    assert json.loads(made, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))[0]["more"] == str(value)
    pytest.importorskip("pandas")
    assert t.to_pandas()["more"].dtype == "float64", "pandas has them"


def test_a_file_is_written_whole_or_not_at_all(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "deep" / "er" / "file.txt"
    assert write(target, "one") == target and target.read_text() == "one"
    assert write(str(target), "two €") == target and target.read_text(encoding="utf-8") == "two €"
    mask = os.umask(0o077)
    os.umask(mask)
    assert target.stat().st_mode & 0o777 == 0o666 & ~mask

    def fails(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="no space left"):
        write(target, "three")
    assert target.read_text(encoding="utf-8") == "two €"
    assert [p.name for p in target.parent.iterdir()] == ["file.txt"], "no draft is left"


def test_numbers_as_people_read_them() -> None:
    assert [units.size(n) for n in (0, 1, 1023, 1024, 1536, 16 * 2**30, 3 * 2**40)] == [
        "0 B", "1 B", "1023 B", "1.00 KiB", "1.50 KiB", "16.00 GiB", "3.00 TiB",
    ]  # fmt: skip
    assert [units.count(n) for n in (0, 999, 1500, 2.5e6, 1e9, 1.25e12, 1e15)] == ["0", "999", "1.5 k", "2.5 M", "1 G", "1.25 T", "1 P"]
    assert [units.seconds(t) for t in (0, 2, 0.0025, 3e-6, 4e-9, 5e-12)] == ["0 s", "2 s", "2.5 ms", "3 us", "4 ns", "0.005 ns"]
    assert [units.share(1, 4), units.share(0, 0)] == ["25.0%", "-"]
