"""HLO as text whose lines know which module, line and aten op they come from."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import NamedTuple

from nxd_jax.inspect.equations import phase
from nxd_jax.inspect.tables import Column, Table, write
from torch_bridge.ir import scopes

OP_NAME = re.compile(r'op_name="([^"]*)"')
_LOC_USE = re.compile(r"loc\((#loc\d*|\"[^\"]*\"[^)]*\)?)\)\s*$")
_LOC_DEF = re.compile(r"^(#loc\d*) = loc\((.*)\)\s*$")
_LOC_NAME = re.compile(r'^"([^"]*)"')
_LOC_REF = re.compile(r"#loc\d*")


@dataclass(frozen=True)
class HloLine:
    """A line of HLO. number: counts from 1. text: without its metadata. module, line, op: where it comes from; phase: "forward", "backward", "outside" modules,
    or "" for a line that no op asked for."""

    number: int
    text: str
    module: str
    line: str
    op: str
    phase: str


class HloText:
    """A program in HLO. `print` and `str` give the whole text; `find` its lines by where they come from; notebooks fold it and search in it.

    stage: "stablehlo" (what is given to the compiler) or "optimized" (what the compiler made of it). note: what to know about it, or ''.
    """

    def __init__(self, text: str, stage: str, note: str = ""):
        self.text = text
        self.stage = stage
        self.note = note

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        note = f"; {self.note}" if self.note else ""
        return f"HloText({self.stage}, {len(self.text.splitlines())} lines; print() shows them, .find(module=...) some of them{note})"

    def __len__(self) -> int:
        return len(self.text)

    @cached_property
    def lines(self) -> tuple[HloLine, ...]:
        """Every line of the program (definitions of locations are left out)."""
        return tuple(_of_stablehlo(self.text) if self.stage == "stablehlo" else _of_optimized(self.text))

    def find(self, module: str | None = None, op: str | None = None, text: str | None = None, most: int | None = 40) -> Table[HloLine]:
        """The lines of a module and those inside it ("layers.0"; also "layers.*"), of an aten op ("aten.mm"), or that contain a text.

        All that is given must hold. A layer that is compiled as one round of a loop has a star in place of its number; asking for a number finds it too. Raises
        ValueError if no line comes from such a module.
        """
        found = [h for h in self.lines if (op is None or op in h.op) and (text is None or text in h.text)]
        if module is not None:
            if not any(_within(h.module, module) for h in self.lines):
                known = ", ".join(m for m in self.modules() if m.count(".") < 2)
                raise ValueError(f"no line of this program comes from module {module!r}; there are {known or 'no modules'}")
            found = [h for h in found if _within(h.module, module)]
        return Table(f"{len(found)} of {len(self.lines)} lines", found, _COLUMNS, self.note, most)

    def modules(self) -> list[str]:
        """The modules that lines come from, in the order in which they come."""
        return list(dict.fromkeys(h.module for h in self.lines if h.module))

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write the text to a file; its path."""
        return write(path, self.text)

    def _repr_html_(self) -> str:
        return self.html()

    def html(self, most: int = 2000) -> str:
        """The text as a folded box with a search field, at most that many lines."""
        lines = self.lines[:most]
        left = len(self.lines) - len(lines)
        body = "".join(
            f'<div data-nxd="{escape((h.module + " " + h.op + " " + h.text).lower(), quote=True)}">'
            f'<span style="color:#8a94a0">{h.number:5d}</span> {escape(h.text)}'
            f'<span style="color:#0969da">{escape("  " + " ".join(x for x in (h.module, h.line, h.op) if x) if h.module or h.line else "")}</span></div>'
            for h in lines
        )
        more = f"<div>... and {left} more lines (print, or .save(path))</div>" if left else ""
        search = (
            '<input placeholder="module, op or text" style="margin:6px 0;width:22em" oninput="const q=this.value.toLowerCase();'
            "for(const d of this.parentNode.querySelectorAll('[data-nxd]'))d.style.display=d.dataset.nxd.includes(q)?'':'none'\">"
        )
        return (
            f'<details class="nxd-hlo"><summary style="font:13px system-ui,sans-serif;cursor:pointer"><b>{self.stage}</b>, {len(self.lines)} lines</summary>'
            f'{f"<div>{escape(self.note)}</div>" if self.note else ""}{search}<pre style="{_PRE}">{body}{more}</pre></details>'
        )


_PRE = "font-size:11px;line-height:1.35;max-height:36em;overflow:auto;background:#f6f8fa;color:#1b1f24;padding:8px"
_COLUMNS = (
    Column("", "number", number=True),
    Column("line", lambda h: h.text.strip()),
    Column("module", "module"),
    Column("at", "line"),
    Column("op", "op"),
    Column("phase", "phase"),
)


def _within(module: str, wanted: str) -> bool:
    """Whether a module is `wanted` or inside it; a star stands for any number, on either side."""
    ours, theirs = module.split("."), wanted.split(".")
    return len(ours) >= len(theirs) and all(
        a == b or ("*" in (a, b) and (a + b).strip("*").isdigit()) for a, b in zip(ours, theirs, strict=False)
    )


def _of_optimized(text: str) -> Iterator[HloLine]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            name = OP_NAME.search(line)
            bare = re.sub(r",? metadata=\{[^{}]*\}", "", line)
            yield HloLine(number, bare.rstrip(), *place(scopes.unescaped(name[1]) if name else ""))


def _of_stablehlo(text: str) -> Iterator[HloLine]:
    found = _parsed(text.splitlines())
    callers: dict[str, list[_Parsed]] = {}
    for at in found:
        for name in _CALL.findall(at.text):
            callers.setdefault(name, []).append(at)
    places: dict[str, _Place] = {}

    def of_function(name: str) -> _Place:
        if name not in places:
            places[name] = _NOWHERE  # of one that calls itself
            places[name] = _common([of(at) for at in callers.get(name, ())])
        return places[name]

    def of(at: _Parsed) -> _Place:
        return place(at.name) if scopes.read(at.name) != scopes.NONE or not at.function else of_function(at.function)

    for at in found:
        yield HloLine(at.number, at.text.rstrip(), *(_NOWHERE if _FUNCTION.match(at.text) else of(at)))


_Place = tuple[str, str, str, str]
"""Module, line, op, phase."""
_NOWHERE: _Place = ("", "", "", "")
_FUNCTION = re.compile(r"\s*func\.func \w+ @([\w.$-]+)\(")
_CALL = re.compile(r"\bcall @([\w.$-]+)\(")


class _Parsed(NamedTuple):
    """A line of StableHLO: its number, its text without the location, the name of its location, and the function that it is in."""

    number: int
    text: str
    name: str
    function: str


def _parsed(lines: list[str]) -> list[_Parsed]:
    """The lines that are no locations. An op with a region has the location that stands where the region ends."""
    resolved = _Locations(lines)
    found: list[_Parsed] = []
    opened: list[int] = []
    function = ""
    for number, line in enumerate(lines, 1):
        if not line.strip() or _LOC_DEF.match(line):
            continue
        use = _LOC_USE.search(line)
        name = resolved(use[1]) if use else ""
        bare = line[: use.start()] if use else line
        declared = _FUNCTION.match(line)
        function = declared[1] if declared else function
        start = opened.pop() if bare.lstrip().startswith("}") and opened else None
        if start is not None and _FUNCTION.match(found[start].text):
            name = ""  # that of whoever called it first
        elif start is not None and use and not found[start].name:
            found[start] = found[start]._replace(name=name)
        if line.rstrip().endswith("{"):
            opened.append(len(found) if start is None else start)
        found.append(_Parsed(number, bare.rstrip(), name, function))
    return found


class _Locations:
    """What the locations at the end of a module's text are called: the nearest name that is a scope."""

    def __init__(self, lines: list[str]):
        self._table = {found[1]: found[2] for found in map(_LOC_DEF.match, lines) if found}
        self._names: dict[str, str] = {}

    def __call__(self, loc: str) -> str:
        if loc not in self._names:
            body = self._table.get(loc, loc)
            self._names[loc] = ""  # a location that refers to itself
            inner = _LOC_NAME.match(body)
            own = scopes.unescaped(inner[1]) if inner else ""
            if scopes.read(own) != scopes.NONE:
                self._names[loc] = own
            else:
                within = (n for ref in _LOC_REF.findall(body) if ref != loc and (n := self(ref)))
                self._names[loc] = next(within, own)
        return self._names[loc]


def _common(places: list[_Place]) -> _Place:
    """What places have in common: a function that several modules call is no one module's."""
    module, line, op, phase = (values[0] if len(set(values)) == 1 else "" for values in zip(*places, strict=True)) if places else _NOWHERE
    return module, line, op, phase


def place(name: str) -> _Place:
    """Module, line, op and phase of an instruction with this `op_name`; empty where it says nothing."""
    scope = scopes.read(name)
    return scope.module, scope.line, scope.op, phase(scope) if scope != scopes.NONE else ""
