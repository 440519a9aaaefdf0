"""A checkpoint of any format as full tensors that are read one at a time, without a model and without ranks: what `nxd-ckpt` converts and compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nxd_jax.checkpoint import expert_files, joining, name_maps, orbax_files, original_files, original_states, reading, writing
from nxd_jax.checkpoint.joining import Need, Parts, Rules
from nxd_jax.checkpoint.name_maps import NameMap
from nxd_jax.checkpoint.safetensors_files import Hub, planned
from nxd_jax.tensor_parallel import expert_shares, expert_states

NXD, ORIGINAL, HUB = "nxd", "original", "safetensors"

COPIED = (writing.SCHEDULER, writing.USER)
"""Files that are the same in our checkpoints and NxD's."""


@dataclasses.dataclass(frozen=True)
class Full:
    """A full tensor. need: its shape and how ranks share it out, as far as that is known. apart: ranks hold different values, stacked along dim 0."""

    need: Need
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    apart: tuple[int, ...] | None = None

    @property
    def bytes(self) -> int:
        return int(np.prod(self.need.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclasses.dataclass
class FullState:
    """A checkpoint. model: by our names; aliases: other names of the same tensors. optimizer: by `<kind>/<name>`; other: what of an optimizer is no tensor (as
    `writing.optimizer_item` has it), None without an optimizer. files: what is copied as it is. layout: of the ranks that wrote it."""

    format: str
    model: dict[str, Full] = dataclasses.field(default_factory=dict)
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    optimizer: dict[str, Full] = dataclasses.field(default_factory=dict)
    other: dict[str, Any] | None = None
    files: dict[str, Path] = dataclasses.field(default_factory=dict)
    layout: dict[str, int] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class How:
    """What files of NxD do not say.

    rules: how ranks share tensors out, by names. config: of the model (heads, for fused q, k and v). copies: ranks that hold each K/V head. shapes: full
    tensors as another checkpoint has them. parameters: the optimizer's, in order, those of pipeline rank 0 first. trust: run code in files. optimizer: read it.
    """

    rules: Rules = ()
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    copies: int = 1
    shapes: Mapping[str, Need] = dataclasses.field(default_factory=dict)
    parameters: Sequence[str] = ()
    trust: bool = False
    optimizer: bool = True


def format_of(folder: Path) -> str | None:
    """Which format a folder has, None if none is known."""
    if (folder / writing.MODEL / orbax_files.INDEX).is_file() or (folder / writing.OPTIMIZER / orbax_files.INDEX).is_file():
        return NXD
    if original_files.is_original(folder):
        return ORIGINAL
    if folder.suffix == ".safetensors" or any(folder.glob("*.safetensors")):
        return HUB
    return None


def read(folder: Path, how: How, names: NameMap | None = None) -> FullState:
    """A checkpoint's full tensors. names: between a Hugging Face folder's names and ours. Raises ValueError if it does not hold any, or not enough is known."""
    kind = format_of(folder)
    if kind == NXD:
        return of_nxd(folder, how)
    if kind == ORIGINAL:
        return of_original(folder, how)
    if kind == HUB:
        return of_hub(folder, names or NameMap())
    raise ValueError(
        f"{folder} holds no checkpoint: neither arrays of nxd_jax (model/{orbax_files.INDEX}), nor files of NxD, nor safetensors"
    )


# -- ours --------------------------------------------------------------------------------------------


def of_nxd(folder: Path, how: How) -> FullState:
    """A checkpoint of ours."""
    found = FullState(NXD, files={name: folder / name for name in COPIED if (folder / name).is_file()})
    has_model = (folder / writing.MODEL).is_dir()
    if has_model:
        arrays = reading.Folder(folder / writing.MODEL)
        found.model, found.aliases, found.layout = _arrays(arrays), dict(arrays.aliases), arrays.index["layout"]
    if how.optimizer and (folder / writing.OPTIMIZER).is_dir():
        arrays = reading.Folder(folder / writing.OPTIMIZER)
        found.optimizer, found.layout = _arrays(arrays), arrays.index["layout"]
        found.other = original_files.load(arrays.path / writing.OBJECTS, how.trust)
        for label, full in found.optimizer.items():
            kind, _, name = label.partition("/")
            if kind == original_states.MASTER and has_model and name not in found.model and name not in found.aliases:
                found.model[name] = full  # a weight that was left out because this is there
    return found


def _arrays(folder: reading.Folder) -> dict[str, Full]:
    return {name: _array(folder, name, entry) for name, entry in folder.entries.items()}


def _array(folder: reading.Folder, name: str, entry: Mapping[str, Any]) -> Full:
    def read() -> torch.Tensor:
        return folder._tensor(stored_array(folder, name), None, entry)

    apart = tuple(entry["apart"]) if "apart" in entry else None
    return Full(stored_as(entry), getattr(torch, entry["dtype"]), read, apart)


def stored_array(folder: reading.Folder, name: str) -> np.ndarray:
    """An array as it is stored. Raises DamagedCheckpointError if it is not on disk."""
    found = folder.restore({name: None})[name]
    if not isinstance(found, np.ndarray):  # Orbax gives back what was asked for
        raise orbax_files.DamagedCheckpointError(
            f"{name} is in {folder.path / orbax_files.INDEX}, but not among the arrays. Load another tag"
        )
    return found


def stored_as(entry: Mapping[str, Any]) -> Need:
    """What an index says of a tensor: its shape, and where it has a dim more on disk, that several are fused."""
    shape, stored, experts = tuple(entry["shape"]), tuple(entry["stored"]), bool(entry.get("experts"))
    dim = entry.get("dim")
    if len(stored) != len(shape) + 1:
        return Need(shape, dim, experts=experts)
    found = next(
        d
        for d in range(len(shape))
        if stored[:d] == shape[:d] and stored[d] * stored[d + 1] >= shape[d] and stored[d + 2 :] == shape[d + 1 :]
    )
    return Need(shape, found, stored[found], experts=experts)


# -- Hugging Face's ----------------------------------------------------------------------------------


def of_hub(path: Path, names: NameMap) -> FullState:
    """The tensors of a Hugging Face folder under our names."""
    hub = Hub(path)
    shapes = {name: (e.shape, e.dtype) for name, e in hub.entries.items()}
    made = names.from_hub(list(hub.entries))
    found = FullState(HUB, config=hub.config)
    for p in planned(made, shapes, hub.read):
        split = joining.rule_for(p.name, names.rules)
        found.model[p.name] = Full(Need(p.shape, split.dim, split.stride) if split is not None else Need(p.shape), p.dtype, p.read)
    ours = {m.sources[0]: m.name for m in made if len(m.sources) == 1}
    found.aliases = {name: ours[other] for name, other in hub.tied().items() if name not in found.model}
    return found


# -- NxD's -------------------------------------------------------------------------------------------


def of_original(folder: Path, how: How) -> FullState:
    """A checkpoint of NxD. Raises ValueError naming the tensors of which it is not known how ranks share them out, and what to say about them."""
    files = original_files.find(folder, how.trust)
    found = FullState(ORIGINAL, layout=files.sizes, files={name: folder / name for name in COPIED if (folder / name).is_file()})
    state = original_states.model_state(files.model) if files.model else original_states.ModelState({}, [], set(), {})
    if differing := state.differing():
        raise ValueError(f"{folder}: " + "; ".join(differing[:8]))
    unite_experts(state, files, how)
    needs = needs_of(state.parts, files.sizes["tp"], how)
    needs |= {name: dataclasses.replace(needs[name], experts=True) for name in state.experts}
    joints = {key: joining.joint(state.parts, key, needs) for key in needs if joining.source_of(state.parts, key) not in state.absent}
    found.model = {key: Full(needs[key], j.dtype, j.read) for key, j in joints.items()}
    if how.optimizer and files.optimizer:
        _add_optimizer(found, files, state, needs, how)
    missing = [key for key in needs if key not in found.model]
    if missing:
        raise ValueError(
            f"{folder}: the values of {reading.listed(missing)} are only in the optimizer's master weights, which were not read"
        )
    return found


def unite_experts(state: original_states.ModelState, files: original_files.Files, how: How) -> None:
    """Join what expert-parallel ranks had of experts. Raises ValueError naming the tensors of which it is not known whether they are of experts."""
    unknown = []
    marked = any(peers.mark is not None for peers in state.peers.values())
    for name, peers in state.peers.items():
        known = how.shapes.get(name)
        split = joining.rule_for(name, how.rules)
        held = expert_files.experts_of(name, peers.local, files.sizes["ep"], known, peers.mark)
        if held is None and not marked and known is None:
            experts = split.experts if split is not None else expert_files.differ(peers)
            if experts is None:
                unknown.append(name)
            held = expert_shares.runs(files.sizes["ep"], peers.local[0]) if experts else None
        if held is not None:
            state.unite(name, held)
    if unknown:
        raise ValueError(
            f"whether {files.sizes['ep']} expert-parallel ranks share out {reading.listed(unknown)}, which hold one number alone, is not in NxD's files: "
            f"{rules_help()}"
        )


def needs_of(parts: Parts, tp: int, how: How) -> dict[str, Need]:
    """What the full tensors are, under our names."""
    found: dict[str, Need] = {}
    unknown: list[str] = []
    for name, held in parts.items():
        if name.endswith("_qkv") and joining.fused_name(name.removesuffix("qkv") + "q"):
            found.update(_fused_needs(name, held[0].shape, tp, how))
            continue
        need = _need(name, held, tp, how)
        if need is None:
            unknown.append(name)
        else:
            found[name] = need
    if unknown:
        raise ValueError(f"how {tp} tensor-parallel ranks share out {reading.listed(unknown)} is not in NxD's files: {rules_help()}")
    return found


def rules_help() -> str:
    """How a user says how tensors are shared out."""
    return (
        f"give a map (--map {', '.join(name_maps.known())}) or rules for names, such as --split '.*down_proj.weight=1' (along dim 1), "
        "'.*gate_up_proj.weight=0x2' (two fused tensors along dim 0), '.*norm.*=none' (all have it), or of experts '.*mlp_op.down_proj.weight=experts+1'"
    )


def _need(name: str, held: Sequence[joining.Held], tp: int, how: How) -> Need | None:
    local = held[0].shape
    known = how.shapes.get(name)
    if known is not None:
        return _compared(local, known)
    split = joining.rule_for(name, how.rules)
    fused = joining.fused_name(name)
    if split is not None:
        copies = how.copies if fused is not None and fused[1] else 1
        return dataclasses.replace(split, copies=copies).need(local, tp) if split.dim is not None else split.need(local, tp)
    if tp == 1:
        return Need(local)
    first, *rest = [h.read() for h in held]
    if all(torch.equal(first, other) for other in rest):
        constant = first.numel() > 0 and bool((first == first.flatten()[0]).all())
        return None if constant else Need(local)
    return Need((local[0] * tp,), 0) if len(local) == 1 else None


def _compared(local: Sequence[int], known: Need) -> Need:
    """How a tensor is shared out, given its full shape: along the dim that differs."""
    if known.dim is not None or len(local) != len(known.shape):
        return known
    dims = [d for d, (a, b) in enumerate(zip(local, known.shape, strict=True)) if a != b]
    return dataclasses.replace(known, dim=dims[0]) if len(dims) == 1 else known


def _fused_needs(name: str, local: Sequence[int], tp: int, how: How) -> dict[str, Need]:
    names = joining.separate_names(name)
    if all(n in how.shapes for n in names):
        return {n: dataclasses.replace(how.shapes[n], dim=0) for n in names}
    heads = name_maps.heads_of(how.config)
    if heads is None:
        raise ValueError(
            f"{name} holds q, k and v, and NxD's files do not say how many rows each has: give the model's config.json (--config) with num_attention_heads and "
            "num_key_value_heads"
        )
    units = heads.query + 2 * heads.kv * how.copies
    if local[0] * tp % units:
        raise ValueError(
            f"{name} has {local[0]} rows on each of {tp} ranks, which {heads.query} query heads and {heads.kv} K/V heads {how.copies} times do not divide: are "
            "config.json (--config) and the copies of K and V (--kv-multiplier) right?"
        )
    each = local[0] * tp // units
    rows = (heads.query * each, heads.kv * each, heads.kv * each)
    return {n: Need((r, *local[1:]), 0) for n, r in zip(names, rows, strict=True)}


def _add_optimizer(
    found: FullState, files: original_files.Files, state: original_states.ModelState, needs: Mapping[str, Need], how: How
) -> None:
    names = _parameter_names(files, state, how)
    got = original_states.optimizer_state(files, names, lambda n: state.local(n) if n in state.parts else None, state.experts.get)
    odd = [label for label, held in got.odd.items()]
    if odd:
        raise ValueError(
            f"{files.folder}: {reading.listed(odd)} of the optimizer are not shaped like their parameters; convert the model alone (--model-only)"
        )
    keys = {
        name: joining.separate_names(name) if name.endswith("_qkv") and name not in needs else [name]
        for groups in names
        for group in groups
        for name in group
    }
    for kind in got.kinds:
        for key in (k for own in keys.values() for k in own):
            if joining.is_there(got.parts, f"{kind}/{key}"):
                j = joining.joint(got.parts, key, needs, f"{kind}/")
                found.optimizer[f"{kind}/{key}"] = Full(needs[key], j.dtype, j.read)
                if kind == original_states.MASTER and key not in found.model:
                    found.model[key] = found.optimizer[f"{kind}/{key}"]
    master = [label.partition("/")[2] for label in found.optimizer if label.startswith(f"{original_states.MASTER}/")]
    groups = [{**g, "params": [k for name in g["params"] for k in keys[name]]} for g in got.groups]
    found.other = {
        "state": {key: plain for name, plain in got.plain.items() for key in keys[name]},
        "param_groups": groups,
        "master": master,
        "class": "",
        "order": [k for group in groups for k in group["params"]],
        "like": sorted(label for label in found.optimizer if not label.startswith(f"{original_states.MASTER}/")),
    }


def _parameter_names(files: original_files.Files, state: original_states.ModelState, how: How) -> list[list[list[str]]]:
    """For each pipeline rank the names of the parameters in each group: those given, or the rank's tensors if there is one group with as many of the same
    shapes."""
    counts = [original_states.counts(files.optimizer, stage) for stage in range(files.sizes["pp"])]
    given = list(how.parameters)
    if given and len(given) != sum(map(sum, counts)):
        raise ValueError(
            f"{files.folder}: the optimizer has {sum(map(sum, counts))} parameters, --param-names lists {len(given)}"
            + _of_each_rank(counts)
        )
    found, start = [], 0
    for stage, sizes in enumerate(counts):
        own = given[start : start + sum(sizes)] if given else state.stages[stage]
        start += sum(sizes)
        shapes = _shapes(files.optimizer[original_files.Rank(pp=stage)].data, own, state)
        fits = len(own) == sum(sizes) and all(
            tuple(shapes[k]) == state.local(n) for k, n in enumerate(own) if shapes and k in shapes and n in state.parts
        )
        if not fits or (len(sizes) > 1 and not given):
            raise ValueError(
                f"{files.folder}: the optimizer{_on_rank(stage, counts)} has groups of {sizes} numbered parameters, and which are which is not in NxD's files: "
                f"list their names in order, one on a line, in a file (--param-names FILE){_of_each_rank(counts)}, convert the model alone (--model-only), or "
                "load both with nxd.load_checkpoint and save them"
            )
        ends = np.cumsum(sizes).tolist()
        found.append([own[end - size : end] for size, end in zip(sizes, ends, strict=True)])
    return found


def _shapes(data: Mapping[str, Any], own: Sequence[str], state: original_states.ModelState) -> Mapping[int, Any]:
    """The shapes of an optimizer's parameters by number. own: their names. (NxD numbers experts by themselves.)"""
    found: Mapping[int, Any] = data.get("shape_info") or {}
    if not expert_states.is_combined(data):
        return found
    start = data["ep_shape_info_offset"]
    experts = [k for k, name in enumerate(own) if name in state.experts]
    others = [k for k, name in enumerate(own) if name not in state.experts]
    if sum(k < start for k in found) != len(others):
        return dict.fromkeys(range(len(own)), ())
    return {others[k] if k < start else experts[k - start]: shape for k, shape in found.items() if k < start or k - start < len(experts)}


def _on_rank(stage: int, counts: Sequence[Sequence[int]]) -> str:
    return f" of pipeline rank {stage}" if len(counts) > 1 else ""


def _of_each_rank(counts: Sequence[Sequence[int]]) -> str:
    """How names are listed for several pipeline ranks."""
    if len(counts) == 1:
        return ""
    return f", those of pipeline rank 0 first, then those of rank 1 and so on ({', '.join(str(sum(sizes)) for sizes in counts)} of them)"
