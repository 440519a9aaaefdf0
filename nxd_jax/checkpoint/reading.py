"""From a checkpoint's folder into a model and an optimizer, whatever ranks wrote it and whatever ranks there are now."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from nxd_jax import _progress
from nxd_jax.checkpoint import arrays, contents, heads, orbax_files, pipeline_ranks, placement, united, writing
from nxd_jax.checkpoint.contents import Part
from nxd_jax.checkpoint.orbax_files import DamagedCheckpointError
from nxd_jax.checkpoint.placement import Placement
from nxd_jax.tensor_parallel import full_weights
from torch_bridge import nested
from torch_bridge.ir import dtypes
from torch_bridge.mesh import world
from torch_bridge.mesh.places import Place
from torch_bridge.recorder import placed
from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.runtime import executor, transfer

logger = logging.getLogger("nxd_jax")

BATCH = 2 * 2**30
"""Bytes of full arrays that are read at once."""

_NOT_LOADED = {"params", "fused", "foreach", "capturable", "differentiable"}
"""Options of an optimizer's groups that say how it computes, not what."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A tensor to fill from a folder. keys: of its arrays; where: its placement, None for one on the CPU; tensor: what it is or is like. reduced: it has one
    entry along some dims of `tensor`."""

    label: str
    keys: tuple[str, ...]
    where: Placement | None
    tensor: torch.Tensor
    reduced: bool = False

    @property
    def home(self) -> Place | None:
        """The place that the tensor lies at, such as the cores of its pipeline stage; None on the whole mesh."""
        return placed.place_of(self.tensor) if self.where is not None and isinstance(self.tensor, XLATensor) else None


class Folder:
    """A folder of arrays with its index."""

    def __init__(self, path: Path):
        self.path = path
        self.index = orbax_files.read_index(path)
        self.entries: dict[str, Any] = self.index["tensors"]
        self.aliases: dict[str, str] = self.index["aliases"]

    def key(self, name: str) -> str:
        """The name that an array is stored under."""
        return self.aliases.get(name, name)

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.entries

    def entry(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.entries[self.key(name)]
        return found

    def rank_of(self, name: str) -> int | None:
        """The pipeline rank that an array lay with; None without a pipeline."""
        found: int | None = self.entry(name).get(pipeline_ranks.AXIS)
        return found

    def apart(self, name: str, like: torch.Tensor | None = None) -> Placement | None:
        """The placement of an array that was different on each rank, if ranks are laid out as they were; None for others.

        like: a tensor that must be on xla and have its shape.
        """
        entry = self.entry(name)
        if "apart" not in entry or self.index["layout"] != writing.layout():
            return None
        if like is not None and (like.device.type != "xla" or list(like.shape) != entry["shape"][1:]):
            return None
        return placement.apart(entry["shape"][1:], entry["apart"])

    def names(self) -> dict[str, None]:
        """Of all arrays, also those stored under another name, in one order on all processes: in it arrays are read and ranks exchange parts."""
        return dict.fromkeys([*self.entries, *self.aliases])

    def objects(self) -> dict[str, Any]:
        """What is no tensor. Raises DamagedCheckpointError."""
        return load_object(self.path / writing.OBJECTS)

    def full(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU."""
        like = torch.empty(self.entry(name)["shape"], device="meta")
        return next(value for _, value in self.read([Wanted(name, (name,), None, like)]))

    def read(self, wanted: Sequence[Wanted]) -> Iterable[tuple[Wanted, torch.Tensor]]:
        """The tensors, batch by batch: on xla as each rank holds them, or on the CPU.

        A batch is of one place: processes that share a place's ranks, and not others, read the same ones in one order.
        """
        by_home: dict[Place | None, list[Wanted]] = {}
        for w in wanted:
            by_home.setdefault(w.home, []).append(w)
        batches = []
        for own in by_home.values():
            sizes = {str(k): sum(_bytes(self.entry(key)) for key in w.keys) for k, w in enumerate(own)}
            batches += [[own[int(k)] for k in group] for group in orbax_files.batches(sizes, BATCH)]
        for batch in _progress.bar(batches, f"loading {self.path.name}", 2):
            yield from self._batch(batch)

    def _batch(self, wanted: Sequence[Wanted]) -> list[tuple[Wanted, torch.Tensor]]:
        targets: dict[tuple[str, int], Any] = {}
        requests: list[dict[str, Any]] = [{}]
        for number, w in enumerate(wanted):
            hows = arrays.blocks(w.where) if w.where is not None else [None] * len(w.keys)
            for key, how in zip(w.keys, hows, strict=True):
                stored = self.key(key)
                layer = next((k for k, r in enumerate(requests) if stored not in r), len(requests))
                if layer == len(requests):
                    requests.append({})
                dtype = dtypes.to_jax(getattr(torch, self.entry(key)["dtype"]))
                requests[layer][stored] = None if how is None else _fitting(how, self.entry(key), dtype, w.home)
                targets[key, number] = layer, stored, how
        found = [self.restore(r) for r in requests]
        made = []
        for number, w in enumerate(wanted):
            parts = []
            for key in w.keys:
                layer, stored, how = targets[key, number]
                parts.append(self._tensor(self._there(found[layer][stored], stored), how, self.entry(key), w.home))
            made.append((w, arrays.joined(parts, w.where) if w.where is not None else self._on_cpu(parts, w)))
        executor.sync()
        return made

    def restore(self, targets: Mapping[str, jax.ShapeDtypeStruct | None]) -> dict[str, Any]:
        """`orbax_files.restore`, with those arrays, too, that have no entries and so are in the index alone."""
        empty = {}
        for name, target in targets.items():
            entry = self.entry(name)
            if not _bytes(entry):
                sharding = None if target is None else target.sharding
                empty[name] = orbax_files.empty(entry["stored"], arrays.jax_dtype(entry["dtype"]), sharding)
        return orbax_files.restore(self.path, {name: t for name, t in targets.items() if name not in empty}) | empty

    def _there(self, array: object, name: str) -> Any:
        """An array that was read: Orbax gives back what was asked for in the place of one that is missing."""
        if not hasattr(array, "shape") or isinstance(array, jax.ShapeDtypeStruct):
            raise DamagedCheckpointError(f"the arrays in {self.path} are damaged: {name} is missing. Load another tag")
        return array

    def _tensor(self, array: Any, how: arrays.Blocks | None, entry: Mapping[str, Any], home: Place | None = None) -> torch.Tensor:
        dtype = getattr(torch, entry["dtype"])
        if how is not None:
            return arrays.piece_tensor(array, how, dtype, home)
        host = transfer.from_numpy(np.array(array).reshape(entry["stored"])).to(dtype)
        return _cut_to(host, entry)

    def _on_cpu(self, parts: list[torch.Tensor], w: Wanted) -> torch.Tensor:
        full = parts[0] if len(parts) == 1 else tuple(parts)
        if full_weights.is_divided(w.tensor):
            return full_weights.cut_full(w.tensor, full, world.first())
        assert isinstance(full, torch.Tensor)
        return full.reshape(w.tensor.shape)


def _fitting(how: arrays.Blocks, entry: Mapping[str, Any], dtype: Any, home: Place | None) -> Any:
    if len(how.shape) != len(entry["stored"]):
        raise ValueError(
            f"an array of shape {entry['stored']} was stored, {list(how.shape)} is needed: the layer fuses tensors in another way (stride)"
        )
    return how.target(dtype, home)


def _cut_to(host: torch.Tensor, entry: Mapping[str, Any]) -> torch.Tensor:
    """An array as stored, in its full shape: without rows that pad it, fused tensors below each other."""
    shape = list(entry["shape"])
    if host.dim() == len(shape):
        return host[tuple(slice(n) for n in shape)].reshape(shape)
    return host.reshape(shape)


def _bytes(entry: Mapping[str, Any]) -> int:
    return int(np.prod(entry["stored"])) * getattr(torch, entry["dtype"]).itemsize


def load_object(path: Path, weights_only: bool = False) -> Any:
    """A pickled file. Raises DamagedCheckpointError if it is missing or cannot be read. Runs the code that it contains, unless `weights_only`: only for
    files that you trust.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=weights_only)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{path} is missing. Load another tag") from error
    except Exception as error:
        raise DamagedCheckpointError(
            f"{path} is damaged: {str(error).splitlines()[0] if str(error) else type(error).__name__}. Load another tag"
        ) from error


# -- models ------------------------------------------------------------------------------------------


def _refuse_empty(name: str, given: object) -> None:
    if isinstance(given, dict) and not given:
        raise ValueError(
            f"{name}={{}}: what is in the files is divided among ranks as the {name} is, and an empty dict does not say how. Give the {name} itself, and read "
            f"{name}.state_dict() then"
        )


def load_model(path: Path, model: contents.Model, strict: bool, master: Path | None) -> None:
    """Fill a module from a folder. master: an optimizer's folder whose master weights stand in for weights that were not written.

    Raises RuntimeError for missing or unexpected names (unless not `strict`) and for other shapes, ValueError for an empty dict, before anything changes.
    """
    _refuse_empty("model", model)
    folder = Folder(path)
    other = folder.objects()["other"]
    module = contents.unwrapped(model)
    adapters = hasattr(module, "checkpoint_targets")
    filled = module.checkpoint_targets(list(folder.names()), other.get("lora_config")) if adapters else module
    heads.mark(module)
    target = contents.of_model(filled, saving=False)
    spare = Folder(master) if master is not None and (master / orbax_files.INDEX).is_file() else None
    here: list[Wanted] = []
    there: list[Wanted] = []
    missing: list[str] = []
    used: set[str] = set()
    for name, (t, where) in target.tensors.items():
        keys = contents.keys_of(name, where if where is not None else _placement_on_cpu(t))
        if all(k in folder for k in keys):
            here.append(Wanted(name, tuple(keys), folder.apart(keys[0], t) or where, t))
            used.update(keys)
        elif spare is not None and all(f"master/{k}" in spare for k in keys):
            there.append(Wanted(name, tuple(f"master/{k}" for k in keys), where, t))
        else:
            missing.append(name)
    own = Names(
        [pipeline_ranks.said(name, pipeline_ranks.rank_of(target.tensors[name][0])) for name in missing],
        used,
        _shape_problems(folder, here) + (_shape_problems(spare, there) if spare is not None else []),
    )
    every = own.of_all() if united.needed() else own
    left = folder.names().keys() - every.used - _inside(every.used, folder)
    unexpected = [pipeline_ranks.said(name, folder.rank_of(name)) for name in sorted(left)]
    unexpected += [k for k in other if k not in target.other["other"] and k != "lora_config"]
    refuse(path, module, every.problems, every.missing, [] if strict and adapters else unexpected, strict)
    _warn_of_heads(folder, here)
    if there:
        logger.info("Sharded master weights found in optim states, ignoring model weight tensors")
    with torch.no_grad():
        for source, wanted in ((folder, here), (spare, there)):
            for w, value in source.read(wanted) if source is not None else ():
                w.tensor.detach().copy_(value.reshape(w.tensor.shape))
    executor.sync()
    _set_extra_state(module, other)


@dataclasses.dataclass
class Names:
    """How a model's names fit those of a checkpoint. missing: there, as they are said; used: of arrays that are read; problems: what does not fit."""

    missing: list[str]
    used: set[str]
    problems: list[str]

    def of_all(self) -> Names:
        """The same for what all processes have."""
        found: list[Names] = united.of_all("names", self)
        missing, problems = (list(dict.fromkeys(x for own in found for x in getattr(own, kind))) for kind in ("missing", "problems"))
        return Names(missing, set().union(*(own.used for own in found)), problems)


def refuse(path: Path, module: object, problems: Sequence[str], missing: Sequence[str], unexpected: Sequence[str], strict: bool) -> None:
    """Raise RuntimeError for what keeps a checkpoint from being loaded into a module; names that only one of them has count if `strict`, else are logged."""
    found = list(problems)
    if strict:
        found += [f"missing in the checkpoint: {listed(missing)}"] * bool(missing)
        found += [f"unexpected in the checkpoint: {listed(unexpected)}"] * bool(unexpected)
    elif missing or unexpected:
        logger.info("%s: not loaded %s; not used %s", path, listed(missing) or "nothing", listed(unexpected) or "nothing")
    if found:
        raise RuntimeError(
            f"cannot load {path} into {type(module).__name__}: " + "; ".join(found) + ". strict=False ignores missing and unexpected names"
        )


def _warn_of_heads(folder: Folder, wanted: Sequence[Wanted]) -> None:
    other = [w.keys[0] for w in wanted if folder.entry(w.keys[0]).get("heads", "") != heads.arrangement(w.tensor)]
    if other:
        warnings.warn(
            f"the query heads of {listed(other)} come in another order now, because ranks hold other copies of K/V heads (kv_size_multiplier, tensor parallel "
            "size) than when the checkpoint was saved: the model computes something else. Nothing says how many heads there are, or which layer is the "
            f"output projection: {heads.ADVICE}",
            stacklevel=4,
        )


def _inside(used: set[str], folder: Folder) -> set[str]:
    """Names whose array is used under another name of a tied weight."""
    stored = {folder.key(k) for k in used}
    return {name for name in folder.names() if folder.key(name) in stored}


def _set_extra_state(module: torch.nn.Module, other: Mapping[str, Any]) -> None:
    extra = {k: v for k, v in other.items() if k.endswith("_extra_state")}
    if extra:
        module.load_state_dict(extra, strict=False)


def _placement_on_cpu(t: torch.Tensor) -> Placement | None:
    return placement.of(t) if full_weights.is_divided(t) else None


def _shape_problems(folder: Folder, wanted: Sequence[Wanted]) -> list[str]:
    found = []
    for w in wanted:
        where = w.where or _placement_on_cpu(w.tensor)
        for k, key in enumerate(w.keys):
            entry = folder.entry(key)
            shape = list(w.tensor.shape) if where is None else where.pieces[k].full_shape(where.shape)
            if "apart" in entry:
                found.append(_apart_problem(key, entry, where))
            elif entry["shape"] != shape and not (entry["shape"] in ([], [1]) and shape in ([], [1])):
                found.append(
                    f"{key} has shape {entry['shape']} in the checkpoint, {shape} in the model{_of_other_experts(entry, where, k, shape)}"
                )
    return [f for f in found if f]


def _of_other_experts(entry: Mapping[str, Any], where: Placement | None, k: int, shape: Sequence[int]) -> str:
    """What to say of a shape that differs, where it is known that dim 0 counts experts."""
    known = entry.get("experts") or (where is not None and where.pieces[k].experts is not None)
    if not known or entry["shape"][0] == shape[0]:
        return ""
    return f" (it is of {entry['shape'][0]} experts, and {shape[0]} are needed)"


def _apart_problem(key: str, entry: Mapping[str, Any], where: Placement | None) -> str:
    if where is not None and where.apart:
        return ""
    return f"{key} was different on each rank, and ranks are laid out in another way now: load it in the layout it was saved with"


def listed(names: Sequence[str]) -> str:
    """Some names, for a message."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


# -- optimizers --------------------------------------------------------------------------------------


def load_optimizer(path: Path, optimizer: torch.optim.Optimizer, model: contents.Model | None) -> None:
    """Fill an optimizer from a folder: state, options of groups, master weights. Under ZeRO-1 the parameters are cut anew first.

    Raises ValueError, before anything changes, for the state of other parameters.
    """
    folder = Folder(path)
    saved = folder.objects()
    if "nested" in saved:
        _load_nested(folder, saved["nested"], optimizer)
        return
    _refuse_empty("optimizer", optimizer)
    parts = _named(contents.parts_of(optimizer, contents.names_of(model)), saved["order"])
    keys = {part.name: contents.keys_of(part.name, part.placement()) for part in parts}
    _check_parameters(path, saved, keys, {part.name: pipeline_ranks.rank_of(part.parameter) for part in parts})
    _check_groups(path, saved["param_groups"], optimizer, {part.parameter: keys[part.name] for part in parts})
    wanted = [w for part in parts for w in _state_wanted(folder, saved, part, keys[part.name])]
    like = set(saved["like"])
    problems = _shape_problems(folder, [w for w in wanted if w.keys[0] in like or w.reduced])
    problems += [_apart_problem(w.keys[0], folder.entry(w.keys[0]), w.where) for w in wanted if "apart" in folder.entry(w.keys[0])]
    if any(problems):
        raise ValueError(f"cannot load {path}: " + "; ".join(p for p in problems if p))
    if contents.is_zero1(optimizer):
        contents.inner(optimizer).init_zero()
        _refuse_empty("optimizer", optimizer)
    parts = _named(contents.parts_of(optimizer, contents.names_of(model)), saved["order"])
    _take_state(folder, saved, optimizer, parts, keys, wanted)
    executor.sync()


def _take_state(
    folder: Folder,
    saved: Any,
    optimizer: torch.optim.Optimizer,
    parts: Sequence[Part],
    keys: Mapping[str, list[str]],
    wanted: Sequence[Wanted],
) -> None:
    base = contents.stepping(optimizer)
    by_name = {part.name: part for part in parts}
    _set_options(optimizer, saved["param_groups"], {p.parameter: keys[p.name] for p in parts})
    on_device = _on_device(base)
    state: dict[str, dict[str, Any]] = {name: {} for name in by_name}
    with torch.no_grad():
        for w, value in folder.read(wanted):
            key, _, name = w.label.partition("/")
            held = by_name[name].held
            if key == "master":
                held.detach().copy_(value.reshape(held.shape))
                continue
            if w.reduced:
                found = arrays.own(value) if isinstance(value, XLATensor) else value
            elif set(w.keys) <= set(saved["like"]):
                found = value.reshape(held.shape)
            else:
                found = _as_stored(value, folder.entry(w.keys[0]))
            state[name][key] = found.to(contents.state_dtype(base, held, found.dtype, _updated(folder, saved, keys[name][0])))
    base.state.clear()
    for name, part in by_name.items():
        plain = saved["state"].get(keys[name][0], {})
        own = {**{k: _plain(v, part, on_device) for k, v in plain.items()}, **state[name]}
        if own:
            base.state[part.held] = own
    if contents.is_zero1(optimizer):
        contents.inner(optimizer)._share_options(contents.inner(optimizer).param_groups, base.param_groups)


def _updated(folder: Folder, saved: Any, key: str) -> torch.dtype | None:
    """The dtype of what the optimizer updated in a parameter's place when it was saved, if the checkpoint says so."""
    known = saved.get("dtypes", {}).get(key) or (folder.entry(f"master/{key}")["dtype"] if f"master/{key}" in folder else None)
    return None if known is None else getattr(torch, known)


def _as_stored(value: torch.Tensor, entry: Mapping[str, Any]) -> torch.Tensor:
    """A value in its shape, in memory of its own: a view would make the next step another program, whose last bits differ."""
    found = value.reshape(entry["shape"][1:] if "apart" in entry else entry["shape"])
    return arrays.own(found) if isinstance(found, XLATensor) else found


def _named(parts: list[Part], order: Sequence[str]) -> list[Part]:
    """Parts named by their order where either they or those of the checkpoint have numbers for names, for want of a model."""
    numbered = all(part.name.isdigit() for part in parts) or all(name.isdigit() for name in order)
    if not numbered or {part.name for part in parts} <= set(order) or len(order) != len(parts):
        return parts
    return [dataclasses.replace(part, name=name) for part, name in zip(parts, order, strict=True)]


def _check_parameters(path: Path, saved: Any, keys: Mapping[str, list[str]], ranks: Mapping[str, int | None]) -> None:
    known = set(saved["order"])
    absent = [name for name, own in keys.items() if not known.issuperset(own)]
    if absent:
        hint = (
            "pass model= as well, so that parameters go by name" if all(n.isdigit() for n in absent) else "was it saved from another model?"
        )
        shown = listed([pipeline_ranks.said(name, ranks[name]) for name in absent])
        raise ValueError(f"{path} has no state for {shown}; it has {listed(saved['order'])}: {hint}")


def _check_groups(
    path: Path, saved: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer, keys: Mapping[torch.Tensor, Sequence[str]]
) -> None:
    """Raise ValueError where groups are not those of the checkpoint: a group's options would be another's."""
    number = {key: k for k, group in enumerate(saved) for key in group["params"]}
    taken: dict[int, int] = {}
    for k, group in enumerate(contents.inner(optimizer).param_groups):
        found = {number[key]: key for p in group["params"] for key in keys[p]}
        if len(found) > 1:
            raise ValueError(
                f"cannot load {path}: group {k} of the optimizer has {listed(list(found.values()))}, which were in different groups when it was saved, each "
                "with its own options. Make the optimizer with the same groups"
            )
        for other in found:
            if other in taken:
                raise ValueError(
                    f"cannot load {path}: groups {taken[other]} and {k} of the optimizer were one group when it was saved, so what their options are is not "
                    "known. Make the optimizer with the same groups"
                )
            taken[other] = k


def _state_wanted(folder: Folder, saved: Any, part: Part, keys: Sequence[str]) -> list[Wanted]:
    names = (part.name, *keys, *(name for name in _fused_names(part.name) if name not in saved["order"]))
    kinds = dict.fromkeys(k.partition("/")[0] for k in folder.names() if k.partition("/")[2] in names)
    found = []
    for kind in kinds:
        own = tuple(f"{kind}/{k}" for k in keys)
        if kind == "master" and part.held is part.parameter:
            continue
        there = all(k in folder for k in own)
        if there and set(own) <= set(saved["like"]) | {k for k in own if kind == "master"}:
            found.append(Wanted(f"{kind}/{part.name}", own, part.placement(), _beside(part)))
            continue
        stored = own if there else (f"{kind}/{part.name}",)
        if stored[0] in folder and "apart" not in folder.entry(stored[0]):
            found.append(_not_alike(folder, part, kind, stored))
        elif stored[0] in folder:
            entry = folder.entry(stored[0])
            where = folder.apart(stored[0]) or placement.everywhere(entry["shape"])
            found.append(Wanted(f"{kind}/{part.name}", stored[:1], where, part.held))
        elif kind != "master":
            raise ValueError(
                f"cannot load {folder.path}: it has {kind} of {_kept_for(folder, kind, names)}, of which that of {part.name} cannot be made: make the layer "
                "with fuse_qkv as it was, or load the model without its optimizer"
            )
    return found


def _not_alike(folder: Folder, part: Part, kind: str, stored: tuple[str, ...]) -> Wanted:
    """State that has not an entry for each of the parameter's: one entry along some dims (a mean), or a shape of its own, which all ranks hold."""
    label, shape = f"{kind}/{part.name}", folder.entry(stored[0])["shape"]
    dims = part.reduced(kind, shape)
    where = placement.reduced(part.placement(), dims) if dims else placement.everywhere(shape)
    if len(where.pieces) != len(stored):
        raise ValueError(
            f"cannot load {folder.path}: it has {kind} of {listed([name.partition('/')[2] for name in stored])}, a mean over each, and one over all of "
            f"{part.name} is needed: make the layer with fuse_qkv as it was, or load the model without its optimizer"
        )
    return Wanted(label, stored, where, _beside(part), reduced=True) if dims else Wanted(label, stored, where, part.held)


def _kept_for(folder: Folder, kind: str, names: Sequence[str]) -> str:
    return listed([name for name in dict.fromkeys(names) if f"{kind}/{name}" in folder])


def _beside(part: Part) -> torch.Tensor:
    """What tells where state lies."""
    return part.held if part.rows is None else part.parameter


def _fused_names(name: str) -> tuple[str, ...]:
    """What fused q, k and v would be called, of which a parameter might be one."""
    return (name[:-1] + "qkv",) if name.endswith(("_q", "_k", "_v")) else ()


def _set_options(optimizer: Any, saved: Sequence[Mapping[str, Any]], keys: Mapping[torch.Tensor, Sequence[str]]) -> None:
    groups = contents.inner(optimizer).param_groups
    for group in groups:
        if not group["params"]:
            continue
        first = keys[group["params"][0]][0]
        source = next(g for g in saved if first in g["params"])
        group.update({k: v for k, v in source.items() if k not in _NOT_LOADED})


def _on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer counts its steps on the device."""
    return any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)


def _plain(value: object, part: Part, on_device: bool) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.to(part.held.device) if on_device else value.clone()  # each parameter counts by itself
    found = [t.to(part.held.device) for t in nested.collect(value, _is_vector)]
    return nested.replace(value, _is_vector, found)


def _is_vector(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() > 0


def _load_nested(folder: Folder, structure: Any, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer's state dict that was saved as such. Raises ValueError where the optimizer is a part of the whole one, or ranks are laid out otherwise."""
    if united.needed():
        raise ValueError(
            f"{folder.path} holds the state dict of a whole optimizer, and this process has some pipeline stages' alone: save the optimizer itself, with "
            "model=, or start the script with nxd-run, which hosts all ranks in one process"
        )
    wanted = []
    for name in folder.entries:
        entry = folder.entry(name)
        where = folder.apart(name) or placement.everywhere(entry["shape"])
        if "apart" in entry and not where.apart:
            raise ValueError(
                f"{folder.path} holds a state dict of ranks laid out as {folder.index['layout']}, now they are {writing.layout()}: save the optimizer itself "
                "for any layout"
            )
        wanted.append(Wanted(name, (name,), where, torch.empty(0)))
    values = {w.label: _as_stored(value, folder.entry(w.label)) for w, value in folder.read(wanted)}
    state = nested.replace(structure, _is_stub, [values[f"nested/{s.index}"] for s in nested.collect(structure, _is_stub)])
    executor.sync()
    optimizer.load_state_dict(state)


def _is_stub(x: object) -> bool:
    return isinstance(x, writing._Stub)
