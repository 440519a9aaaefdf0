"""Full checkpoints cut for tensor parallel ranks, as traced models take their weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nxd_jax.tensor_parallel import expert_shares, full_weights, parallel_groups, rank_files
from nxd_jax.tensor_parallel.spmd_rank import SPMDRank
from torch_bridge.mesh import world

logger = logging.getLogger("nxd_jax")

State = dict[str, torch.Tensor]


def preprocess_checkpoint(model: torch.nn.Module, checkpoint: State) -> None:
    """`trace.trace.preprocess_checkpoint`: let modules change a full checkpoint (their `preshard_hook(state_dict, prefix + "weight")`, outermost first; what is
    below a module that has one is its business), then take out what the model does not have, with a warning. Changes the dict."""
    rank_files.preshard(model, checkpoint, "")
    for name, module in model.named_modules():
        if isinstance(module, SPMDRank):  # those below a module with a hook of its own, too
            module.preshard_hook(checkpoint, f"{name}.rank".lstrip("."))
    readers = _readers(model)
    known = set(model.state_dict(keep_vars=True)) | set(readers)
    read = tuple({name.rpartition(".")[0] for name in readers})  # such a parameter may want any key of its module
    unknown = [name for name in checkpoint if name not in known and not name.startswith(read)]
    if unknown:
        logger.warning(
            "the model has no %s: these tensors of the checkpoint are left out",
            ", ".join(unknown[:8]) + (" ..." if len(unknown) > 8 else ""),
        )
    for name in unknown:
        del checkpoint[name]


def _readers(model: torch.nn.Module) -> dict[str, Callable[[str, Mapping[str, torch.Tensor]], torch.Tensor]]:
    """By parameter: functions of parameters that take their value from a full state dict (`get_tensor_from_state_dict(prefix, state_dict)`)."""
    found = {}
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        reader = getattr(t, "get_tensor_from_state_dict", None)
        if reader is not None:
            found[name] = reader
    return found


def cut_for_ranks(model: torch.nn.Module, checkpoint: Mapping[str, torch.Tensor], ranks: Any) -> list[State]:
    """A preprocessed checkpoint cut for ranks of the world, in the dtypes of the model's parameters.

    Tensors that nobody shares out are the same objects in all dicts. Raises RuntimeError for a shape that does not fit, and for floats in place of integers.
    """
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    numbers = {f"{name}.rank".lstrip("."): m for name, m in model.named_modules() if isinstance(m, SPMDRank)}
    readers, layers = _readers(model), _layers(model)
    full: dict[str, torch.Tensor] = {}
    for name, t in own.items():
        value = readers[name](name.rpartition(".")[0] + "." if "." in name else "", checkpoint) if name in readers else checkpoint.get(name)
        if value is None:
            continue
        if not torch.can_cast(value.dtype, t.dtype):
            raise RuntimeError(
                f"{name}: the checkpoint has {value.dtype}, the model {t.dtype}, which is of another kind: convert the checkpoint"
            )
        full[name] = value if value.dtype == t.dtype else value.to(t.dtype)
    found: list[State] = []
    for rank in ranks:
        part: State = {}
        for name, value in full.items():
            if name in numbers:
                part[name] = torch.tensor([rank % numbers[name].world_size], dtype=torch.int32)
            else:
                part[name] = _cut(name, own[name], value, rank, layers.get(name))
        found.append(part)
    return found


def _layers(model: torch.nn.Module, prefix: str = "") -> dict[str, torch.nn.Module]:
    """By parameter: the layer that it is of, which knows the groups of ranks that share it out (of experts, not always the tensor parallel ones)."""
    named = model.named_modules(prefix=prefix, remove_duplicate=False)
    return {f"{name}.{own}".lstrip("."): m for name, m in named for own, _ in m.named_parameters(recurse=False)}


def _cut(name: str, parameter: torch.Tensor, value: torch.Tensor, rank: int, layer: Any) -> torch.Tensor:
    try:
        if (
            getattr(parameter, "fused_qkv", False)
            and full_weights.is_shared_out(parameter)
            and getattr(parameter, "qkv_partition", None) is None
        ):
            return create_local_weight_qkv(
                parallel_groups.places("tp")[rank],
                parallel_groups.size("tp"),
                value,
                parameter.partition_dim,  # type: ignore[attr-defined]
                parameter.num_attention_heads,  # type: ignore[attr-defined]
                parameter.num_key_value_heads,  # type: ignore[attr-defined]
                parameter.head_dim,  # type: ignore[attr-defined]
            )
        part = full_weights.cut_full(parameter, value, rank, getattr(layer, "tensor_parallel_group", None), layer)
    except ValueError as error:
        raise RuntimeError(f"{name}: {error}") from None
    if part.shape != parameter.shape:
        raise RuntimeError(
            f"{name}: rank {rank}'s part of the checkpoint has shape {list(part.shape)}, the model's parameter {list(parameter.shape)}"
        )
    return part


def shard_children(
    module: torch.nn.Module, checkpoint: State, prefix: str, dtype: torch.dtype | None, rank: int, tp_degree: int, is_cached: bool = False
) -> None:
    """`trace.trace.shard_children`: cut what tensor parallel ranks share out of a module's parameters, for one of them, in place.

    prefix: what the names in the checkpoint begin with, "" or with a dot at the end. dtype: cast to it; None: no cast. is_cached: accepted.

    Raises ValueError if the tensor parallel size is not `tp_degree`, RuntimeError for a shape that does not fit.
    """
    of_world, layers = _of_world(rank, tp_degree), _layers(module, prefix.removesuffix("."))
    for name, parameter in module.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
        layer = layers.get(name)
        if name in checkpoint and (full_weights.is_divided(parameter) or expert_shares.entries_of(parameter, layer) is not None):
            part = _cut(name, parameter, checkpoint[name], of_world, layer)
            checkpoint[name] = part if dtype is None else part.to(dtype)


def _of_world(rank: int, tp_degree: int) -> int:
    """The first rank of the world with a place among tensor parallel ranks."""
    if parallel_groups.size("tp") != tp_degree:
        raise ValueError(
            f"tp_degree is {tp_degree}, and parallel state has tensor parallel size {parallel_groups.size('tp')}: they must agree"
        )
    places = parallel_groups.places("tp")
    return next(r for r in range(world.size()) if places[r] == rank)


def get_sharded_checkpoint(checkpoint: State, model: torch.nn.Module, rank: int, tp_degree: int, is_cached: bool = False) -> None:
    """`trace.trace.get_sharded_checkpoint`: cut a full checkpoint for one tensor parallel rank, in place. is_cached: it is preprocessed already.

    Raises ValueError if the tensor parallel size is not `tp_degree`, RuntimeError for a shape that does not fit.
    """
    of_world = _of_world(rank, tp_degree)
    if not is_cached:
        preprocess_checkpoint(model, checkpoint)
    checkpoint.update(cut_for_ranks(model, checkpoint, [of_world])[0])


def create_local_weight(
    rank: int,
    world_size: int,
    full_weight: torch.Tensor,
    partition_dim: int,
    per_partition_size: int,
    stride: int,
    out_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """`trace.trace.create_local_weight`: part `rank` of `world_size`: every `world_size`-th of the blocks of `per_partition_size / stride` along a dim."""
    from nxd_jax.tensor_parallel import sharded_weights

    with torch.no_grad():
        found = sharded_weights.cut(full_weight, partition_dim, per_partition_size, stride, rank, world_size)
        return found if out_weight is None else out_weight.copy_(found)


def create_local_weight_qkv(
    rank: int,
    world_size: int,
    full_weight: torch.Tensor,
    partition_dim: int,
    q_len: int,
    kv_len: int,
    head_dim: int = 1,
    out_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """`trace.trace.create_local_weight_qkv`: a rank's part of q, k and v that lie below each other along `partition_dim`.

    q_len, kv_len: heads of q, and of k and of v each, of `head_dim` rows. Raises AssertionError if ranks cannot share the heads evenly.
    """
    sizes = [q_len * head_dim, kv_len * head_dim, kv_len * head_dim]
    pieces = torch.split(full_weight, sizes, dim=partition_dim)
    parts = [create_local_weight(rank, world_size, p, partition_dim, p.shape[partition_dim] // world_size, 1) for p in pieces]
    found = torch.cat(parts, dim=partition_dim)
    return found if out_weight is None else out_weight.copy_(found)
