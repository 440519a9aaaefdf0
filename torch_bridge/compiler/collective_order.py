"""In which order a compiled program exchanges values with other processes.

XLA orders collectives by when their inputs are there, and joins small ones. So two programs with the same collectives may exchange them in another order, and
values would be mixed up: processes that run different programs together compare what was compiled.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

_COLLECTIVE = re.compile(
    r"= (?P<type>.*?) (?P<op>(?:all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast)(?:-start)?)\("
)
_WHERE = re.compile(r"(?:channel_id|replica_groups|source_target_pairs|dimensions)=[^ ]*")
_SHAPE = re.compile(r"\w+\[[\d,]*\]")
_METADATA = re.compile(r", metadata=\{[^}]*\}")


def word(what: str, compiled: Any) -> str:
    """Stands for the collectives of a program: equal words, equal exchanges. what: stands for those that were recorded. compiled: the executable; None if it is
    not to run (`neuron_parallel_compile`)."""
    text = "" if compiled is None else compiled.as_text() or ""
    found = [(m["op"], m["type"], *_WHERE.findall(line)) for line in text.splitlines() if (m := _COLLECTIVE.search(line)) is not None]
    told = repr(found) if found and not any(_may_be_swapped(m[1]) for m in found) else _METADATA.sub("", text)
    return f"{what} {hashlib.blake2b(told.encode(), digest_size=6).hexdigest()}"


def _may_be_swapped(kind: str) -> bool:
    """Whether a collective has several values of one shape, whose order it does not show: only equal programs are known to fit."""
    shapes = _SHAPE.findall(kind)
    return len(set(shapes)) < len(shapes)
