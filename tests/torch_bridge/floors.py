"""Who imports whom inside a package: read from the source, imports inside functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple


class Import(NamedTuple):
    """A line of `importer` that imports `imported`, both dotted below the package ("" is its `__init__`)."""

    importer: str
    imported: str
    line: int


def modules(sources: Mapping[str, str]) -> dict[str, str]:
    """Dotted names below the package, and the source. sources: by path below it, as `runtime/executor.py`."""
    return {path.removesuffix(".py").replace("/", ".").removesuffix("__init__").removesuffix("."): text for path, text in sources.items()}


def read(package: Path) -> dict[str, str]:
    """The sources of a package, by path below it."""
    return {file.relative_to(package).as_posix(): file.read_text() for file in sorted(package.rglob("*.py"))}


def imports(name: str, sources: Mapping[str, str]) -> list[Import]:
    """All imports of the package called `name` within itself, but those for type checkers only."""
    known = modules(sources)
    return [Import(module, imported, line) for module, text in known.items() for imported, line in _imported(name, text, known)]


def _imported(name: str, text: str, known: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    tree = ast.parse(text)
    typing_only = {inner for node in ast.walk(tree) if _is_typing(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == name:
            below = (node.module or "").partition(".")[2]
            for alias in node.names:
                full = f"{below}.{alias.name}" if below else alias.name
                yield (full if full in known else below), node.lineno
        elif isinstance(node, ast.Import):
            yield from ((a.name.partition(".")[2], node.lineno) for a in node.names if a.name.partition(".")[0] == name and "." in a.name)


def _is_typing(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def circles(found: list[Import]) -> list[list[str]]:
    """Files that import each other, directly or through others: the strongly connected components of more than one file, largest first."""
    below: dict[str, set[str]] = {}
    for one in found:
        below.setdefault(one.importer, set()).add(one.imported)
    reached = {module: _reach(module, below) for module in below}
    groups = {frozenset(m for m in reached[module] if module in reached.get(m, ())) | {module} for module in below}
    return sorted((sorted(group) for group in groups if len(group) > 1), key=lambda group: (-len(group), group))


def _reach(start: str, below: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = list(below.get(start, ()))
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting.extend(below.get(module, ()))
    return reached
