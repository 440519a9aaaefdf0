"""Weights that were cut for another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from nxd_jax.tensor_parallel import sharded_weights
from torch_bridge.aot.facts import Cut, Held


def resharded(given: Sequence[Mapping[str, torch.Tensor]], weights: Mapping[str, Held], ranks: int) -> list[dict[str, torch.Tensor]]:
    """The weights of `ranks` ranks from those of another number, joined and cut again. Names that no weight has are left out.

    Raises ValueError for a weight of which it is not known how ranks share it out, or whose parts do not make up its full shape.
    """
    found: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]
    for name, of in weights.items():
        parts = [state[name] for state in given if name in state]
        if not parts:
            continue
        if of.cut is None:
            if any(tuple(p.shape) != of.shape for p in parts) or not _equal(parts):
                raise ValueError(
                    f"the weights are of {len(given)} ranks, the model has {ranks}, and {name} is no plain cut of {of} that all have: shard the full checkpoint"
                )
            for state in found:
                state[name] = parts[0]
            continue
        full = _joined(name, parts, of, of.cut)
        size = of.shape[of.cut.dim]
        for rank, state in enumerate(found):
            state[name] = sharded_weights.cut(full, of.cut.dim, size, of.cut.stride, of.cut.index[rank], of.cut.parts)
    return found


def _joined(name: str, parts: Sequence[torch.Tensor], of: Held, cut: Cut) -> torch.Tensor:
    wanted = of.shape[cut.dim] * cut.parts
    there = sum(p.shape[cut.dim] for p in parts)
    copies, rest = divmod(there, wanted)
    if rest or len(parts) % max(copies, 1) or not copies:
        raise ValueError(
            f"{name}: {len(parts)} parts of shape {list(parts[0].shape)} do not make up a tensor with {wanted} entries along dim {cut.dim}, which the model's "
            "ranks share: shard the full checkpoint again"
        )
    blocks = [p.chunk(cut.stride, cut.dim) for p in _different(name, parts, copies)]
    return torch.cat([b[s] for s in range(cut.stride) for b in blocks], cut.dim)


def _different(name: str, parts: Sequence[torch.Tensor], copies: int) -> Sequence[torch.Tensor]:
    """One of each `copies` parts that are copies of each other: side by side among the ranks (as on trn2), or going round them (as on trn1)."""
    count = len(parts) // copies
    for found, others in (
        (parts[::copies], [parts[k * copies : (k + 1) * copies] for k in range(count)]),
        (parts[:count], [parts[k::count] for k in range(count)]),
    ):
        if all(_equal(same) for same in others):
            return found
    raise ValueError(
        f"{name}: of {len(parts)} parts {copies} each should be copies, as the model's ranks share the tensor out, and they differ: shard the full "
        "checkpoint again"
    )


def _equal(parts: Sequence[torch.Tensor]) -> bool:
    return all(p is parts[0] or torch.equal(p, parts[0]) for p in parts)
