"""HLO as text whose lines know which module, line and aten op they come from."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from html import escape

from nxd_jax.inspect.equations import phase
from nxd_jax.inspect.tables import Column, Table, write
from torch_bridge import scopes

_OP_NAME = re.compile(r'op_name="([^"]*)"')
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

    stage: "stablehlo" (what is given to the compiler) or "optimized" (what the compiler made of it).
    """

    def __init__(self, text: str, stage: str):
        self.text = text
        self.stage = stage

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"HloText({self.stage}, {len(self.text.splitlines())} lines; print() shows them, .find(module=...) some of them)"

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
        return Table(f"{len(found)} of {len(self.lines)} lines", found, _COLUMNS, "", most)

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
            f'{search}<pre style="{_PRE}">{body}{more}</pre></details>'
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
            name = _OP_NAME.search(line)
            bare = re.sub(r",? metadata=\{[^{}]*\}", "", line)
            yield _line(number, bare, name[1] if name else "")


def _of_stablehlo(text: str) -> Iterator[HloLine]:
    table = {found[1]: found[2] for found in (_LOC_DEF.match(line) for line in text.splitlines()) if found}
    names: dict[str, str] = {}

    def resolved(loc: str) -> str:
        if loc not in names:
            body = table.get(loc, loc)
            names[loc] = ""  # a location that refers to itself
            inner = _LOC_NAME.match(body)
            if inner and scopes.read(inner[1]) != scopes.NONE:
                names[loc] = inner[1]
            else:
                names[loc] = next((n for ref in _LOC_REF.findall(body) if ref != loc and (n := resolved(ref))), inner[1] if inner else "")
        return names[loc]

    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or _LOC_DEF.match(line):
            continue
        use = _LOC_USE.search(line)
        yield _line(number, line[: use.start()].rstrip() if use else line, resolved(use[1]) if use else "")


def _line(number: int, text: str, name: str) -> HloLine:
    scope = scopes.read(name)
    return HloLine(number, text.rstrip(), scope.module, scope.line, scope.op, phase(scope) if scope != scopes.NONE else "")
