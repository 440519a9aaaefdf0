"""Numbers that differ by rank (`ranks`) where Python and its libraries insist on their own kinds of numbers.

What is written once for all ranks takes the first hosted rank's number, as `print` does: json, yaml, `torch.save`. `torch.manual_seed(seed + rank)` seeds
the CPU (`rank_random`) and the device (`random_state`): either way each rank draws what it would draw alone. `rank_draws` has Python's and NumPy's generators.
"""

from __future__ import annotations

import functools
import importlib
import json
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from torch_bridge import nested
from torch_bridge.mesh import random_state, rank_numbers, world
from torch_bridge.per_rank import rank_draws, rank_functions
from torch_bridge.recorder import first_rank_files, rank_random
from torch_bridge.script import rank_branches, rank_syntax


@functools.cache
def install() -> None:
    """Once there is a number that differs by rank."""
    json.JSONEncoder.default = _json(json.JSONEncoder.default)  # type: ignore[assignment,method-assign]
    json.dumps = _in_text(json.dumps)
    struct.pack = _in_text(struct.pack)
    torch.save = _saving(torch.save)
    rank_draws.install()
    time.sleep = _of_first(time.sleep)
    _json_numbers()
    torch.manual_seed = torch.random.manual_seed = _seeding_both(torch.manual_seed)  # type: ignore[assignment]
    _teach_yaml()


def _json(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @functools.wraps(original)
    def default(self: Any, o: object) -> Any:
        return rank_numbers.first(o) if rank_numbers.is_ranked(o) else original(self, o)

    return default


def _in_text(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes text or bytes of numbers, the first hosted rank's: it is looked whether a script makes numbers of them again."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if (
            len(world.current().hosted) > 1
            and rank_syntax.is_script(frame.f_code)
            and rank_functions.hold_ranks(args, rank_numbers.KINDS, _NESTED)
        ):
            rank_branches.note_text(frame)
            args = tuple(map(rank_numbers.first, args))
        return original(*args, **kwargs)

    return function


_NESTED = (list, tuple, dict)


def _of_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function in C that takes Python's own numbers alone."""
    return functools.wraps(original)(lambda *args: original(*map(rank_numbers.first, args)))


def _plain_json(o: object) -> str:
    plain = rank_numbers.first(o)
    return str(plain).lower() if isinstance(plain, bool) else int.__repr__(plain)


def _json_numbers() -> None:
    """json asks `isinstance(o, int)`, and then writes with int's own method, which takes nothing else."""
    original = json.encoder._make_iterencode  # type: ignore[attr-defined]

    @functools.wraps(original)
    def make(markers: Any, default: Any, encoder: Any, indent: Any, floatstr: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("_intstr", lambda o: int.__repr__(o) if type(o) is int else _plain_json(o))
        return original(markers, default, encoder, indent, lambda o: floatstr(rank_numbers.first(o)), *args, **kwargs)

    json.encoder._make_iterencode = make  # type: ignore[attr-defined]


def _saving(original: Callable[..., Any]) -> Callable[..., Any]:
    """Plain numbers, where they lie in lists and dicts: what `torch.load` takes without being told to trust the file. Copies of tensors that differ by rank
    are the first one's, which is said."""

    @functools.wraps(original)
    def save(obj: object, *args: Any, **kwargs: Any) -> Any:
        found = nested.collect(obj, rank_numbers.is_ranked)
        copied = next(iter(nested.collect(obj, lambda x: type(x) is torch.Tensor and _differs(x))), None)
        if copied is not None:
            first_rank_files.note(f"a copy of shape {list(copied.shape)} of a value that differs by rank")
        return original(
            nested.replace(obj, rank_numbers.is_ranked, list(map(rank_numbers.first, found))) if found else obj, *args, **kwargs
        )

    return save


def _differs(t: torch.Tensor) -> bool:
    from torch_bridge.recorder import uploads

    return uploads.remembers(t)


def _seeding_both(original: Callable[[Any], torch.Generator]) -> Callable[[Any], torch.Generator]:
    """`torch.manual_seed`: the CPU's generator, and that of the device."""

    @functools.wraps(original)
    def manual_seed(seed: Any) -> torch.Generator:
        rank_random.seed(torch.default_generator, seed, original)
        if rank_numbers.is_ranked(seed):
            random_state.DEFAULT.manual_seed(seed)
        return torch.default_generator

    return manual_seed


def _teach_yaml() -> None:
    try:
        representer = importlib.import_module("yaml").representer
    except ImportError:
        return
    for dumper in (representer.SafeRepresenter, representer.Representer):
        for kind in rank_numbers.KINDS:
            dumper.add_representer(kind, lambda dumper, x: dumper.represent_data(rank_numbers.first(x)))
