"""Few arguments are `Any`: a class, a protocol, an alias, or `object` for what may really be anything, says more to readers and to mypy."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch_bridge", "nxd_jax")
MOST = 12
"""Per cent of all annotated arguments that may be `Any`. Lower it when they are fewer."""


class Count(NamedTuple):
    """Arguments of functions that have an annotation, and those that are `Any` or a union with it."""

    annotated: int
    any: int


def annotations(source: str) -> Iterator[ast.expr]:
    """Of all arguments, `*args` and `**kwargs` too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node.annotation


def is_any(annotation: ast.expr) -> bool:
    """`Any`, or a union that it is part of; not `list[Any]`."""
    if isinstance(annotation, ast.BinOp):
        return is_any(annotation.left) or is_any(annotation.right)
    return isinstance(annotation, ast.Name) and annotation.id == "Any"


def count(source: str) -> Count:
    found = [is_any(a) for a in annotations(source)]
    return Count(len(found), sum(found))


def test_few_arguments_are_any() -> None:
    counts = {path.relative_to(ROOT).as_posix(): count(path.read_text()) for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    annotated, untyped = (sum(column) for column in zip(*counts.values(), strict=True))
    most = sorted(counts, key=lambda file: counts[file].any, reverse=True)[:10]
    shown = ", ".join(f"{file} ({counts[file].any})" for file in most)
    assert 100 * untyped <= MOST * annotated, (
        f"{untyped} of {annotated} annotated arguments are Any, {100 * untyped / annotated:.1f} %, and at most {MOST} % may be. Say what they are "
        f"(torch_bridge/lowerings/types.py has names for arrays and numbers, `GroupLike` for groups, `object` is for what may be anything). Most are in {shown}"
    )


SOURCE = """
def f(self, a: Any, b: int | Any, c: list[Any], *args: Any, d: Any | None = None, **kwargs: object) -> Any:
    x: Any = lambda y: y
    async def g(p: Callable[[Any], Any], q: str, r): ...
"""


def test_the_count_knows_any_from_other_types() -> None:
    assert count(SOURCE) == Count(annotated=8, any=4)
    assert count("x: Any = 1") == Count(0, 0)
