"""The whole module's state dict from every rank's: `consolidate_sharded_state_dicts` and `consolidate_sharded_model_checkpoints`.

Files that torch_xla wrote are joined, too, and need nothing but torch.
"""

from __future__ import annotations

import glob
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_bridge.fsdp import naming, optimizer_states
from torch_bridge.runtime import whole_files

logger = logging.getLogger("torch_bridge")

State = Mapping[str, torch.Tensor]


def consolidate_sharded_state_dicts(state_dict_list: Sequence[State], shard_metadata: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """`fsdp.consolidate_sharded_state_dicts`: the state dict of the module without wrappers, from every rank's `model.state_dict()`, in rank order.

    shard_metadata: of any rank, `model.get_shard_metadata()`. Buffers are rank 0's, with the dtypes that they had before `buffer_dtype`. Tied parameters have
    all their names, if the metadata is ours (torch_xla's knows the first one only).

    Raises ValueError for another number of state dicts than ranks, and for entries that the metadata or another rank does not have.
    """
    count = shard_metadata["world_size"]
    if len(state_dict_list) != count:
        raise ValueError(
            f"the model was shared out among {count} ranks, got {len(state_dict_list)} state dicts: give every rank's, in rank order"
        )
    whole: dict[str, torch.Tensor] = OrderedDict()
    for entry, value in state_dict_list[0].items():
        found = naming.unit_and_shard(entry)
        if found is None:
            dtype = shard_metadata.get("buffer_info", {}).get(entry, {}).get("_orig_dtype")
            whole[naming.plain(entry)] = value if dtype is None else value.to(dtype)
        else:
            whole.update(_joined(entry, *found, state_dict_list, shard_metadata))
    for other, name in shard_metadata.get("tied_info", {}).items():
        if name in whole:
            whole[other] = whole[name]
    return whole


def _joined(entry: str, unit: str, name: str, states: Sequence[State], metadata: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The parameters that a shard is a part of."""
    if name not in metadata["shard_info"].get(unit, {}):
        raise ValueError(
            f"{entry} is not in the shard metadata: it is of another model; save model.get_shard_metadata() beside model.state_dict()"
        )
    without = [rank for rank, s in enumerate(states) if entry not in s]
    if without:
        raise ValueError(f"{entry} is not in the state dicts of ranks {', '.join(map(str, without))}: they are of another model")
    return _split(unit, name, [s[entry] for s in states], metadata)


def _split(unit: str, name: str, parts: Sequence[torch.Tensor], metadata: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """From every rank's part of a shard what it consists of, by name in the module without wrappers."""
    info = metadata["shard_info"][unit][name]
    size = torch.Size(info["_orig_size"])
    vector = torch.cat([part.detach().reshape(-1) for part in parts])[: size.numel()].clone()
    full = naming.joined(unit, info["_orig_name"])
    flat = metadata.get("flatten_info", {}).get(full)
    if flat is None:
        return {naming.plain(full): vector.view(size)}
    names, shapes, lengths = flat
    above = full.rpartition(".")[0]
    pieces = vector.split(list(lengths))
    return {naming.plain(naming.joined(above, n)): piece.view(shape).clone() for n, piece, shape in zip(names, pieces, shapes, strict=True)}


def consolidate_sharded_optimizer_states(states: Sequence[Mapping[str, Any]], shard_metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's state of whole parameters, by name, from every rank's `optimizer.state_dict()`, in rank order (torch_xla has no such function).

    shard_metadata: of any rank, `model.get_shard_metadata(optimizer)`, which names the optimizer's parameters. Returns {"state": {name: {key: value}},
    "param_groups": [{..., "params": [names]}]}; a wrapper's `cut_optimizer_state` makes shards of it, for any number of ranks. Raises ValueError for another
    number of states than ranks, without names, and for state that is neither a shard's shape nor the same on all ranks.
    """
    count = shard_metadata["world_size"]
    if len(states) != count:
        raise ValueError(
            f"the model was shared out among {count} ranks, got {len(states)} optimizer states: give every rank's, in rank order"
        )

    def split(entry: str, parts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        unit, name = naming.unit_and_shard(entry) or ("", "")
        return _split(unit, name, parts, shard_metadata)

    return optimizer_states.joined(states, shard_metadata, split)


def consolidate_sharded_model_checkpoints(
    ckpt_prefix: str, ckpt_suffix: str = "*.pth", save_path: str = "", save_model: bool = True
) -> tuple[dict[str, torch.Tensor], str | None]:
    """`fsdp.consolidate_sharded_model_checkpoints`: join the files `ckpt_prefix + ckpt_suffix` (a pattern), one for each rank, whatever their names. A prefix
    with `[` in it is taken as it is if there are such files.

    Each holds a dict with "model" (`model.state_dict()`) and "shard_metadata" (`model.get_shard_metadata()`). With `save_model`, {"model": state dict} is saved
    in `save_path`, by default `ckpt_prefix + "_consolidated.pth"`. If the files have "optimizer" (`optimizer.state_dict()`) and the metadata names its
    parameters (`model.get_shard_metadata(optimizer)`), so has this one (`consolidate_sharded_optimizer_states`).
    Returns (the state dict, the path of the file or None).

    Raises FileNotFoundError if there are no such files, ValueError if they are not one of each rank or lack one of these keys.
    """
    pattern = ckpt_prefix + ckpt_suffix
    target = save_path or f"{ckpt_prefix}_consolidated.pth"
    literal = glob.escape(ckpt_prefix) + ckpt_suffix
    paths = sorted(path for path in glob.glob(literal) or glob.glob(pattern) if path != target)
    if not paths:
        raise FileNotFoundError(f"no file matches {pattern}: ckpt_prefix and ckpt_suffix together are the pattern of all ranks' files")
    found = [(path, torch.load(path, map_location="cpu", weights_only=False)) for path in paths]
    logger.info("found %d checkpoint files in %s", len(found), pattern)
    for path, ckpt in found:
        missing = [key for key in ("model", "shard_metadata") if not isinstance(ckpt, Mapping) or key not in ckpt]
        if missing:
            raise ValueError(
                f'{path} has no {" and no ".join(missing)}: save {{"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}} for each rank'
            )
    found.sort(key=lambda pair: int(pair[1]["shard_metadata"]["rank"]))
    ranks = [int(ckpt["shard_metadata"]["rank"]) for _, ckpt in found]
    count = int(found[0][1]["shard_metadata"]["world_size"])
    if ranks != list(range(count)):
        raise ValueError(
            f"{pattern} should be one file for each of {count} ranks; these are of ranks {', '.join(map(str, ranks))}: some are missing, or other files match"
        )
    whole = consolidate_sharded_state_dicts([ckpt["model"] for _, ckpt in found], found[0][1]["shard_metadata"])
    if not save_model:
        return whole, None
    whole_files.save({"model": whole, **_optimizer([ckpt for _, ckpt in found])}, target)
    logger.info("saved the consolidated model in %s", target)
    return whole, target


def _optimizer(ckpts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if any("optimizer" not in ckpt for ckpt in ckpts):
        return {}
    try:
        return {"optimizer": consolidate_sharded_optimizer_states([ckpt["optimizer"] for ckpt in ckpts], ckpts[0]["shard_metadata"])}
    except optimizer_states.Unnamed as error:
        logger.warning("the model is joined, without its optimizer's state: %s", error)
        return {}
