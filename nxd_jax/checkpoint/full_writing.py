"""A `FullState` to disk in any format, one tensor at a time: what has to wait for others waits in files."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nxd_jax.checkpoint import (
    expert_files,
    full_states,
    joining,
    orbax_files,
    original_writing,
    pipeline_ranks,
    reading,
    safetensors_files,
    writing,
)
from nxd_jax.checkpoint.full_states import Full, FullState
from nxd_jax.checkpoint.joining import Split
from nxd_jax.checkpoint.name_maps import NameMap
from nxd_jax.checkpoint.original_files import Rank
from nxd_jax.checkpoint.original_states import MASTER
from nxd_jax.checkpoint.stage_rules import Pipeline
from nxd_jax.tensor_parallel import expert_states
from torch_bridge.runtime import transfer

Progress = Callable[[Sequence[Any], str], Iterable[Any]]
_SMALL = 1 << 20
"""Bytes up to which a tensor waits in memory."""


class Scratch:
    """Tensors that wait in files."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._count = itertools.count()

    def keep(self, t: torch.Tensor) -> torch.Tensor:
        """The same values, in a file if they are many."""
        t = t.detach().contiguous()
        if t.nbytes <= _SMALL:
            return t.clone()
        path = self._folder / f"{next(self._count)}.bin"
        with open(path, "wb") as f:
            f.write(t.reshape(-1).view(torch.uint8).numpy().data)
        return torch.from_numpy(np.memmap(path, np.uint8, "c")).view(t.dtype).reshape(t.shape)


@contextlib.contextmanager
def scratch(beside: Path) -> Iterator[Scratch]:
    """A place for tensors to wait, on the disk of `beside`; removed at the end."""
    beside.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".nxd_ckpt_", dir=beside))
    try:
        yield Scratch(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _cast(full: Full, dtype: torch.dtype | None) -> torch.Tensor:
    found = full.read()
    return found.to(dtype) if dtype is not None and found.is_floating_point() else found


def copy_files(state: FullState, folder: Path) -> None:
    """Scheduler and user content."""
    for name, path in state.files.items():
        shutil.copyfile(path, folder / name)


# -- ours --------------------------------------------------------------------------------------------


def to_nxd(state: FullState, folder: Path, place: Scratch, progress: Progress, dtype: torch.dtype | None = None) -> None:
    """A checkpoint of ours. dtype: of the model's floating-point tensors."""
    layout = state.layout or {"world": 1}
    if state.model:
        _write_arrays(folder / writing.MODEL, state.model, state.aliases, {"other": {}}, layout, place, progress, dtype)
    if state.other is not None:
        _write_arrays(folder / writing.OPTIMIZER, state.optimizer, {}, state.other, layout, place, progress, None)
    copy_files(state, folder)


def _write_arrays(
    folder: Path,
    tensors: Mapping[str, Full],
    aliases: Mapping[str, str],
    objects: Mapping[str, Any],
    layout: Mapping[str, int],
    place: Scratch,
    progress: Progress,
    dtype: torch.dtype | None,
) -> None:
    arrays: dict[str, Any] = {}
    entries: dict[str, Any] = {}
    for name, full in progress(list(tensors.items()), f"reading {folder.name}"):
        value = _cast(full, dtype)
        stored = full.need.stored if full.apart is None else tuple(value.shape)
        arrays[name] = np.asarray(transfer.to_numpy(place.keep(value.reshape(stored))))
        entries[name] = writing._entry(full.need.shape or (1,), stored, value.dtype)
        if full.need.dim is not None:
            entries[name]["dim"] = full.need.dim
        if full.need.experts:
            entries[name]["experts"] = True
        if full.apart is not None:
            entries[name]["apart"] = list(full.apart)
    orbax_files.save(folder, arrays, {"layout": dict(layout), "tensors": entries, "aliases": dict(aliases)})
    buffer = io.BytesIO()
    torch.save(dict(objects), buffer)
    writing.write_bytes(folder / writing.OBJECTS, buffer.getvalue())


# -- Hugging Face's ----------------------------------------------------------------------------------


def to_hub(
    state: FullState,
    folder: Path,
    names: NameMap,
    progress: Progress,
    dtype: torch.dtype | None = None,
    max_bytes: int = safetensors_files.MAX_BYTES,
) -> list[Path]:
    """A Hugging Face folder; tensors with two names are written once. Returns the files. Raises ValueError for tensors that are different on each rank."""
    _check_apart(state.model)
    shapes = {
        name: (full.need.shape, dtype if dtype is not None and full.dtype.is_floating_point else full.dtype)
        for name, full in state.model.items()
    }
    plan = safetensors_files.planned(names.to_hub(list(state.model)), shapes, lambda n: _cast(state.model[n], dtype).reshape(shapes[n][0]))
    bar = iter(progress(plan, "writing"))

    def counted(read: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            next(bar, None)
            return read()

        return run

    plan = [p._replace(read=counted(p.read)) for p in plan]
    found = safetensors_files.write(folder, plan, max_bytes, state.config)
    next(bar, None)
    return found


def _check_apart(tensors: Mapping[str, Full]) -> None:
    apart = [name for name, full in tensors.items() if full.apart is not None]
    if apart:
        raise ValueError(f"{reading.listed(apart)} are different on each rank: only nxd's own format keeps all their values")


# -- NxD's -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The ranks to write files for.

    ep: that share out experts; dp, a multiple of it, counts them. zero1: cut the optimizer's state among dp ranks. copies: ranks that hold each K/V head.
    fuse: q, k and v into one weight. xser: a file for each tensor. pipeline: its ranks, and which of them has which tensor.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1
    zero1: bool = False
    copies: int = 1
    fuse: bool = True
    xser: bool = False
    pipeline: Pipeline = dataclasses.field(default_factory=Pipeline)


@dataclasses.dataclass(frozen=True)
class _Parameter:
    """A tensor as NxD has it, of one full tensor or three (q, k and v)."""

    name: str
    keys: tuple[str, ...]
    splits: tuple[Split, ...]

    @property
    def experts(self) -> bool:
        """Whether it is of experts."""
        return self.splits[0].experts

    def part(self, full: Sequence[torch.Tensor], rank: int, tp: int, expert_rank: int = 0, ep: int = 1) -> torch.Tensor:
        """What a rank holds."""
        try:
            found = [split.part(split.own_experts(t, expert_rank, ep), rank, tp) for split, t in zip(self.splits, full, strict=True)]
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        return found[0] if len(found) == 1 else torch.cat(found)


def to_original(
    state: FullState, folder: Path, ranks: Ranks, rules: joining.Rules, place: Scratch, progress: Progress, dtype: torch.dtype | None = None
) -> None:
    """Files for each of NxD's ranks. rules: how they share tensors out; without one counts what the checkpoint says. Raises ValueError where neither says."""
    _check_apart({**state.model, **state.optimizer})
    splits = _splits({**state.model}, ranks, rules)
    parameters = _parameters(list(state.model), splits, ranks.fuse)
    by_rank = ranks.pipeline.by_rank([*(p.name for p in parameters), *state.aliases])
    if ranks.ep > 1 and not any(p.experts for p in parameters):
        raise ValueError(
            f"no tensor is known to be of experts that {ranks.ep} ranks could share out: give rules such as --split '.*experts.*=experts+1'"
        )
    parts: dict[tuple[int, int], dict[str, torch.Tensor]] = {(e, t): {} for e in range(ranks.ep) for t in range(ranks.tp)}
    for p in progress(parameters, "reading model"):
        full = [_cast(state.model[k], dtype) for k in p.keys]
        for (e, t), own in parts.items():
            shared = e > 0 and not p.experts
            own[p.name] = parts[0, t][p.name] if shared else _marked(place.keep(p.part(full, t, ranks.tp, e, ranks.ep)), p, ranks)
    for own in parts.values():
        own.update({alias: own[name] for alias, name in state.aliases.items() if name in own})
    files = [(Rank(tp=t, pp=pp, ep=e), names) for pp, names in enumerate(by_rank) for e, t in parts]
    for rank, names in progress(files, "writing model") if state.model else []:
        own = parts[rank.ep, rank.tp]
        found = {name: own[name] for name in names if name in own}
        original_writing.write(folder / "model" / rank.file_name(ranks.ep > 1), found, ranks.xser, experts_alone=rank.ep > 0)
    if state.other is not None:
        _write_optimizer(state, folder, ranks, splits, by_rank, place, progress)
    copy_files(state, folder)


def _marked(t: torch.Tensor, p: _Parameter, ranks: Ranks) -> torch.Tensor:
    """The tensor, marked if it is of experts that several ranks share out."""
    if p.experts and ranks.ep > 1:
        for attribute, value in expert_files.marks_for(t).items():
            setattr(t, attribute, value)
    return t


def _splits(tensors: Mapping[str, Full], ranks: Ranks, rules: joining.Rules) -> dict[str, Split]:
    found: dict[str, Split] = {}
    unknown = []
    for name, full in tensors.items():
        split = joining.rule_for(name, rules)
        fused = joining.fused_name(name)
        if split is None and full.need.dim is not None:
            split = Split(full.need.dim, full.need.stride)
        if split is None and ranks.tp == 1:
            split = Split(None)
        if split is not None and full.need.experts:
            split = dataclasses.replace(split, experts=True)
        if split is None:
            unknown.append(name)
        else:
            copied = fused is not None and fused[1] and split.dim is not None
            found[name] = dataclasses.replace(split, copies=ranks.copies) if copied else split
    if unknown:
        raise ValueError(
            f"how {ranks.tp} tensor-parallel ranks are to share out {reading.listed(unknown)} is not known: {full_states.rules_help()}"
        )
    return found


def _parameters(names: Sequence[str], splits: Mapping[str, Split], fuse: bool) -> list[_Parameter]:
    """Tensors as NxD has them, in order."""
    there, found = set(names), []
    for name in names:
        fused = joining.fused_name(name) if fuse else None
        if fused is None or not there.issuperset(joining.separate_names(fused[0])):
            found.append(_Parameter(name, (name,), (splits[name],)))
        elif fused[1] == 0:
            keys = tuple(joining.separate_names(fused[0]))
            found.append(_Parameter(fused[0], keys, tuple(splits[k] for k in keys)))
    return found


def _write_optimizer(
    state: FullState,
    folder: Path,
    ranks: Ranks,
    splits: Mapping[str, Split],
    by_rank: Sequence[Sequence[str]],
    place: Scratch,
    progress: Progress,
) -> None:
    other = state.other
    assert other is not None
    _check_optimizer(state, other, splits)
    parameters = _parameters(other["order"], splits, ranks.fuse)
    kinds = list(dict.fromkeys(label.partition("/")[0] for label in state.optimizer))
    cells = _cells(state, parameters, ranks, by_rank)
    for p in progress(parameters, "reading optimizer"):
        shape = None
        for kind in kinds:
            if not all(f"{kind}/{k}" in state.optimizer for k in p.keys) or (kind == MASTER and not ranks.zero1):
                continue
            full = [state.optimizer[f"{kind}/{k}"].read() for k in p.keys]
            for t in range(ranks.tp):
                shape = _add(cells, p, kind, full, t, ranks, len(by_rank), place)
        if shape is None:
            shape = p.part([torch.empty(state.model[k].need.shape, device="meta") for k in p.keys], 0, ranks.tp, 0, ranks.ep).shape
        for cell in cells.values():
            cell.shape(p.name, torch.Size(shape))
    named = ranks.ep > 1 and not ranks.zero1
    for rank, cell in progress(list(cells.items()), "writing optimizer"):
        original_writing.write(folder / "optim" / rank.file_name(named), cell.data(), ranks.xser, experts_alone=rank.ep > 0)


def _add(
    cells: Mapping[Rank, _Cell], p: _Parameter, kind: str, full: Sequence[torch.Tensor], t: int, ranks: Ranks, stages: int, place: Scratch
) -> torch.Size:
    """Give the files of a tensor-parallel rank a tensor of a parameter's state; returns the shape of what a rank has of the parameter."""
    shape = torch.Size()
    for e in range(ranks.ep):
        if e == 0 or p.experts:
            part = p.part(full, t, ranks.tp, e, ranks.ep)
            shape = part.shape
        numbers = range(e, ranks.dp, ranks.ep) if ranks.zero1 else [0]
        for n, d in enumerate(numbers):
            index, count = (n, len(numbers)) if p.experts else (d, ranks.dp)
            value = place.keep(_rows(part, index, count) if ranks.zero1 else part)
            for pp in range(stages):
                rank = Rank(d, t, pp) if ranks.zero1 else Rank(0, t, pp, e)
                cells[rank].add(p.name, kind, value if ranks.zero1 else _marked(value, p, ranks))
    return shape


def _cells(state: FullState, parameters: Sequence[_Parameter], ranks: Ranks, by_rank: Sequence[Sequence[str]]) -> dict[Rank, _Cell]:
    """A file for each rank, whose parameters have numbers of their own on each pipeline rank."""
    other = state.other
    assert other is not None
    key_of = {key: p.name for p in parameters for key in p.keys}
    groups = [list(dict.fromkeys(key_of[k] for k in g["params"])) for g in other["param_groups"]]
    whole = [p.name for p in _parameters(list(state.model), dict.fromkeys(state.model, Split(None)), ranks.fuse)]
    found = {}
    for pp, names in enumerate(by_rank):
        local = [state.aliases.get(name, name) for name in names]
        own = groups if len(by_rank) == 1 else [pipeline_ranks.numbered(group, local, whole) for group in groups]
        places = [(d, 0) for d in range(ranks.dp)] if ranks.zero1 else [(0, e) for e in range(ranks.ep)]
        found.update({Rank(d, t, pp, e): _Cell(other, parameters, own, ranks) for t in range(ranks.tp) for d, e in places})
    return found


def _check_optimizer(state: FullState, other: Mapping[str, Any], splits: Mapping[str, Split]) -> None:
    if "param_groups" not in other:
        raise ValueError("the checkpoint holds an optimizer's state dict, not an optimizer: convert the model alone (--model-only)")
    unknown = [name for name in other["order"] if name not in splits]
    if unknown:
        raise ValueError(f"the model has no {reading.listed(unknown)} of the optimizer: convert the model alone (--model-only)")
    odd = [label for label in state.optimizer if label not in other["like"] and not label.startswith(f"{MASTER}/")]
    if odd:
        raise ValueError(
            f"{reading.listed(odd)} of the optimizer are not shaped like their parameters; convert the model alone (--model-only)"
        )


def _rows(part: torch.Tensor, index: int, dp: int) -> torch.Tensor:
    """A data-parallel rank's rows, zeros after the last."""
    part = part if part.dim() else part.reshape(1)
    rows = -(-part.shape[0] // dp)
    found = part.new_zeros(rows, *part.shape[1:])
    own = part[index * rows : (index + 1) * rows]
    found[: len(own)] = own
    return found


class _Cell:
    """One rank's optimizer file. groups: names of its parameters, which are numbered in this order."""

    def __init__(self, other: Mapping[str, Any], parameters: Sequence[_Parameter], groups: Sequence[Sequence[str]], ranks: Ranks):
        self.ranks = ranks
        experts = {p.name for p in parameters if p.experts}
        self.flags = [[name in experts for name in group] for group in groups]
        self.numbers = {name: k for k, name in enumerate(name for group in groups for name in group)}
        self.groups = [{**g, "params": [self.numbers[name] for name in own]} for g, own in zip(other["param_groups"], groups, strict=True)]
        self.state: dict[int, dict[str, Any]] = {
            self.numbers[p.name]: dict(other["state"][p.keys[0]])
            for p in parameters
            if p.name in self.numbers and p.keys[0] in other["state"]
        }
        self.master: dict[int, torch.Tensor] = {}
        self.shapes: dict[int, torch.Size] = {}

    def add(self, name: str, kind: str, value: torch.Tensor) -> None:
        """A tensor of a parameter's state, if the rank has the parameter."""
        index = self.numbers.get(name)
        if index is None:
            return
        if kind == MASTER:
            self.master[index] = value
        else:
            self.state.setdefault(index, {})[kind] = value

    def shape(self, name: str, shape: torch.Size) -> None:
        """A parameter's shape, if the rank has it."""
        if name in self.numbers:
            self.shapes[self.numbers[name]] = shape

    def data(self) -> dict[str, Any]:
        """What the file holds."""
        if not self.ranks.zero1:
            return {"state": self.state, "param_groups": self.groups}
        found = {"state": {}, "param_groups": self.groups, "base_state": self.state, "shape_info": self.shapes}
        found = {**found, "sharded_master_weights": self.master} if self.master else found
        return expert_states.combined(found, self.flags) if self.ranks.ep > 1 else found
