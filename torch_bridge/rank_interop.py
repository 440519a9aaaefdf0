"""Numbers that differ by rank (`ranks`) where Python and its libraries insist on their own kinds of numbers.

What is written or drawn once for all ranks takes the first hosted rank's number, as `print` does: json, yaml, `torch.save`, and seeds of the host's own
generators. `torch.manual_seed(seed + rank)` seeds both: numbers of CPU tensors are the first rank's, numbers drawn on the device each rank's own.
"""

from __future__ import annotations

import functools
import importlib
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torch_bridge import nested, ranks, rng, sharded


@functools.cache
def install() -> None:
    """Once there is a number that differs by rank."""
    json.JSONEncoder.default = _json(json.JSONEncoder.default)  # type: ignore[assignment,method-assign]
    torch.save = _saving(torch.save)
    random.Random.seed = _seeded(random.Random.seed)  # type: ignore[method-assign]
    random.seed = _seeded(random.seed)
    np.random.default_rng = _seeded(np.random.default_rng)
    torch.manual_seed = torch.random.manual_seed = _seeding_both(torch.manual_seed)  # type: ignore[assignment]
    _teach_yaml()


def _json(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @functools.wraps(original)
    def default(self: Any, o: Any) -> Any:
        return ranks.first(o) if ranks.is_ranked(o) else original(self, o)

    return default


def _saving(original: Callable[..., Any]) -> Callable[..., Any]:
    """Plain numbers, where they lie in lists and dicts: what `torch.load` takes without being told to trust the file. Copies of tensors that differ by rank
    are the first one's, which is said."""

    @functools.wraps(original)
    def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
        found = nested.collect(obj, ranks.is_ranked)
        copied = next(iter(nested.collect(obj, lambda x: type(x) is torch.Tensor and _differs(x))), None)
        if copied is not None:
            sharded.note_values(f"a copy of shape {list(copied.shape)} of a value that differs by rank")
        return original(nested.replace(obj, ranks.is_ranked, list(map(ranks.first, found))) if found else obj, *args, **kwargs)

    return save


def _differs(t: torch.Tensor) -> bool:
    from torch_bridge import transfer

    return transfer.differs(t)


def _seeded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        return original(*map(ranks.first, args), **{name: ranks.first(x) for name, x in kwargs.items()})

    return seeded


def _seeding_both(original: Callable[[Any], torch.Generator]) -> Callable[[Any], torch.Generator]:
    @functools.wraps(original)
    def manual_seed(seed: Any) -> torch.Generator:
        generator = original(ranks.first(seed))
        if ranks.values_of(seed) is not None:
            rng.DEFAULT.manual_seed(seed)
        return generator

    return manual_seed


def _teach_yaml() -> None:
    try:
        representer = importlib.import_module("yaml").representer
    except ImportError:
        return
    for dumper in (representer.SafeRepresenter, representer.Representer):
        for kind in ranks.KINDS:
            dumper.add_representer(kind, lambda dumper, x: dumper.represent_data(ranks.first(x)))
