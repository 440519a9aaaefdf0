"""What a table of keys says of each key."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

_SPELLED = re.compile(r"[\w.+-]+")

NAMES = {
    "bool": "True or False",
    "int": "a whole number",
    "float": "a number",
    "real": "a number, without quotes",
    "str": "text",
    "list": "a list",
    "dict": "keys with values",
}


@dataclass(frozen=True)
class Key:
    """A key of a YAML file.

    kinds: of its value, of `NAMES`; (): anything. null: whether it may be null. values: the allowed ones, (): all. low: the least number. required: whether
    it must be there. unread: what the key means to the original; set if nothing here reads it. only: the model_source that reads it, "": all. inside: the keys
    of a section. opened: a section that may have keys that the table does not name.
    """

    kinds: tuple[str, ...] = ()
    null: bool = True
    values: tuple[Any, ...] = ()
    low: float | None = None
    required: bool = False
    unread: str = ""
    only: str = ""
    inside: Mapping[str, Key] | None = None
    opened: bool = False

    def wrong(self, value: Any) -> str:
        """What is wrong with a value; "" if nothing is."""
        if value is None:
            return "" if self.null else f"must not be null; it is {self.wanted}"
        if self.values and not isinstance(value, (list, dict)):
            if any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in self.values):
                return ""
            return f"{value!r} must be {self.wanted}"
        if self.kinds and not any(_is(kind, value) for kind in self.kinds):
            return f"{value!r} must be {self.wanted}" + self._unquoted(value)
        if self.low is not None and _is("float", value) and float(value) < self.low:
            return f"{value!r} must be at least {self.low:g}"
        return ""

    def _unquoted(self, value: Any) -> str:
        """How a text becomes the number, bool or list that it spells; "" if it spells nothing that is allowed."""
        spelled = yaml.safe_load(value) if isinstance(value, str) and _SPELLED.fullmatch(value) else value
        if isinstance(spelled, str) or not any(_is(kind, spelled) for kind in self.kinds):
            return ""
        return f": it is text, so write {value} without quotes, or ${{oc.decode:...}} around an interpolation that gives text, such as ${{oc.env:NAME}}"

    @property
    def wanted(self) -> str:
        """The values that are allowed, in words."""
        if self.values:
            found = "one of " + ", ".join(str(v) for v in self.values) if len(self.values) > 1 else str(self.values[0])
        else:
            found = " or ".join(NAMES[kind] for kind in self.kinds) or "anything"
        return found + (" or null" if self.null else "")


def _is(kind: str, value: Any) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "real":
        return _is("float", value) and not isinstance(value, str)
    if kind == "float":
        return _is("int", value) or (isinstance(value, float) and not math.isnan(value)) or (isinstance(value, str) and _numeric(value))
    types: dict[str, tuple[type, ...]] = {"str": (str,), "list": (list, tuple), "dict": (dict,)}
    return isinstance(value, types[kind])


def _numeric(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def whole(low: float | None = None, **options: Any) -> Key:
    """A whole number."""
    return Key(("int",), low=low, **options)


def number(low: float | None = None, **options: Any) -> Key:
    """A number."""
    return Key(("float",), low=low, **options)


def real(low: float | None = None, **options: Any) -> Key:
    """A number that is no text, for what takes values as they are."""
    return Key(("real",), low=low, **options)


def switch(**options: Any) -> Key:
    """True or False."""
    return Key(("bool",), **options)


def text(*values: Any, **options: Any) -> Key:
    """Text, of some values only if there are some."""
    return Key(("str",), values=values, **options)


def listing(**options: Any) -> Key:
    """A list."""
    return Key(("list",), **options)


def anything(**options: Any) -> Key:
    """A value of any kind."""
    return Key(**options)


def section(inside: Mapping[str, Key], **options: Any) -> Key:
    """A section with keys."""
    return Key(("dict",), inside=inside, **options)


def options_of(what: str = "") -> Key:
    """A section with any keys, that go to something as they are."""
    return Key(("dict",), inside={}, opened=True, unread=what)
