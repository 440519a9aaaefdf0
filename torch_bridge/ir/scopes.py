"""What an op is called in HLO metadata, and how to read such a name again: `backward(layers.0.mlp)/model.py:12/aten.mm/dot_general`.

A module whose path could be taken for another part (JAX calls its own "main" and "body") is written `module(main)`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch_bridge.source import Source

_LINE = re.compile(r":\d+$")
_BACKWARD = re.compile(r"backward\((.*)\)$")
_OP = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*(\.\w+)?$")
_OWN = ("aten.", "torch_bridge.", "prims.")


class Scope(NamedTuple):
    """A name, read. module: dotted path, with a star for the number of a layer in a loop (the class of the outermost module; '' outside modules); line:
    'file.py:12' or ''; op: the aten name; backward: whether autograd called it (module and line are then those of the forward op).
    """

    module: str = ""
    line: str = ""
    op: str = ""
    backward: bool = False


NONE = Scope()


def name(source: Source, op: Any) -> str:
    """The scope of an op that was called at `source`."""
    module = (source.module or source.module_class).replace("/", "_")
    if source.backward:
        parts = [f"backward({module})"]
    else:
        unclear = _JAX.match(module) or _LINE.search(module) or module.startswith(_OWN)
        parts = [f"module({module})" if unclear else module] if module else []
    if source.file:
        parts.append(source.where)
    parts.append(str(op).removesuffix(".default"))
    return "/".join(parts)


def read(text: str) -> Scope:
    """The scope within a longer name, such as XLA's `op_name` (`jit(f)/shard_map/layers.0/model.py:12/aten.mm/dot_general`); `NONE` if there is none."""
    parts = text.split("/")
    if text.endswith(")"):  # several instructions that XLA made one are "common/parts/(first/name:second/name)": it is what the first is
        parts = [part.removeprefix("(") for part in parts]
    for i, part in enumerate(parts):
        backward = _BACKWARD.match(part)
        if backward:
            rest = parts[i + 1 :]
            line = rest[0] if rest and _LINE.search(rest[0]) else ""
            after = rest[1 if line else 0 :]
            return Scope(backward[1], line, after[0] if after else "", True)
        if _LINE.search(part) and i + 1 < len(parts) and _OP.match(parts[i + 1]):
            return Scope(_module(parts[:i]), part, parts[i + 1])
        if part.startswith(_OWN) and _OP.match(part):
            return Scope(_module(parts[:i]), "", part)
    return NONE


def unescaped(text: str) -> str:
    """A name as it is written in HLO's text ("it\\'s \\303\\251.py") or in StableHLO's ("\\C3\\A9.py")."""
    if "\\" not in text:
        return text
    return _ESCAPED.sub(_character, text.encode()).decode(errors="replace")


_ESCAPED = re.compile(rb"\\(?:([0-3][0-7]{2})|([0-9A-F]{2})|(.))", re.DOTALL)


def _character(found: re.Match[bytes]) -> bytes:
    octal, hexadecimal, other = found.groups()
    return other or bytes([int(octal, 8) if octal else int(hexadecimal, 16)])


_JAX = re.compile(
    r"\w+\(.*\)$|shard_map$|while$|body$|cond$|closed_call$|branch_\d+_fun$|checkpoint$|remat\d?$|core_call$|scan$|pjit$|xla_call$|main$"
)
"""Parts of names that JAX adds."""
_MODULE = re.compile(r"module\((.*)\)$")


def _module(before: list[str]) -> str:
    if not before:
        return ""
    marked = _MODULE.match(before[-1])
    if marked:
        return marked[1]
    return "" if _JAX.match(before[-1]) else before[-1]
