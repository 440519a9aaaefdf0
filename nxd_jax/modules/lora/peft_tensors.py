"""One layer's tensors as PEFT has them, and back: names, fused layers apart and together, adapters stacked in one of a higher rank."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nxd_jax.modules.lora.layer import LoraEmbedding, LoraLayer, LoraLinear
from nxd_jax.tensor_parallel import sharded_weights
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear
from nxd_jax.tensor_parallel.qkv_linear import GQAQKVColumnParallelLinear

Fused = Mapping[str, Sequence[str]]
Pair = tuple[torch.Tensor, torch.Tensor]

PREFIX = "base_model.model."

# -- fused layers ------------------------------------------------------------------------------------


def parts(module: nn.Module, name: str, fused: Fused) -> list[str]:
    """The names of Hugging Face's layers that a layer stands for: its own, or those that are fused in it. Raises ValueError for fused ones not in `fused`."""
    base = _base(module)
    path, _, last = name.rpartition(".")
    count = 3 if isinstance(base, GQAQKVColumnParallelLinear) else base.stride if isinstance(base, ColumnParallelLinear) else 1
    if count == 1 or (last not in fused and count != 3):
        return [name]
    if len(fused.get(last, ())) != count:
        raise ValueError(f"{name} consists of {count} layers fused: say in fused={{{last!r}: (...)}} what Hugging Face's model calls them")
    return [f"{path}.{part}" if path else part for part in fused[last]]


def _base(module: nn.Module) -> Any:
    return module.base_layer if isinstance(module, LoraLayer) else module


def _rows(layer: LoraLayer, count: int) -> list[int]:
    """The outputs of a layer, for each of the layers that are fused in it."""
    base = layer.base_layer
    if isinstance(base, GQAQKVColumnParallelLinear):
        q, kv = base.output_sizes
        return [q, kv, kv]
    if isinstance(layer, LoraLinear):
        return [layer.out_features]
    names = ("output_size", "out_channels", "embedding_dim")
    return [next(getattr(base, n) for n in names if hasattr(base, n)) // count] * count


# -- out ---------------------------------------------------------------------------------------------


def outgoing(path: str, rest: str, full: torch.Tensor, module: nn.Module, fused: Fused) -> list[tuple[str, torch.Tensor]]:
    """PEFT's names, without the prefix, and tensors of parameter `rest` of a layer, from its full value."""
    names = parts(module, path, fused)
    adapted = isinstance(module, LoraLayer)
    if isinstance(module, LoraEmbedding) and rest.startswith("lora_"):
        return [(f"{path}.lora_embedding_{rest[5]}", full.t() if rest[5] == "A" else full)]
    if adapted and rest.startswith("lora_A"):
        return [(f"{n}.lora_A.weight", full) for n in names]
    last = rest.rpartition(".")[2]
    inner = "" if not adapted else "lora_B." if rest.startswith("lora_B") else "base_layer."
    kind = last if len(names) == 1 else last.partition("_")[0]
    return [(f"{names[k]}.{inner}{kind}", piece) for k, piece in _pieces(full, module, last, len(names)).items()]


def _pieces(full: torch.Tensor, module: nn.Module, last: str, count: int) -> dict[int, torch.Tensor]:
    """Which of the fused layers a full parameter belongs to, and what of it."""
    base = _base(module)
    if count == 1:
        return {0: full}
    if not isinstance(base, GQAQKVColumnParallelLinear):
        return dict(enumerate(full.chunk(count)))
    kind = last.rpartition("_")[2]
    if kind != "qkv":
        return {"qkv".index(kind): full}
    q, kv = base.output_sizes
    return dict(enumerate(full.split([q, kv, kv])))


# -- in ----------------------------------------------------------------------------------------------


def plain(key: str) -> str:
    """A name of PEFT's without what it inserts."""
    return ".".join(p for p in key.removeprefix(PREFIX).split(".") if p not in ("default", "base_layer", "modules_to_save"))


def adapter(
    path: str, layer: LoraLayer, given: dict[str, torch.Tensor], config: Mapping[str, Any], fused: Fused
) -> dict[str, torch.Tensor]:
    """A layer's factors, full and by name, from PEFT's tensors, which are taken out of `given`; none if it has none for the layer.

    B is multiplied so that the layer's scaling gives PEFT's product. Raises ValueError for half an adapter, other sizes, and ranks above the layer's.
    """
    names = parts(layer, path, fused)
    ends = ("lora_embedding_A", "lora_embedding_B") if isinstance(layer, LoraEmbedding) else ("lora_A.weight", "lora_B.weight")
    pairs = [_pair(given, n, ends) for n in names]
    if not any(pairs):
        return {}
    factors = [scaling(n, p[0].shape[0], config) / layer.scaling if p else 1.0 for n, p in zip(names, pairs, strict=True)]
    a, starts = _joined(path, pairs, layer.lora_rank)
    bs = [_placed(path, p, start, factor, rows, layer.lora_rank)
          for p, start, factor, rows in zip(pairs, starts, factors, _rows(layer, len(names)), strict=True)]  # fmt: skip
    found = {f"{path}.lora_A.weight": a.t().contiguous() if isinstance(layer, LoraEmbedding) else a}
    own = [n for n, _ in layer.lora_B.named_parameters()]
    bs = bs if len(own) == len(bs) else [torch.cat(bs)]
    return found | {f"{path}.lora_B.{n}": b for n, b in zip(own, bs, strict=True)}


def _pair(given: dict[str, torch.Tensor], name: str, ends: tuple[str, str]) -> Pair | None:
    a, b = (given.pop(f"{name}.{end}", None) for end in ends)
    if a is None and b is None:
        return None
    if a is None or b is None:
        raise ValueError(f"the PEFT adapter of {name} is incomplete: it needs {ends[0]} and {ends[1]}")
    return a.float(), b.float()


def scaling(name: str, r: int, config: Mapping[str, Any]) -> float:
    """How PEFT scales the adapter of a module."""
    patterns = config.get("alpha_pattern") or {}
    alpha = next((v for k, v in patterns.items() if re.match(rf"(.*\.)?({k})$", name)), config["lora_alpha"])
    return alpha / (math.sqrt(r) if config.get("use_rslora") else r)


def _joined(path: str, pairs: Sequence[Pair | None], rank: int) -> tuple[torch.Tensor, list[int]]:
    """The different As below each other, with zeros up to the rank; and each pair's first row there."""
    different: list[torch.Tensor] = []
    starts = []
    for pair in pairs:
        place = 0 if pair is None else next((k for k, a in enumerate(different) if torch.equal(a, pair[0])), len(different))
        if pair is not None and place == len(different):
            different.append(pair[0])
        starts.append(sum(a.shape[0] for a in different[:place]))
    needed = sum(a.shape[0] for a in different)
    if needed > rank:
        what = "a rank" if len(different) == 1 else f"{len(different)} adapters, whose ranks add up to one,"
        raise ValueError(f"{path} has rank {rank}, but the PEFT adapter has {what} of {needed}: use LoraConfig(lora_rank={needed})")
    return sharded_weights.padded(torch.cat(different), 0, rank - needed), starts


def _placed(path: str, pair: Pair | None, start: int, factor: float, rows: int, rank: int) -> torch.Tensor:
    """B for the joined A: what belongs to other rows of it is zero."""
    if pair is None:
        return torch.zeros(rows, rank)
    a, b = pair
    if b.shape[0] != rows:
        raise ValueError(f"{path}: lora_B of the PEFT adapter has {b.shape[0]} rows, the layer {rows} outputs")
    found = torch.zeros(rows, rank, *b.shape[2:])
    found[:, start : start + a.shape[0]] = b * factor
    return found


def others(path: str, module: nn.Module, given: dict[str, torch.Tensor], fused: Fused) -> dict[str, torch.Tensor]:
    """A layer's own parameters and buffers that PEFT has (biases, layers that train as they are), taken out of `given` and joined where it is fused."""
    base = _base(module)
    names = parts(module, path, fused)
    found = {}
    for own in [n for n, _ in base.named_parameters(recurse=False)] + [n for n, _ in base.named_buffers(recurse=False)]:
        kind, letter = (own, "") if len(names) == 1 else (own.partition("_")[0], own.rpartition("_")[2])
        wanted = [names["qkv".index(letter)]] if letter in ("q", "k", "v") else names
        there = [v for n in wanted if (v := given.pop(f"{n}.{kind}", None)) is not None]
        if len(there) not in (0, len(wanted)):
            raise ValueError(f"the PEFT adapters have {kind} of only some of {', '.join(names)}, which are one layer here")
        if there:
            found[f"{path}.{own}"] = torch.cat(there) if len(there) > 1 else there[0]
    return found
