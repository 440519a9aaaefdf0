"""Query heads where K/V heads have copies (`kv_size_multiplier`): their order follows from which rank holds which copy.

A rank computes with the query heads that its K/V heads serve. So rows of the query weight, and columns of the output projection, come in another order
for every number of ranks and copies; and so do those of their adapters. Checkpoints hold them in the order that the model has without copies, and that
Hugging Face's has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nxd_jax.tensor_parallel import kv_groups, layer_groups
from nxd_jax.tensor_parallel.linear import RowParallelLinear
from nxd_jax.tensor_parallel.qkv_linear import GQAQKVColumnParallelLinear
from torch_bridge.mesh import groups

ATTRIBUTE = "kv_heads_held"
"""Of a query weight or output projection: how many K/V heads a rank of its layer holds (copies count); 0 if nobody can tell."""

ADVICE = "give the attention module, or the model, a `config` with num_key_value_heads, and one RowParallelLinear beside the GQA layer"
"""How a script says what decides about query heads."""

_BASE = "base_layer"
"""What the layer inside one with an adapter is called."""

_LOCAL = ("num_kv_heads", "num_key_value_heads", "kv_heads_per_rank", "n_local_kv_heads")


def mark(model: torch.nn.Module) -> None:
    """Set `ATTRIBUTE` where query heads come in the ranks' order: on parameters of GQA layers with copies, and of the one output projection beside each.

    Of layers with adapters (`modules.lora`), on those of the factors that ranks share out as the layer is, too.
    """
    if not isinstance(model, torch.nn.Module):
        return
    config = getattr(model, "config", None)
    for parent in model.modules():
        if _BASE in parent._modules:
            continue
        for projections in (_alike(c, GQAQKVColumnParallelLinear) for c in parent.children()):
            if not projections or projections[0].kv_size_multiplier == 1:
                continue
            layer = projections[0]
            outputs = [
                found for c in parent.children() if (found := _alike(c, RowParallelLinear)) and found[0].input_size == layer.output_sizes[0]
            ]
            held = _held(parent, layer, getattr(parent, "config", None) or config)
            if held is None or len(outputs) != 1:
                held, outputs = 0, []
            for name in ("weight_q", "weight_qkv", "bias_q", "bias_qkv"):
                _set([getattr(p, name, None) for p in projections], held)
            for output in outputs:
                _set([o.weight for o in output], held)


def _alike(layer: torch.nn.Module, kind: type[torch.nn.Module]) -> list[Any]:
    """The layer, if it is of this kind. Of one with an adapter: the layer inside, and the factor that is of this kind, too."""
    return [m for m in (layer.children() if _BASE in layer._modules else [layer]) if isinstance(m, kind)]


def _set(values: Sequence[object], held: int) -> None:
    for value in values:
        if isinstance(value, torch.nn.Parameter):  # a stage of another process has none
            setattr(value, ATTRIBUTE, held)


def _held(parent: torch.nn.Module, layer: GQAQKVColumnParallelLinear, config: object) -> int | None:
    """K/V heads of a rank: from the model's configuration, or from what the attention module says about itself."""
    tp, rows = layer_groups.size(layer.tensor_parallel_group), layer.kv_output_size_per_partition
    total = getattr(config, "num_key_value_heads", None)
    if isinstance(total, int) and total * layer.kv_size_multiplier % tp == 0:
        return total * layer.kv_size_multiplier // tp
    found = next((n for name in _LOCAL if isinstance(n := getattr(parent, name, None), int)), None)
    return found if found and rows % found == 0 else None


def arrangement(parameter: torch.Tensor) -> str:
    """How query heads are arranged among ranks where a checkpoint cannot bring them in order; "" elsewhere."""
    if getattr(parameter, ATTRIBUTE, None) != 0:
        return ""
    members = groups.resolve(layer_groups.tensor_parallel()).members[0]
    return " ".join(f"{part}.{copy}" for part, copy, _ in _places(members))


def order(held: int) -> tuple[int, ...] | None:
    """For each place in the ranks' order of groups of query heads (those that one copy of a K/V head serves): which of the model's it is.

    None: all in order.
    """
    if not held:
        return None
    members = groups.resolve(layer_groups.tensor_parallel()).members[0]
    found = [(part * held + k) * copies + copy for part, copy, copies in _places(members) for k in range(held)]
    return None if found == sorted(found) else tuple(found)


def in_model_order(full: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A full value of a parameter, its parts as ranks hold them side by side, with query heads in the model's order. K and V behind fused queries stay."""
    found = order(getattr(parameter, ATTRIBUTE, 0))
    return full if found is None else _arranged(full, parameter, sorted(range(len(found)), key=found.__getitem__))


def in_ranks_order(full: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The inverse of `in_model_order`."""
    found = order(getattr(parameter, ATTRIBUTE, 0))
    return full if found is None else _arranged(full, parameter, found)


def _arranged(full: torch.Tensor, parameter: Any, places: Sequence[int]) -> torch.Tensor:
    """Groups of query heads in another order: for each place which one. A tensor that cannot hold as many stays: its shape is refused elsewhere."""
    dim = parameter.partition_dim
    fused = getattr(parameter, "qkv_partition", None)
    count = full.shape[dim] if fused is None else min(fused[0] * parameter.num_partitions, full.shape[dim])
    if count % len(places):
        return full
    queries, others = full.split([count, full.shape[dim] - count], dim)
    queries = queries.unflatten(dim, (len(places), -1)).index_select(dim, torch.tensor(places)).flatten(dim, dim + 1)
    return torch.cat([queries, others], dim) if others.numel() else queries


def _places(members: Sequence[int]) -> list[tuple[int, int, int]]:
    """For each tensor-parallel rank: which part of K and V it holds, the how manieth copy of how many."""
    sharing = [g for g in kv_groups.lists() if g[0] in members]
    part = {r: (k, g.index(r), len(g)) for k, g in enumerate(sharing) for r in g}
    return [part[r] for r in members]
