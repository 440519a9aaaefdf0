"""How ranks share out a module's weights, as facts by which weights of another number of ranks are cut again (`resharding`)."""

from __future__ import annotations

from typing import Any

import torch

from nxd_jax.tensor_parallel import expert_shares, full_weights, layer_groups, parallel_groups
from nxd_jax.tensor_parallel.base_layer import BaseParallelLayer
from nxd_jax.tensor_parallel.full_weights import Shares
from nxd_jax.tensor_parallel.spmd_rank import SPMDRank
from nxd_jax.trace import layouts
from torch_bridge.aot.facts import Cut, Heads, Piece
from torch_bridge.aot.tracing import Describe
from torch_bridge.mesh import world

Found = tuple[bool, tuple[Cut, ...]]


def describe_in(module: torch.nn.Module) -> Describe:
    """What is known of a module's parameters and buffers: their attributes, and the layers that they are of.

    A module whose layers hold attention heads says so with a method `heads_of()`: {name of a layer below it: the heads (`facts.Heads`) of what lies below each
    other along the dim that its ranks share out}.
    """
    owners: dict[int, tuple[torch.nn.Module, str]] = {}
    heads: dict[int, tuple[Heads, ...]] = {}
    for m in module.modules():
        for name, t in [*m.named_parameters(recurse=False), *m.named_buffers(recurse=False)]:
            owners.setdefault(id(t), (m, name))
        said: Any = getattr(m, "heads_of", None)
        for layer, own in said().items() if said is not None else ():
            heads.update((id(t), own) for t in m.get_submodule(layer).parameters())

    def describe(t: torch.Tensor) -> Found:
        owner, name = owners.get(id(t), (None, ""))
        if isinstance(owner, SPMDRank):
            return True, _numbers(owner)
        cuts = _cuts(t, owner, name, heads.get(id(t), ()))
        return bool(cuts) or full_weights.is_divided(t), cuts or ()

    return describe


def _numbers(owner: SPMDRank) -> tuple[Cut, ...]:
    return (Cut(0, owner.world_size, (), tuple(r % owner.world_size for r in range(world.size())), numbers=True),)


def _cuts(t: torch.Tensor, owner: torch.nn.Module | None, name: str, heads: tuple[Heads, ...]) -> tuple[Cut, ...] | None:
    """None where it is not known; empty where nothing is shared out."""
    found = []
    if full_weights.is_shared_out(t):
        cut = _among_tensor_parallel(t, owner, name, heads)
        if cut is None:
            return None
        found.append(cut)
    partition = getattr(owner, "_partitions", {}).get(name)
    entries = expert_shares.entries_of(t, owner) if partition is None else partition.entries
    if entries is None:
        return tuple(found)
    if entries.held != expert_shares.runs(len(entries.held), t.shape[0]):
        return None
    places = [layer_groups.place_of(entries.group, r) for r in range(world.size())]
    return (*found, Cut(0, len(entries.held), (Piece(t.shape[0] * len(entries.held)),), tuple(places)))


def _among_tensor_parallel(t: torch.Tensor, owner: torch.nn.Module | None, name: str, heads: tuple[Heads, ...]) -> Cut | None:
    shares = full_weights.plain_shares(t, getattr(owner, "tensor_parallel_group", None))
    if shares is None:
        return None
    index = tuple(shares.index[r] for r in range(world.size()))
    pieces = _of_heads(t, shares, heads) if heads else _fused(t, shares) if _is_fused(t) else _plain(t, shares, owner, name)
    return None if pieces is None else Cut(shares.dim, shares.count, pieces, index)


def _of_heads(t: torch.Tensor, shares: Shares, heads: tuple[Heads, ...]) -> tuple[Piece, ...] | None:
    parts = shares.count
    held = sum(len(layouts.places_of(own, parts)) // parts for own in heads)
    if parts != parallel_groups.size("tp") or t.shape[shares.dim] % held:
        return None
    of_head = t.shape[shares.dim] // held
    return tuple(Piece(layouts.count_of(own) * of_head, heads=own) for own in heads)


def _is_fused(t: torch.Tensor) -> bool:
    """As upstream marks a weight of q, k and v below each other."""
    return bool(getattr(t, "fused_qkv", False))


def _fused(t: Any, shares: Shares) -> tuple[Piece, ...] | None:
    sizes = [count * t.head_dim for count in (t.num_attention_heads, t.num_key_value_heads, t.num_key_value_heads)]
    return tuple(map(Piece, sizes)) if sum(sizes) == t.shape[shares.dim] * shares.count else None


def _plain(t: torch.Tensor, shares: Shares, owner: torch.nn.Module | None, name: str) -> tuple[Piece, ...] | None:
    full = t.shape[shares.dim] * shares.count
    layer: Any = owner if isinstance(owner, BaseParallelLayer) else None
    if layer is None or not getattr(layer, "pad", False):
        return (Piece(full // shares.stride),) * shares.stride
    padding = layer._bias_padding() if name == "bias" else layer._padding()
    whole = layer.weight.shape[layer._partition.dim] * layer._partition.size
    if shares.stride > 1 or full != whole:
        return None if padding else (Piece(full // shares.stride),) * shares.stride
    fill = layer._bias_fill(t.dtype) if name == "bias" else 0.0
    return (Piece(full - padding, getattr(layer, "pad_alignment_size_per_rank", 1), fill),)
