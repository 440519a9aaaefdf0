"""What the constructor of a class takes, with what it only passes on to those of its bases."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any


def parameters(made_by: Any) -> Iterator[Mapping[str, inspect.Parameter]]:
    """The parameters of a class's constructor and, as long as keywords are passed on, of the next one of its bases; of a function, its own."""
    found = [vars(c)["__init__"] for c in made_by.__mro__ if "__init__" in vars(c)] if inspect.isclass(made_by) else [made_by]
    for constructor in found:
        taken = inspect.signature(constructor).parameters
        yield taken
        if not passes_on(taken):
            return


def passes_on(taken: Mapping[str, inspect.Parameter]) -> bool:
    """Whether keywords that have no parameter of their name are taken."""
    return any(p.kind is p.VAR_KEYWORD for p in taken.values())
