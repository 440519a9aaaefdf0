"""Query heads where K/V heads have copies (`kv_size_multiplier`): their order follows from which rank holds which copy.

A rank computes with the query heads that its K/V heads serve. So rows of the query weight, and columns of the output projection, come in another order
for every number of ranks and copies. Checkpoints hold them in the order that the model has without copies, and that Hugging Face's has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nxd_jax.tensor_parallel import kv_groups, layer_groups
from nxd_jax.tensor_parallel.linear import RowParallelLinear
from nxd_jax.tensor_parallel.qkv_linear import GQAQKVColumnParallelLinear
from torch_bridge.mesh import groups

ATTRIBUTE = "kv_heads_held"
"""Of a query weight or output projection: how many K/V heads a rank of its layer holds (copies count); 0 if nobody can tell."""

_LOCAL = ("num_kv_heads", "num_key_value_heads", "kv_heads_per_rank", "n_local_kv_heads")


def mark(model: torch.nn.Module) -> None:
    """Set `ATTRIBUTE` where query heads come in the ranks' order: on parameters of GQA layers with copies, and of the one output projection beside each."""
    if not isinstance(model, torch.nn.Module):
        return
    config = getattr(model, "config", None)
    for parent in model.modules():
        for layer in parent.children():
            if not isinstance(layer, GQAQKVColumnParallelLinear) or layer.kv_size_multiplier == 1:
                continue
            outputs = [c for c in parent.children() if isinstance(c, RowParallelLinear) and c.input_size == layer.output_sizes[0]]
            held = _held(parent, layer, getattr(parent, "config", None) or config)
            if held is None or len(outputs) != 1:
                held, outputs = 0, []
            for name in ("weight_q", "weight_qkv", "bias_q", "bias_qkv"):
                parameter = getattr(layer, name, None)
                if isinstance(parameter, torch.nn.Parameter):
                    setattr(parameter, ATTRIBUTE, held)
            for output in outputs:
                if isinstance(output.weight, torch.nn.Parameter):  # a stage of another process has none
                    setattr(output.weight, ATTRIBUTE, held)


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
    members = groups.resolve(layer_groups.tensor_parallel()).members[0]
    if not held:
        return None
    found = [(part * held + k) * copies + copy for part, copy, copies in _places(members) for k in range(held)]
    return None if found == sorted(found) else tuple(found)


def _places(members: Sequence[int]) -> list[tuple[int, int, int]]:
    """For each tensor-parallel rank: which part of K and V it holds, the how manieth copy of how many."""
    sharing = [g for g in kv_groups.lists() if g[0] in members]
    part = {r: (k, g.index(r), len(g)) for k, g in enumerate(sharing) for r in g}
    return [part[r] for r in members]
