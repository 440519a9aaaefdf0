"""Which pipeline rank is to have which tensor, by its name alone: for writing NxD's files without a model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

_LAYER = re.compile(r"(?P<stack>.*?)\.(?P<number>\d+)\..+")
_FIRST = re.compile(r"(.*[._])?(embed\w*|wte|wpe)(\..*)?")
_LAST = re.compile(r"(.*[._])?(norm|final_norm|final_layer_?norm|ln_f|lm_head|head|score|classifier)(\..*)?")

Stages = Sequence[tuple[re.Pattern[str], str]]
"""The stage of names that a pattern fits: its number, "first" or "last"; the first pattern that fits counts."""


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The pipeline to write files for. ranks: its size; chunks: stages on each rank (virtual_pipeline_size); stages: rules for names.

    Layers (`model.layers.7.`) are shared out evenly, one more to the last stages if they do not come out even; embeddings go to the first stage, the last norm
    and the head to the last. Stage s is with rank s modulo `ranks`.
    """

    ranks: int = 1
    chunks: int = 1
    stages: Stages = ()

    def by_rank(self, names: Sequence[str]) -> list[list[str]]:
        """The names of each rank, stage by stage. Raises ValueError for names whose stage is not known, and for fewer layers than stages."""
        count = self.ranks * self.chunks
        if count == 1:
            return [list(names)]
        layers = _Layers(names, count)
        found: list[list[str]] = [[] for _ in range(count)]
        unknown = []
        for name in names:
            stage = self._stage(name, layers, count)
            if stage is None:
                unknown.append(name)
            else:
                found[stage].append(name)
        if unknown:
            shown = ", ".join(unknown[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
            raise ValueError(
                f"which of {count} stages has {shown} is not known: give rules such as --stage '.*rotary.*=first', with first, last or a number from 0"
            )
        ordered = [sorted(own, key=layers.place) for own in found]
        return [[name for own in ordered[rank :: self.ranks] for name in own] for rank in range(self.ranks)]

    def _stage(self, name: str, layers: _Layers, count: int) -> int | None:
        for pattern, stage in self.stages:
            if pattern.fullmatch(name):
                return _number(stage, count, name)
        number = layers.number(name)
        if number is not None:
            return layers.stage(number)
        if _FIRST.fullmatch(name):
            return 0
        return count - 1 if _LAST.fullmatch(name) else None


def _number(stage: str, count: int, name: str) -> int:
    found = {"first": 0, "last": count - 1}.get(stage)
    found = int(stage) if found is None else found
    if found >= count:
        raise ValueError(f"--stage puts {name} into stage {found}, and there are {count} stages, from 0 to {count - 1}")
    return found


class _Layers:
    """The numbered layers among names."""

    def __init__(self, names: Sequence[str], count: int):
        self._stack = ""
        numbers: dict[str, set[int]] = {}
        for match in (m for name in names if (m := _LAYER.fullmatch(name))):
            numbers.setdefault(match["stack"], set()).add(int(match["number"]))
        stacks = [stack for stack, found in numbers.items() if len(found) >= count]
        if len(stacks) != 1:
            shown = ", ".join(f"{stack} ({len(found)})" for stack, found in numbers.items()) or "none"
            raise ValueError(
                f"{count} stages need one list of at least {count} numbered layers, such as model.layers.0; the checkpoint has: {shown}. Lower --pp or --vpp"
            )
        self._stack = stacks[0]
        self._numbers = {number: k for k, number in enumerate(sorted(numbers[self._stack]))}
        size, more = divmod(len(self._numbers), count)
        sizes = [size + (stage >= count - more) for stage in range(count)]
        self._stages = [stage for stage, own in enumerate(sizes) for _ in range(own)]

    def number(self, name: str) -> int | None:
        """Of the layer that a tensor is in."""
        match = _LAYER.fullmatch(name)
        return int(match["number"]) if match and match["stack"] == self._stack else None

    def stage(self, number: int) -> int:
        """Of a layer."""
        return self._stages[self._numbers[number]]

    def place(self, name: str) -> tuple[int, int]:
        """Where a tensor comes on its stage: before the layers, in one, or after them."""
        number = self.number(name)
        return (1, number) if number is not None else (0 if _FIRST.fullmatch(name) else 2, 0)


def parse(texts: Iterable[str]) -> Stages:
    """Rules such as `.*rotary.*=first`, `.*head.*=last`, `vision.*=0`. Raises ValueError."""
    found = []
    for text in texts:
        pattern, equals, stage = text.rpartition("=")
        if not equals or not re.fullmatch(r"first|last|\d+", stage):
            raise ValueError(
                f"a rule for stages is NAMES=first, NAMES=last or NAMES=NUMBER, with a regular expression for whole names, got {text!r}"
            )
        try:
            found.append((re.compile(pattern), stage))
        except re.error as error:
            raise ValueError(f"{pattern!r} in the rule {text!r} is no regular expression: {error}") from None
    return found
