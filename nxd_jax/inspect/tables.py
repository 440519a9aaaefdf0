"""`Table`: rows of plain data that print in a terminal, show in a notebook, and go to pandas and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any, Generic, TypeVar, overload

Row = TypeVar("Row")

STYLE = "border-collapse:collapse;font:13px/1.5 system-ui,sans-serif;color:#1b1f24;background:#fff"
_CELL = "padding:2px 10px 2px 0;border-bottom:1px solid #e3e7eb;vertical-align:top"
_WIDE = 32
"""Characters from which on a column's text is broken where the page ends, between any two letters: paths and arguments have no spaces."""


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    header: what stands above it. value: of a row: the name of an attribute, or a function. show: how a value is written; default `str`.
    number: whether it is aligned to the right.
    """

    header: str
    value: str | Callable[[Any], Any]
    show: Callable[[Any], str] = str
    number: bool = False

    def of(self, row: object) -> Any:
        """The value in a row."""
        return getattr(row, self.value) if isinstance(self.value, str) else self.value(row)

    def text(self, row: Any) -> str:
        """The value as it is written."""
        found = self.of(row)
        return "" if found is None else self.show(found)


class Table(Generic[Row]):
    """Rows (frozen dataclasses) under columns. `print` gives plain text, rich and notebooks a table with rules.

    title: one line above. rows, columns: what is in it. note: one line below. most: rows that text and HTML show (None: all); the rest is counted there.
    """

    def __init__(self, title: str, rows: Sequence[Row], columns: Sequence[Column], note: str = "", most: int | None = None):
        self.title = title
        self.rows = tuple(rows)
        self.columns = tuple(columns)
        self.note = note
        self.most = most

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> Table[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | Table[Row]:
        return self._with(self.rows[at]) if isinstance(at, slice) else self.rows[at]

    def where(self, keep: Callable[[Row], bool] | None = None, **equal: Any) -> Table[Row]:
        """The rows for which `keep` is true and whose attributes equal `equal`: `table.where(kind="all-reduce")`.

        Raises AttributeError for an attribute that rows do not have.
        """
        wrong = [k for k in equal if self.rows and not hasattr(self.rows[0], k)]
        if wrong:
            known = ", ".join(f.name for f in dataclasses.fields(self.rows[0]))  # type: ignore[arg-type]
            raise AttributeError(f"where({wrong[0]}=...): rows of this table have {known}")
        return self._with([r for r in self.rows if (keep is None or keep(r)) and all(getattr(r, k) == v for k, v in equal.items())])

    def all(self) -> Table[Row]:
        """The same table, none of whose rows is left out of text and HTML."""
        return Table(self.title, self.rows, self.columns, self.note)

    def _with(self, rows: Sequence[Row]) -> Table[Row]:
        return Table(self.title, rows, self.columns, self.note, self.most)

    # -- as data ---------------------------------------------------------------------------------------

    def data(self) -> list[dict[str, Any]]:
        """Each row as a dictionary of plain values (what JSON holds)."""
        return [plain(row) for row in self.rows]

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with a column for each field. Raises ImportError, saying what to install, without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas() needs pandas (pip install pandas); data() gives the rows as dictionaries without it") from error
        values = ({f.name: getattr(row, f.name) for f in dataclasses.fields(row)} for row in self.rows)  # type: ignore[arg-type]
        return pandas.DataFrame([{k: v if isinstance(v, float) else plain(v) for k, v in row.items()} for row in values])

    def to_json(self) -> str:
        """`data` as JSON text."""
        return json.dumps(self.data(), indent=1)

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write `to_json` to a file; the path. A file that is there is replaced, whole or not at all."""
        return write(path, self.to_json())

    # -- as text ---------------------------------------------------------------------------------------

    def _shown(self) -> tuple[Row, ...]:
        return self.rows[: self.most]

    def _footer(self) -> list[str]:
        left = len(self.rows) - len(self._shown())
        return [*([f"... and {left} more rows (.all() shows them)"] if left else []), *([self.note] if self.note else [])]

    def __str__(self) -> str:
        cells = [[c.header for c in self.columns], *([c.text(row) for c in self.columns] for row in self._shown())]
        widths = [max(len(line[i]) for line in cells) for i in range(len(self.columns))]
        lines = [
            "  ".join(text.rjust(w) if c.number else text.ljust(w) for text, w, c in zip(line, widths, self.columns, strict=True)).rstrip()
            for line in cells
        ]
        body = lines if self.rows else ["(nothing)"]
        return "\n".join([*([self.title] if self.title else []), *body, *self._footer()])

    def __repr__(self) -> str:
        return str(self)

    def __rich__(self) -> Any:
        from rich.table import Table as RichTable
        from rich.text import Text

        title, caption = (Text(t) if t else None for t in (self.title, "\n".join(self._footer())))
        made = RichTable(title=title, title_justify="left", caption=caption, caption_justify="left")
        for c in self.columns:
            made.add_column(Text(c.header), justify="right" if c.number else "left", overflow="fold")
        for row in self._shown():
            made.add_row(*(Text(c.text(row)) for c in self.columns))
        return made

    def _repr_html_(self) -> str:
        return self.html()

    def html(self) -> str:
        """The table as one piece of HTML that needs nothing else."""
        cells = [[c.text(row) for c in self.columns] for row in self._shown()]
        styles = [_style(c, [line[i] for line in cells]) for i, c in enumerate(self.columns)]
        head = "".join(f'<th style="{style}">{escape(c.header)}</th>' for c, style in zip(self.columns, styles, strict=True))
        body = "".join(
            "<tr>" + "".join(f'<td style="{style}">{escape(text)}</td>' for text, style in zip(line, styles, strict=True)) + "</tr>"
            for line in cells
        )
        title = f'<caption style="text-align:left;font-weight:600;padding:4px 0">{escape(self.title)}</caption>' if self.title else ""
        footer = "".join(f'<div style="font:12px system-ui,sans-serif;color:#57606a">{escape(line)}</div>' for line in self._footer())
        return f'<div><table class="nxd-table" style="{STYLE}">{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{footer}</div>'


def _style(column: Column, texts: Sequence[str]) -> str:
    """Of the cells of a column: short ones stay in one piece, long ones are broken, so that a table is as wide as its page at most."""
    wide = not column.number and max(map(len, texts), default=0) >= _WIDE
    return f"{_CELL};text-align:{'right' if column.number else 'left'};{'overflow-wrap:anywhere;min-width:11em' if wide else 'white-space:nowrap'}"


def plain(x: object) -> Any:
    """A value as JSON knows them: dataclasses as dictionaries, tables as lists, tuples as lists, other objects as text, as are "inf" and "nan"."""
    if isinstance(x, Table):
        return x.data()
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {f.name: plain(getattr(x, f.name)) for f in dataclasses.fields(x)}
    if isinstance(x, dict):
        return {str(k): plain(v) for k, v in x.items()}
    if isinstance(x, (list, tuple, set, frozenset)):
        return [plain(v) for v in x]
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    return x if x is None or isinstance(x, (bool, int, float, str)) else str(x)


def write(path: str | os.PathLike[str], text: str) -> pathlib.Path:
    """Write a text file whole or not at all; its path. Folders that are missing are made."""
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    number, draft = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(draft, 0o666 & ~_umask())
        os.replace(draft, target)
    except BaseException:
        os.unlink(draft)
        raise
    return target


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
