"""What the files of an original checkpoint say, by name: the model's tensors, and the optimizer's state by parameter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nxd_jax.checkpoint import joining
from nxd_jax.checkpoint.joining import Held
from nxd_jax.checkpoint.original_files import STEP, File, Files, Rank, is_tensor

MASTER = "master"


@dataclasses.dataclass
class ModelState:
    """The model's tensors. parts: by name what each tensor-parallel rank held (expert-parallel rank 0), pipeline ranks united. stages: names of each pipeline
    rank, in its order. absent: names of those whose values are only in the optimizer's master weights. other: what is no tensor. again: what further pipeline
    ranks held of a tensor that several have, by name and rank."""

    parts: dict[str, list[Held]]
    stages: list[list[str]]
    absent: set[str]
    other: dict[str, Any]
    again: dict[tuple[str, int], list[Held]] = dataclasses.field(default_factory=dict)

    def ranks_of(self, name: str) -> list[int]:
        """The pipeline ranks whose files have a tensor; none if there is one rank."""
        return [k for k, names in enumerate(self.stages) if name in names] if len(self.stages) > 1 else []

    def differing(self) -> list[str]:
        """For each tensor that several pipeline ranks have in different values: a sentence."""
        return [
            f"{name} is not the same in the files of pipeline ranks {self.ranks_of(name)[0]} and {stage}: they are of different checkpoints"
            for (name, stage), held in self.again.items()
            if not same_values(self.parts[name], held)
        ]


def model_state(files: Mapping[Rank, File], ep: int = 0) -> ModelState:
    """The model's tensors, as expert-parallel rank `ep` had them. Raises ValueError if tensor-parallel ranks held different names."""
    found = ModelState({}, [], set(), {})
    tp, pp = (1 + max(getattr(r, name) for r in files) for name in ("tp", "pp"))
    for stage in range(pp):
        group = [files[Rank(0, t, stage, ep)] for t in range(tp)]
        states = [f.data for f in group]
        _check_names(group, states)
        found.stages.append([name for name, value in states[0].items() if is_tensor(value)])
        for name in found.stages[-1]:
            values = [s[name] for s in states]
            held = [_held(f, v) for f, v in zip(group, values, strict=True)]
            there = all(f.holds(v) for f, v in zip(group, values, strict=True))
            if found.parts.setdefault(name, held) is not held and there and name not in found.absent:
                found.again[name, stage] = held
            if not there:
                found.absent.add(name)
        found.other.update({k: v for k, v in states[0].items() if not is_tensor(v)})
    return found


def same_values(one: Sequence[Held], other: Sequence[Held]) -> bool:
    """Whether each tensor-parallel rank held the same in two tensors."""
    pairs = list(zip(one, other, strict=True))
    return all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs) and all(torch.equal(a.read(), b.read()) for a, b in pairs)


def _check_names(group: Sequence[File], states: Sequence[Any]) -> None:
    for file, state in zip(group, states, strict=True):
        different = set(state) ^ set(states[0])
        if different:
            raise ValueError(
                f"{file.path} and {group[0].path} are of different models: only one of them has {', '.join(sorted(map(str, different))[:8])}"
            )


def _held(file: File, value: Any) -> Held:
    shape, dtype = file.describe(value) if file.holds(value) or file._info else ((), torch.float32)
    return Held(shape, dtype, lambda: file.tensor(value))


# -- optimizers --------------------------------------------------------------------------------------


@dataclasses.dataclass
class OptimizerState:
    """An optimizer's state. parts: as in `ModelState`, by `<kind>/<parameter>` ("exp_avg/weight", with ZeRO-1 "master/weight"). plain: what is a number, by
    parameter and kind. groups: options of groups, with the names of their parameters. zero: whether ZeRO-1 wrote it. odd: by `<kind>/<parameter>`, tensors of
    other shapes than the parameter, of each tensor-parallel rank's files."""

    parts: dict[str, list[Held]]
    plain: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    zero: bool
    odd: dict[str, list[Held]]
    shapes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @property
    def kinds(self) -> list[str]:
        """Names of what is kept for parameters."""
        return list(dict.fromkeys(name.partition("/")[0] for name in self.parts))


def is_zero(data: object) -> bool:
    """Whether a rank's optimizer state is ZeRO-1's. Raises ValueError for what is no optimizer's state."""
    if isinstance(data, Mapping) and {"base_state", "shape_info", "param_groups"} <= set(data):
        return True
    if isinstance(data, Mapping) and {"state", "param_groups"} <= set(data):
        return False
    keys = ", ".join(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
    raise ValueError(f"no state of an optimizer: it needs state and param_groups (ZeRO-1: also base_state and shape_info), there is {keys}")


def counts(files: Mapping[Rank, File], pp: int = 0) -> list[int]:
    """Parameters in each group of a pipeline rank's optimizer."""
    return [len(g["params"]) for g in files[Rank(pp=pp)].data["param_groups"]]


def optimizer_state(
    files: Files, names: Sequence[Sequence[Sequence[str]]], shape_of: Callable[[str], tuple[int, ...] | None]
) -> OptimizerState:
    """The optimizer's state by parameter.

    names: for each pipeline rank, for each group: the names of its parameters in order. shape_of: what a rank held of a parameter, for files that do not say
    (those of ZeRO-1 do). What several pipeline ranks have (tied weights) is the first one's. Raises ValueError if there are more or fewer.
    """
    sizes = files.sizes
    if sizes["ep"] > 1:
        raise NotImplementedError(
            f"{files.folder}: optimizer states of {sizes['ep']} expert-parallel ranks cannot be read; load the model alone (optimizer=None)"
        )
    zero = is_zero(files.optimizer[min(files.optimizer)].data)
    found = OptimizerState({}, {}, [], zero, {})
    for stage in range(sizes["pp"]):
        ranks = sorted(r for r in files.optimizer if r.pp == stage)
        grid = [[files.optimizer[r] for r in ranks if r.tp == t and (zero or r.dp == 0)] for t in range(sizes["tp"])]
        _add_stage(found, grid, names[stage], shape_of)
    return found


def _add_stage(
    found: OptimizerState, grid: Sequence[Sequence[File]], names: Sequence[Sequence[str]], shape_of: Callable[[str], Any]
) -> None:
    first = grid[0][0]
    groups = first.data["param_groups"]
    sizes = [len(g["params"]) for g in groups]
    if sizes != [len(n) for n in names]:
        raise ValueError(
            f"{first.path} has groups of {sizes} parameters, there are groups of {[len(n) for n in names]} here: the optimizer must get the same groups of the "
            "same parameters in the same order"
        )
    for k, (group, own) in enumerate(zip(groups, names, strict=True)):
        if len(found.groups) <= k:
            found.groups.append({**{o: v for o, v in group.items() if o != "params"}, "params": []})
        known = set(found.groups[k]["params"])
        found.groups[k]["params"] += [name for name in own if name not in known]
        for index, name in zip(group["params"], own, strict=True):
            if name not in known:
                _add_parameter(found, grid, index, name, shape_of)


def _add_parameter(found: OptimizerState, grid: Sequence[Sequence[File]], index: int, name: str, shape_of: Callable[[str], Any]) -> None:
    shape = tuple(grid[0][0].data["shape_info"][index]) if found.zero else shape_of(name)
    if shape is not None:
        found.shapes[name] = shape
    own = [[_state_of(f, index, found.zero) for f in row] for row in grid]
    first = grid[0][0]
    for kind, value in own[0][0].items():
        if not is_tensor(value) or _is_number(kind, first.describe(value)[0], shape):
            found.plain.setdefault(name, {})[kind] = first.tensor(value) if is_tensor(value) else value
            continue
        rows = [[(f, state[kind]) for f, state in zip(files, states, strict=True)] for files, states in zip(grid, own, strict=True)]
        part = first.describe(value)[0]
        local = part if shape is None else shape
        if part == (_piece(local, len(grid[0])) if found.zero else local):
            found.parts[f"{kind}/{name}"] = [_joined_rows(r, local) for r in rows]
        else:
            found.odd[f"{kind}/{name}"] = [_held(f, v) for r in rows for f, v in r]


def _is_number(kind: str, size: tuple[int, ...], shape: tuple[int, ...] | None) -> bool:
    """Whether a tensor of a parameter's state counts something, and is not shaped like the parameter."""
    return kind == STEP or (size == () and shape != ())


def _state_of(file: File, index: int, zero: bool) -> dict[str, Any]:
    """What one rank keeps for a parameter."""
    if not zero:
        return dict(file.data["state"].get(index, {}))
    own = dict(file.data["base_state"].get(index, {}))
    master = file.data.get("sharded_master_weights") or {}
    return {**own, **({MASTER: master[index]} if index in master else {})}


def _piece(shape: tuple[int, ...], dp: int) -> tuple[int, ...]:
    """The shape of the rows of a parameter that one of `dp` ranks keeps."""
    rows, *rest = shape or (1,)
    return (-(-rows // dp), *rest)


def _joined_rows(row: Sequence[tuple[File, Any]], shape: tuple[int, ...]) -> Held:
    """What data-parallel ranks held of a parameter, without the rows that pad it."""
    file, value = row[0]
    if len(row) == 1 and file.describe(value)[0] == shape:
        return _held(file, value)

    def read() -> torch.Tensor:
        whole = torch.cat([f.tensor(v) for f, v in row])
        return whole[: shape[0] if shape else 1].reshape(shape)

    return Held(shape, file.describe(value)[1], read)


# -- which parameter is which ------------------------------------------------------------------------


def file_names(own: Sequence[str], known: Sequence[str]) -> list[str]:
    """Names of parameters in order, as a checkpoint has them that may fuse q, k and v where `own` does not, or the other way round. known: its tensors."""
    there = set(known)
    found: list[str] = []
    for name in own:
        fused = joining.fused_name(name)
        if name not in there and fused is not None and fused[0] in there:
            found += [fused[0]] if fused[1] == 0 else []
        elif name not in there and name.endswith("_qkv") and there.issuperset(joining.separate_names(name)):
            found += joining.separate_names(name)
        else:
            found.append(name)
    return found
