"""The options of the wrapper: those that are checked, and those that mean nothing here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_bridge.mesh import groups as rank_groups
from torch_bridge.mesh import rank_numbers, world
from torch_bridge.mesh.groups import Groups

WITHOUT_EFFECT = frozenset(
    {
        "all_gather_bucket_size_mb",
        "coalesce_all_gather_ops",
        "coalesce_reduce_scatter_ops",
        "pin_layout_in_collective_ops",
        "reduce_scatter_bucket_size_mb",
        "use_all_gather_via_all_reduce",
        "zero_cpu_init",
    }
)
"""Options about how collectives are carried out, which is the compiler's choice."""

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_CHANGE_NUMBERS = "_debug_dummy"


def check_unknown(name: str, options: dict[str, Any], known: Sequence[str]) -> None:
    """Raises TypeError for options that nobody knows, NotImplementedError for torch_xla's `_debug_dummy_...`, which replace collectives by wrong ones.

    Other names with a leading underscore are accepted.
    """
    unknown = [o for o in options if o not in WITHOUT_EFFECT and not o.startswith("_")]
    if unknown:
        raise TypeError(f"{name}: unknown options {', '.join(sorted(unknown))}; it knows {', '.join(sorted({*WITHOUT_EFFECT, *known}))}")
    dummies = [o for o, value in options.items() if o.startswith(_CHANGE_NUMBERS) and value]
    if dummies:
        raise NotImplementedError(f"{name}: {', '.join(dummies)} would train on wrong numbers: leave it out")


def dtype(name: str, given: torch.dtype | None, otherwise: torch.dtype) -> torch.dtype:
    """`compute_dtype` or `buffer_dtype`. Raises ValueError for other dtypes than float32, float16 and bfloat16."""
    if given is not None and given not in _FLOATS:
        raise ValueError(f"{name} must be one of {', '.join(map(str, _FLOATS))}, not {given}")
    return given or otherwise


def sharding(groups: Any, rank: Any, size: Any) -> Groups:
    """Who shares parameters out: all ranks, or `sharding_groups`.

    Raises ValueError if groups come without the rank's place in its group and the group's size, or with others than they have.
    """
    if groups is None:
        among = rank_groups.everyone()
        if (size is not None and size != among.size) or (rank is not None and _values(rank) != list(range(among.size))):
            raise ValueError(
                f"sharding_rank and sharding_world_size are for sharding_groups, which are not given: parameters are shared out among all {among.size} ranks"
            )
        return among
    if rank is None or size is None:
        raise ValueError(
            "sharding_groups need sharding_rank (this rank's place in its group) and sharding_world_size (how many ranks a group has)"
        )
    among = rank_groups.resolve(groups)
    if size != among.size:
        raise ValueError(f"sharding_world_size={size}, but the groups in sharding_groups have {among.size} ranks")
    places = [among.index(r) for r in range(world.size())]
    hosted = world.current().hosted
    given = _values(rank)
    if any(given[r] != places[r] for r in hosted):
        raise ValueError(
            f"sharding_rank must be the rank's place in its group: {', '.join(f'{places[r]} for rank {r}' for r in hosted[:4])}; it is "
            f"{', '.join(str(given[r]) for r in hosted[:4])}. Work it out from xm.get_ordinal(), which differs by rank"
        )
    return among


def _values(rank: Any) -> list[int]:
    found = rank_numbers.values_of(rank)
    return list(found) if found is not None else [int(rank)] * world.size()
