"""The instructions of a compiled program, read from its optimised HLO text: what each is, and the module, line and aten op that it came from."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from torch_bridge.ir import scopes

CONTAINERS = ("while", "conditional", "call")
"""Instructions that are events themselves and run others, which are events too."""

_MODULE = re.compile(r"HloModule ([\w.\-]+)")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_NUMBER = re.compile(r"\.\d+$")
_FREE = frozenset(["bitcast", "broadcast", "constant", "get-tuple-element", "iota", "parameter", "reshape", "tuple"])
"""Opcodes that do not say what a fusion is for: they come along with any."""


@dataclass(frozen=True)
class Instruction:
    """One instruction. opcode: HLO's; module: dotted path, '*' for the number of a layer in a loop; line: 'file.py:12'; op: the aten op, or what JAX or XLA
    call it; phase: "forward", "backward", "optimizer", "other" (outside modules), "compiler" (what no recorded
    op asked for) or "foreign" (of a program that is not from recorded ops, or whose code is not known)."""

    opcode: str = ""
    module: str = ""
    line: str = ""
    op: str = ""
    phase: str = "compiler"

    @property
    def container(self) -> bool:
        """Whether it runs other instructions."""
        return self.opcode in CONTAINERS


class Code(NamedTuple):
    """An HLO module: its name, and its instructions by name."""

    name: str
    instructions: dict[str, Instruction]


class _Line(NamedTuple):
    name: str
    opcode: str
    op_name: str
    calls: str


class _Inner(NamedTuple):
    op_name: str
    opcode: str
    root: bool


def parse(text: str) -> Code:
    """Read HLO text. A fusion is what its root is; where nobody gave that a name, what most of its instructions are."""
    found = _MODULE.match(text)
    inside: dict[str, list[_Inner]] = {}
    lines: list[_Line] = []
    here: list[_Inner] = []
    for line in text.splitlines():
        matched = _INSTRUCTION.match(line)
        if matched is None:
            if line.endswith("{") and (header := _COMPUTATION.match(line)):
                here = inside.setdefault(header[1], [])
            continue
        rest = line[matched.end() - 1 :]
        opcode, named, calls = _OPCODE.search(rest), _OP_NAME.search(rest), _CALLS.search(rest)
        op_name = scopes.unescaped(named[1]) if named else ""
        kind = opcode[1] if opcode else ""
        here.append(_Inner(op_name, kind, bool(matched[1])))
        lines.append(_Line(matched[2], kind, op_name, calls[1] if calls else ""))
    return Code(found[1] if found else "", {x.name: _described(x, inside.get(x.calls, [])) for x in lines})


def _described(line: _Line, inside: list[_Inner]) -> Instruction:
    own = [line.op_name, *(x.op_name for x in inside if x.root)]
    scope = next((s for s in map(read_scope, own) if s.op), None)
    if scope is None:
        common = Counter(s for s in (read_scope(x.op_name) for x in inside if x.opcode not in _FREE) if s.op).most_common(1)
        scope = common[0][0] if common else scopes.NONE
    return Instruction(line.opcode, scope.module, scope.line, scope.op or _unnamed(line), _phase(scope))


def read_scope(op_name: str) -> scopes.Scope:
    """Module, line, aten op and direction from the metadata of an instruction; `scopes.NONE` if it has none."""
    return scopes.read(op_name) if op_name else scopes.NONE


def _phase(scope: scopes.Scope) -> str:
    if scope.backward:
        return "backward"
    if scope.module:
        return "forward"
    if "optimizer" in scope.op:
        return "optimizer"
    return "other" if scope.op else "compiler"


def _unnamed(line: _Line) -> str:
    """What to call something that no recorded op asked for: JAX's name, or HLO's."""
    last = _NUMBER.sub("", line.op_name.rpartition("/")[2])
    return f"({last if last and '(' not in last else line.opcode})"
