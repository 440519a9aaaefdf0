"""Where in a YAML file each key stands: line and column, keys that stand twice, and the place of a syntax error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Place:
    """A line and a column, both from 1."""

    line: int
    column: int


@dataclass
class Positions:
    """keys: by dotted path. doubles: (path, place, place of the first one). error: what is wrong with the syntax, and where. clean: the file without doubles
    (of several values the last), None if there are none."""

    keys: dict[str, Place] = field(default_factory=dict)
    doubles: list[tuple[str, Place, Place]] = field(default_factory=list)
    error: tuple[str, Place | None] | None = None
    clean: str | None = None

    def of(self, key: str) -> Place | None:
        """The place of a key; of a key that is not in the file, that of the section it belongs to."""
        while key:
            if key in self.keys:
                return self.keys[key]
            key = key.rpartition(".")[0]
        return None


def read(path: str | os.PathLike[str]) -> Positions:
    """The positions in a file that is there."""
    found = Positions()
    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        found.error = f"it is no text in UTF-8 ({error.reason} at byte {error.start})", None
        return found
    except yaml.YAMLError as error:
        found.error = _said(error)
        return found
    if not isinstance(root, yaml.MappingNode):
        found.error = "it must hold keys with values, such as `name: hf_llama`", _place(root)
        return found
    for key, place in _walk(root, ""):
        if key in found.keys:
            found.doubles.append((key, place, found.keys[key]))
        else:
            found.keys[key] = place
    if found.doubles:
        _drop_doubles(root)
        found.clean = yaml.serialize(root, Dumper=yaml.SafeDumper)
    return found


def _walk(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, Place]]:
    for key, value in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        path = f"{prefix}{key.value}"
        place = _place(key)
        assert place is not None
        yield path, place
        if isinstance(value, yaml.MappingNode):
            yield from _walk(value, f"{path}.")


def _drop_doubles(node: yaml.MappingNode) -> None:
    last = {key.value: value for key, value in node.value}
    kept, seen = [], set()
    for key, _ in node.value:
        if key.value not in seen:
            seen.add(key.value)
            kept.append((key, last[key.value]))
    node.value = kept
    for _, value in kept:
        if isinstance(value, yaml.MappingNode):
            _drop_doubles(value)


def _place(node: yaml.Node | None) -> Place | None:
    return None if node is None else Place(node.start_mark.line + 1, node.start_mark.column + 1)


def _said(error: yaml.YAMLError) -> tuple[str, Place | None]:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = None if mark is None else Place(mark.line + 1, mark.column + 1)
    texts = [str(t) for t in (getattr(error, "context", None), getattr(error, "problem", None)) if t]
    return ", ".join(texts) or str(error).splitlines()[0], place
