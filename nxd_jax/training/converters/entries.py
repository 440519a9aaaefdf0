"""What tensor of NxD Training is made of which of Hugging Face's: a plan of a whole model, one entry for each of NxD Training's tensors."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence

import torch

from nxd_jax.checkpoint import reading
from nxd_jax.checkpoint.joining import Rules, Split
from nxd_jax.checkpoint.name_maps import Made, NameMap

Shape = tuple[int | None, ...]
"""None: a size that the configuration does not say."""

FIRST, LAST = "first", "last"
COMPUTED = (".rotary_emb.inv_freq",)
"""Endings of tensors that follow from the configuration, which older files hold."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor of NxD Training.

    ours: its name. theirs: the tensors of Hugging Face's that it holds; shapes: theirs. split: how ranks share it out. stage: the number of its layer, "first"
    or "last". pack: from the values of `theirs` to it (None: the only one as it is); take: from it and k to the kth of `theirs` (None: as it is).
    """

    ours: str
    theirs: tuple[str, ...]
    shapes: tuple[Shape, ...]
    split: Split
    stage: int | str
    pack: Callable[..., torch.Tensor] | None = None
    take: Callable[[torch.Tensor, int], torch.Tensor] | None = None


class Plan(NameMap):
    """A model's entries, as what `nxd_jax.checkpoint` takes names and rules from."""

    def __init__(self, entries: Sequence[Entry]):
        self.entries = list(entries)

    @functools.cached_property
    def rules(self) -> Rules:  # type: ignore[override]
        """How ranks share out each tensor."""
        return [(re.compile(re.escape(e.ours)), e.split) for e in self.entries]

    @functools.cached_property
    def shapes(self) -> dict[str, Shape]:
        """What a Hugging Face checkpoint has to hold."""
        return {name: shape for e in self.entries for name, shape in zip(e.theirs, e.shapes, strict=True)}

    def from_hub(self, names: Sequence[str]) -> list[Made]:
        return [Made(e.ours, e.theirs, e.pack) for e in self.entries]

    def to_hub(self, names: Sequence[str]) -> list[Made]:
        return [Made(name, (e.ours,), _taken(e, k)) for e in self.entries for k, name in enumerate(e.theirs)]

    def check_hub(self, found: Mapping[str, Sequence[int]], where: object) -> None:
        """Raise ValueError that names each tensor that a Hugging Face checkpoint lacks, each that the model has no place for, and each of another shape."""
        needed = self.shapes
        problems = [f"missing: {reading.listed(own)}" for own in [[n for n in needed if n not in found]] if own]
        problems += [
            f"not of this model: {reading.listed(own)}" for own in [[n for n in found if n not in needed and not is_computed(n)]] if own
        ]
        problems += [
            f"{name} has shape {list(found[name])}, and the configuration says {_text(shape)}"
            for name, shape in needed.items()
            if name in found and not _fits(found[name], shape)
        ]
        if problems:
            raise ValueError(f"{where} does not fit the model's configuration: " + "; ".join(problems[:12]))


def is_computed(name: str) -> bool:
    """Whether a tensor follows from the configuration."""
    return name.endswith(COMPUTED)


def _taken(entry: Entry, k: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
    take = entry.take
    return None if take is None else lambda t: take(t, k)


def _fits(found: Sequence[int], shape: Shape) -> bool:
    return len(found) == len(shape) and all(b is None or a == b for a, b in zip(found, shape, strict=True))


def _text(shape: Shape) -> str:
    return "[" + ", ".join("?" if n is None else str(n) for n in shape) + "]"


# -- how tensors are put together ----------------------------------------------------------------------


def below(*parts: torch.Tensor) -> torch.Tensor:
    """One below the other."""
    return torch.cat(parts)


def chunk(count: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """The inverse of `below` for tensors of equal size."""
    return lambda t, k: t.chunk(count)[k]


def stacked_gate_up(*parts: torch.Tensor) -> torch.Tensor:
    """Gate then up of every expert, [I, H] each, as [E, H, 2 I]."""
    count = len(parts) // 2
    gate, up = (torch.stack(own).transpose(1, 2) for own in (parts[:count], parts[count:]))
    return torch.cat([gate, up], dim=2)


def gate_or_up(count: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """The inverse of `stacked_gate_up` for so many experts."""
    return lambda t, k: t[k % count].chunk(2, dim=1)[k // count].t()


def stacked_down(*parts: torch.Tensor) -> torch.Tensor:
    """Down of every expert, [H, I] each, as [E, I, H]."""
    return torch.stack(parts).transpose(1, 2)


def down(t: torch.Tensor, k: int) -> torch.Tensor:
    """The inverse of `stacked_down`."""
    return t[k].t()
