"""Who imports whom inside a package: read from the source, imports inside functions and `import_module("...")` included."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
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
    return [Import(module, imported, line) for module, text in known.items() for imported, line in _imported(name, module, text, known)]


def _imported(name: str, module: str, text: str, known: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    tree = ast.parse(text)
    every = list(ast.walk(tree))
    typing_only = {inner for node in every if _is_typing(node) for inner in ast.walk(node)}
    for node in every:
        if node in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == name:
            below = (node.module or "").partition(".")[2]
            for alias in node.names:
                full = f"{below}.{alias.name}" if below else alias.name
                yield (full if full in known else below), node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise ValueError(f"{module} (line {node.lineno}): write relative imports as absolute ones, only those are read")
        elif isinstance(node, ast.Import):
            yield from ((a.name.partition(".")[2], node.lineno) for a in node.names if a.name.partition(".")[0] == name and "." in a.name)
        elif isinstance(node, ast.Call) and _imports_by_name(node):
            found = _said(node.args[0], module, name)
            if found is not None and found.partition(".")[0] == name and "." in found:
                yield _known(found.partition(".")[2], known), node.lineno


def unread(name: str, sources: Mapping[str, str]) -> list[str]:
    """Modules that call `import_module` with what is neither a string nor below themselves (`f"{__name__}.{x}"`): who reads the source cannot tell what they
    import."""
    found = []
    for module, text in modules(sources).items():
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and _imports_by_name(node)]
        if any(_said(call.args[0], module, name) is None for call in calls):
            found.append(module)
    return found


def _imports_by_name(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""
    return name in ("import_module", "__import__") and bool(call.args)


def _said(value: ast.expr, module: str, name: str) -> str | None:
    """The full name that `import_module` gets: a string, or one that begins with `{__name__}.`, as far as it can be read. None if it cannot."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    first = value.values[0] if isinstance(value, ast.JoinedStr) else None
    if not isinstance(value, ast.JoinedStr) or not isinstance(first, ast.FormattedValue) or ast.unparse(first.value) != "__name__":
        return None
    rest = "".join(part.value for part in value.values[1:2] if isinstance(part, ast.Constant))
    return f"{name}.{module}".rstrip(".") + rest.rstrip(".")


def _known(below: str, known: Mapping[str, str]) -> str:
    """The module, or the one that a name is in."""
    while below and below not in known:
        below = below.rpartition(".")[0]
    return below


def _is_typing(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def upward(found: Sequence[Import], order: Sequence[str], top: Sequence[str] = ()) -> list[str]:
    """Imports of something on a higher floor, as lines for people.

    order: packages and files at the root, from the ground up. Below it is what it does not name, above it are `top` and the package's `__init__`.
    """
    return [
        f"{one.importer} (line {one.line}) imports {one.imported}"
        for one in found
        if one.imported != one.importer and _floor(one.imported, order, top) > _floor(one.importer, order, top)
    ]


def _floor(module: str, order: Sequence[str], top: Sequence[str]) -> int:
    head = module.partition(".")[0]
    if not head or head in top:
        return len(order) + 1
    return order.index(head) + 1 if head in order else 0


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
