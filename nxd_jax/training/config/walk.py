"""A configuration against the tables of keys: unknown ones, those of another section, those that nothing reads, values of a wrong kind."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from nxd_jax.training.config.keys import LOOSE, ROOT, STRICT, Key
from nxd_jax.training.config.keys.model import FROM_JSON, REJECTED
from nxd_jax.training.config.problems import Problems
from nxd_jax.training.utils.utils import value_at

_HYDRA = ("hydra", "defaults")


class Walk:
    """Goes through `values`. source: the model_source. custom: whether classes of the user's read `data` and `model`. bad: paths of values that are wrong."""

    def __init__(self, values: Mapping[str, Any], problems: Problems, source: Any, custom: bool):
        self.values = values
        self.problems = problems
        self.source = source
        self.custom = custom
        self.bad: set[str] = set()
        self.unread: list[tuple[str, str]] = []

    def go(self) -> Walk:
        """Check all; returns itself."""
        self._section(self.values, ROOT, "")
        return self

    def _section(self, values: Mapping[str, Any], table: Key, prefix: str) -> None:
        inside = table.inside or {}
        for name, value in values.items():
            path = f"{prefix}{name}"
            if name in inside:
                self._known(path, inside[name], value)
            elif not table.opened:
                self._unknown(name, path, value, inside)
        for name, key in inside.items():
            if key.required and name not in values and not (self.custom and prefix in ("data.", "model.")):
                self.problems.error(f"{prefix}{name}", f"is missing; it is {key.wanted}")

    def _known(self, path: str, key: Key, value: Any) -> None:
        wrong = key.wrong(value)
        if wrong and value is None and any(p.key == path for p in self.problems.of("error")):
            self.bad.add(path)  # an interpolation that leads nowhere, which has been said
            return
        if wrong:
            self.problems.error(path, wrong)
            self.bad.add(path)
            return
        if key.only and key.only != self.source and not self.custom:
            self._of_another_model(path, key, value)
        elif key.unread:
            self.unread.append((path, key.unread))
        if key.inside is not None and isinstance(value, Mapping):
            self._section(value, key, f"{path}.")

    def _of_another_model(self, path: str, key: Key, value: Any) -> None:
        name = path.rpartition(".")[2]
        if path.startswith("model.") and name in FROM_JSON:
            return  # rules.model compares it with config.json
        self.unread.append((path, f"read for model_source: {key.only} only"))

    def _unknown(self, name: str, path: str, value: Any, inside: Mapping[str, Key]) -> None:
        section = path.rpartition(".")[0]
        if (not section and name in _HYDRA) or (section == "model" and name in REJECTED) or (section == "model" and name in FROM_JSON):
            return
        if name in LOOSE:
            self._loose(name, path, value)
            return
        elsewhere = [p for p in _paths(ROOT, "") if p.rpartition(".")[2] == name]
        if elsewhere:
            self._misplaced(name, path, elsewhere)
            return
        near = difflib.get_close_matches(name, inside, 1, cutoff=0.75)
        if self.custom and section.partition(".")[0] in ("data", "model") and not near:
            return
        if near:
            self.problems.error(path, f"is no key of {_named(section)}; did you mean {near[0]}?")
        elif section in STRICT or section.partition(".")[0] in STRICT:
            self.problems.error(path, f"is no key of {_named(section)}{_all(inside)}")
        else:
            self.problems.warn(path, f"is no key of {_named(section)}, and nothing reads it{_all(inside)}")

    def _loose(self, name: str, path: str, value: Any) -> None:
        """A key that counts wherever it stands."""
        key = _find(ROOT, f"{LOOSE[name]}.{name}".lstrip("."))
        if key is not None:
            self._known(path, key, value)

    def _misplaced(self, name: str, path: str, elsewhere: list[str]) -> None:
        there = [p for p in elsewhere if value_at(self.values, p) is not None]
        if there:
            self.problems.warn(path, f"counts in {there[0]} only, which is {value_at(self.values, there[0])}: nothing reads it here")
        else:
            self.problems.error(path, f"counts as {' or '.join(elsewhere[:3])} only: move it there")


def nearest(path: str) -> str:
    """The key of the same section that is most like a path's; "" if none is."""
    section, _, name = path.rpartition(".")
    table = _find(ROOT, section) if section else ROOT
    inside = {} if table is None else table.inside or {}
    found = difflib.get_close_matches(name, inside, 1, cutoff=0.75)
    return f"{section}.{found[0]}".lstrip(".") if found else ""


def _named(section: str) -> str:
    return section or "a configuration"


def _all(inside: Mapping[str, Key]) -> str:
    return f"; there are {', '.join(inside)}" if len(inside) <= 12 else ""


def _paths(key: Key, prefix: str) -> Iterator[str]:
    for name, found in (key.inside or {}).items():
        yield f"{prefix}{name}"
        yield from _paths(found, f"{prefix}{name}.")


def _find(key: Key, path: str) -> Key | None:
    found: Key | None = key
    for name in path.split("."):
        found = None if found is None else (found.inside or {}).get(name)
    return found
