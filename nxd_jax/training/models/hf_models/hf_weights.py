"""Hugging Face's weights in and out of the models of this folder, whatever the ranks.

    ours                                       transformers' model                        files
    self_attn.qkv_proj.*                       self_attn.{q,k,v}_proj.*                   the same
    mlp.gate_up_proj.*                         mlp.{gate,up}_proj.*                       the same
    mlp.router.linear_router.weight            mlp.gate.weight                            block_sparse_moe.gate.weight
    mlp.expert_mlps.mlp_op.gate_up_proj.weight mlp.experts.gate_up_proj                   block_sparse_moe.experts.j.{w1,w3}.weight
        [E, H, 2 I]                                [E, 2 I, H]                                [I, H] each
    mlp.expert_mlps.mlp_op.down_proj.weight    mlp.experts.down_proj                      block_sparse_moe.experts.j.w2.weight
        [E, I, H]                                  [E, H, I]                                  [H, I]

Legend: E experts, H hidden, I their width, j the number of an expert. With copies of K/V heads query heads come in another order: a rank has those that its
K/V heads serve.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nxd_jax.checkpoint import heads
from nxd_jax.tensor_parallel import parallel_groups
from nxd_jax.tensor_parallel.full_weights import Full, gather_full, scatter_full
from nxd_jax.training.models.hf_models.attention import kv_copies

State = dict[str, torch.Tensor]

_EXPERTS = ".expert_mlps.mlp_op."
_FILE_EXPERT = re.compile(r"(.*)\.(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(w1|w2|w3|gate_proj|down_proj|up_proj)\.weight")
_KINDS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def load_hf_weights(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Give a model the full weights of a transformers state dict, or of files (`block_sparse_moe.experts.j`).

    Raises KeyError naming every weight that the state dict lacks. What it has besides is left out.
    """
    full, order = stacked(state), _query_order(model.config)
    own = _own_names(model)
    missing = sorted({name for mine, _ in own for name in hf_names(mine) if name not in full})
    if missing:
        raise KeyError(f"the state dict has no {', '.join(missing)}")
    for mine, parameter in own:
        scatter_full(parameter, _value(mine, full, order))


def to_hf_weights(model: nn.Module, grads: bool = False) -> State:
    """Full CPU tensors of all parameters (of their gradients) by their names in transformers' model; a tied head is left out."""
    order = _query_order(model.config)
    back = None if order is None else [order.index(h) for h in range(len(order))]
    found: State = {}
    for mine, parameter in _own_names(model):
        value = parameter.grad if grads else parameter.detach()
        if value is not None:
            found |= _named(mine, gather_full(value, like=parameter), back)
    return found


def hf_names(mine: str) -> list[str]:
    """The names in transformers' model of what our parameter holds."""
    prefix, _, kind = mine.rpartition(".")
    if ".self_attn.qkv_proj." in mine:
        attention, kind = prefix.rpartition(".")[0], kind.split("_")[0]
        letters = mine[-1] if re.fullmatch(r"(weight|bias)_[qkv]", mine.rpartition(".")[2]) else "qkv"
        return [f"{attention}.{letter}_proj.{kind}" for letter in letters]
    if _EXPERTS in mine:
        return [mine.replace(_EXPERTS, ".experts.").removesuffix(".weight")]
    if ".mlp.gate_up_proj." in mine:
        return [f"{prefix.rpartition('.')[0]}.{part}_proj.{kind}" for part in ("gate", "up")]
    return [mine.replace(".router.linear_router.", ".gate.")]


def stacked(state: Mapping[str, torch.Tensor]) -> State:
    """Tensors of files under the names of transformers' model, which has all experts of a layer in one tensor."""
    found: State = {}
    single: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    for name, tensor in state.items():
        match = _FILE_EXPERT.fullmatch(name)
        if match is None:
            found[name.replace(".block_sparse_moe.", ".mlp.")] = tensor
        else:
            single.setdefault(match[1], {}).setdefault(_KINDS[match[3]], {})[int(match[2])] = tensor
    for layer, kinds in single.items():
        rows = {kind: torch.stack([tensors[j] for j in sorted(tensors)]) for kind, tensors in kinds.items()}
        if "gate" in rows and "up" in rows:
            found[f"{layer}.mlp.experts.gate_up_proj"] = torch.cat([rows["gate"], rows["up"]], dim=1)
        if "down" in rows:
            found[f"{layer}.mlp.experts.down_proj"] = rows["down"]
    return found


def _own_names(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def _value(mine: str, full: State, order: list[int] | None) -> Full:
    """The full value of our parameter."""
    parts = [full[name].detach().cpu() for name in hf_names(mine)]
    if ".self_attn.qkv_proj." in mine:
        if not mine.endswith(("_k", "_v")):
            parts[0] = _reordered(parts[0], order)
        return tuple(parts) if mine.endswith("_qkv") else torch.cat(parts)
    if _EXPERTS in mine:
        return parts[0].transpose(1, 2)
    if mine.endswith(".self_attn.o_proj.weight"):
        return _reordered(parts[0], order, dim=1)
    return torch.cat(parts)


def _named(mine: str, value: Full, back: list[int] | None) -> State:
    """The inverse of `_value`."""
    names = hf_names(mine)
    if isinstance(value, tuple):
        parts = list(value)
    elif _EXPERTS in mine:
        parts = [value.transpose(1, 2).contiguous()]
    else:
        parts = list(value.chunk(len(names)))
    if ".self_attn.qkv_proj." in mine and not mine.endswith(("_k", "_v")):
        parts[0] = _reordered(parts[0], back)
    if mine.endswith(".self_attn.o_proj.weight"):
        parts[0] = _reordered(parts[0], back, dim=1)
    return dict(zip(names, parts, strict=True))


def _query_order(config: Any) -> list[int] | None:
    """For each place in the ranks' order of query heads: which of the model's heads stands there; None: all in order."""
    copies = kv_copies(config)
    if copies == 1:
        return None
    held = config.num_key_value_heads * copies // parallel_groups.size("tp")
    groups = heads.order(held)
    if groups is None:
        return None
    size = config.num_attention_heads // len(groups)
    return [group * size + k for group in groups for k in range(size)]


def _reordered(value: torch.Tensor, order: list[int] | None, dim: int = 0) -> torch.Tensor:
    """Blocks of heads along `dim` in another order."""
    if order is None:
        return value
    return value.unflatten(dim, (len(order), -1)).index_select(dim, torch.tensor(order)).flatten(dim, dim + 1)
