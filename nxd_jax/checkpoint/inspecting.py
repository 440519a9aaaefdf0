"""What a checkpoint holds, as plain data, without reading its tensors: what `nxd-ckpt inspect` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxd_jax.checkpoint import full_states, joining, name_maps, original_files, original_states, pipeline_ranks, reading, tags, writing
from nxd_jax.checkpoint.full_states import HUB, NXD, ORIGINAL
from nxd_jax.checkpoint.orbax_files import DamagedCheckpointError
from nxd_jax.checkpoint.safetensors_files import Hub


def tag_of(folder: Path) -> dict[str, Any]:
    """A folder in short: its format, whether it is complete, its size in bytes."""
    files = [p for p in folder.rglob("*") if p.is_file()] if folder.is_dir() else [folder]
    kind = full_states.format_of(folder)
    marked = (folder / tags.BEGUN).exists() or (folder / tags.DONE).exists()
    return {
        "name": folder.name,
        "format": kind or "unknown",
        "complete": (folder / tags.DONE).exists() if marked else kind is not None,
        "bytes": sum(p.stat().st_size for p in files),
        "files": len(files),
    }


def describe(folder: Path, trust: bool = False) -> dict[str, Any]:
    """A checkpoint: as `tag_of`, and the layout that wrote it and every tensor with shape, dtype, shards and, in a pipeline, the ranks that had it ("pp");
    "experts" is True for those that expert-parallel ranks share out. problem: why something of it is not shown."""
    found = tag_of(folder)
    found |= {"layout": {}, "tensors": {"model": {}, "optimizer": {}}, "other": _others(folder)}
    try:
        {NXD: _nxd, ORIGINAL: _original, HUB: _hub}[found["format"]](folder, found, trust)
    except KeyError:
        found["problem"] = f"{folder} holds no checkpoint of a known format"
    except (DamagedCheckpointError, FileNotFoundError, ValueError) as error:
        found["problem"] = str(error)
    return found


def _others(folder: Path) -> list[str]:
    return [name for name in (writing.SCHEDULER, writing.USER, writing.RANDOM, "config.json") if (folder / name).exists()]


def _tensor(shape: Any, dtype: object, shards: int, each: Any) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": str(dtype).removeprefix("torch."), "shards": shards, "shard_shape": list(each)}


def _nxd(folder: Path, found: dict[str, Any], trust: bool) -> None:
    for part, name in (("model", writing.MODEL), ("optimizer", writing.OPTIMIZER)):
        if not (folder / name).is_dir():
            continue
        own = reading.Folder(folder / name)
        found["layout"] = own.index["layout"]
        chunks = _chunks(own.path)
        for key, entry in own.entries.items():
            each = chunks.get(key, tuple(entry["stored"]))
            count = math.prod(math.ceil(n / m) for n, m in zip(entry["stored"], each, strict=True) if m)
            found["tensors"][part][key] = _tensor(entry["shape"], entry["dtype"], count, each)
            if entry.get("experts"):
                found["tensors"][part][key]["experts"] = True
            if (rank := own.rank_of(key)) is not None:
                found["tensors"][part][key]["pp"] = [rank]
        for key, other in own.aliases.items():
            found["tensors"][part][key] = {**found["tensors"][part][other], "same_as": other}


def _chunks(folder: Path) -> Mapping[str, tuple[int, ...]]:
    """The shapes of the pieces in which arrays lie on disk."""
    import orbax.checkpoint as ocp

    if not (folder / "arrays").is_dir():
        return {}
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            tree = checkpointer.metadata(folder.absolute() / "arrays").item_metadata.tree
    except (OSError, ValueError, KeyError) as error:
        raise DamagedCheckpointError(f"the arrays in {folder} cannot be read: {str(error).splitlines()[0]}") from error
    return {name: tuple(a.storage.chunk_shape) for name, a in tree.items() if a.storage is not None and a.storage.chunk_shape}


def _original(folder: Path, found: dict[str, Any], trust: bool) -> None:
    files = original_files.find(folder, trust)
    found["layout"] = files.sizes
    if files.model:
        state = original_states.model_state(files.model)
        for name, h in state.parts.items():
            experts = _experts(state, name)
            shards = len(h) * (files.sizes["ep"] if experts else 1)
            found["tensors"]["model"][name] = _tensor(h[0].shape, h[0].dtype, shards, h[0].shape) | experts | _ranks(state.ranks_of(name))
    for stage in range(files.sizes["pp"] if files.optimizer else 0):
        _original_optimizer(files, stage, found)


def _experts(state: original_states.ModelState, name: str) -> dict[str, Any]:
    """ "experts": True for a tensor that expert-parallel ranks share out, as its files say, or its name in NxD's modules."""
    peers = state.peers.get(name)
    split = joining.rule_for(name, name_maps.EXPERTS)
    if peers is None or not (split is not None and split.experts if peers.mark is None else peers.mark.experts):
        return {}
    return {"experts": True}


def _ranks(ranks: list[int]) -> dict[str, Any]:
    return {pipeline_ranks.AXIS: ranks} if ranks else {}


def _original_optimizer(files: original_files.Files, stage: int, found: dict[str, Any]) -> None:
    """The optimizer of a pipeline rank: its parameters have numbers for names, which count from 0 on each rank."""
    data = files.optimizer[original_files.Rank(pp=stage)]
    zero = found["zero1"] = original_states.is_zero(data.data)
    several = files.sizes["pp"] > 1
    count = sum(rank.pp == stage for rank in files.optimizer)
    for index, own in data.data["base_state" if zero else "state"].items():
        for kind, value in own.items():
            if original_files.is_tensor(value):
                shape, dtype = data.describe(value)
                name = f"pp_rank_{stage:02d}: {kind}/{index}" if several else f"{kind}/{index}"
                found["tensors"]["optimizer"][name] = _tensor(shape, dtype, count, shape) | _ranks([stage] if several else [])


def _hub(folder: Path, found: dict[str, Any], trust: bool) -> None:
    hub = Hub(folder)
    found["tensors"]["model"] = {
        name: {**_tensor(e.shape, e.dtype, 1, e.shape), "file": hub.files[name].name} for name, e in hub.entries.items()
    }


def size(shown: Mapping[str, Any]) -> int:
    """Bytes of a tensor that `describe` lists, all shards of NxD's counted."""
    import torch

    count = math.prod(shown["shape"])
    return count * int(getattr(torch, shown["dtype"]).itemsize)
