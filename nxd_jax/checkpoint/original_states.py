"""What the files of an original checkpoint say, by name: the model's tensors, and the optimizer's state by parameter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nxd_jax.checkpoint import expert_files, joining
from nxd_jax.checkpoint.expert_files import Experts, Peers
from nxd_jax.checkpoint.joining import Held
from nxd_jax.checkpoint.original_files import STEP, File, Files, Rank, is_tensor
from nxd_jax.tensor_parallel import expert_states

MASTER = "master"


@dataclasses.dataclass
class ModelState:
    """The model's tensors. parts: by name what each tensor-parallel rank held (expert-parallel rank 0, until `unite`), pipeline ranks united. stages: names of
    each pipeline rank, in its order. absent: names of those whose values are only in the optimizer's master weights. other: what is no tensor. again: what
    further pipeline ranks held of a tensor that several have, by name and rank. peers: what all expert-parallel ranks held, if there are several. experts:
    which experts each of them has, of tensors that were united."""

    parts: dict[str, list[Held]]
    stages: list[list[str]]
    absent: set[str]
    other: dict[str, Any]
    again: dict[tuple[str, int], list[Held]] = dataclasses.field(default_factory=dict)
    peers: dict[str, Peers] = dataclasses.field(default_factory=dict)
    experts: dict[str, Experts] = dataclasses.field(default_factory=dict)

    def unite(self, name: str, held: Experts) -> None:
        """Make one tensor of what expert-parallel ranks held of experts. Raises ValueError for other shapes on some of them."""
        peers = self.peers[name]
        shapes = {h.shape for row in peers.held for h in row}
        if len(shapes) > 1 or sum(map(len, held)) != peers.local[0] * len(peers.held):
            raise ValueError(
                f"{name} has different shapes on expert-parallel ranks: {sorted(shapes)} for experts {[list(own) for own in held]}"
            )
        self.parts[name] = [expert_files.united(column, held) for column in zip(*peers.held, strict=True)]
        self.experts[name] = held
        if not all(peers.there):
            self.absent.add(name)

    def local(self, name: str) -> tuple[int, ...]:
        """The shape of what one rank held."""
        return self.peers[name].local if name in self.peers else self.parts[name][0].shape

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


def model_state(files: Mapping[Rank, File]) -> ModelState:
    """The model's tensors. Raises ValueError if tensor- or expert-parallel ranks held different names, or their `info.pt` disagree."""
    found = ModelState({}, [], set(), {})
    tp, pp, ep = (1 + max(getattr(r, name) for r in files) for name in ("tp", "pp", "ep"))
    for stage in range(pp):
        grid = [[files[Rank(0, t, stage, e)] for t in range(tp)] for e in range(ep)]
        group = grid[0]
        states = [f.data for f in group]
        every = [f for row in grid for f in row]
        _check_names(every, [f.data for f in every])
        found.stages.append([name for name, value in states[0].items() if is_tensor(value)])
        for name in found.stages[-1]:
            values = [s[name] for s in states]
            held = [_held(f, v) for f, v in zip(group, values, strict=True)]
            there = all(f.holds(v) for f, v in zip(group, values, strict=True))
            if found.parts.setdefault(name, held) is not held and there and name not in found.absent:
                found.again[name, stage] = held
            if not there:
                found.absent.add(name)
            if ep > 1 and name not in found.peers:
                found.peers[name] = _peers(name, grid)
        found.other.update({k: v for k, v in states[0].items() if not is_tensor(v)})
    return found


def _peers(name: str, grid: Sequence[Sequence[File]]) -> Peers:
    """What expert-parallel ranks' files have of a tensor."""
    first = grid[0][0]
    mark = first.mark(first.data[name])
    for file in (f for row in grid for f in row):
        if file.mark(file.data[name]) != mark:
            raise ValueError(
                f"{first.path} and {file.path} (or the info.pt beside them) do not say the same of whether expert-parallel ranks share out {name}, or of who "
                "has which experts: they are of different checkpoints"
            )
    held = [[_held(f, f.data[name]) for f in row] for row in grid]
    return Peers(held, [all(f.holds(f.data[name]) for f in row) for row in grid], mark)


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
    data = files[Rank(pp=pp)].data
    sizes = [len(g["params"]) for g in data["param_groups"]]
    if not expert_states.is_combined(data):
        return sizes
    half = data["ep_param_group_offset"]
    return [a + b for a, b in zip(sizes[:half], sizes[half:], strict=True)]


ExpertsOf = Callable[[str], Experts | None]
"""Which experts each expert-parallel rank had of a parameter, by its name; None if all had all of it."""


@dataclasses.dataclass(frozen=True)
class _Cell:
    """A rank's file of an optimizer. data: with the numbers that every optimizer has."""

    file: File
    data: Any


@dataclasses.dataclass(frozen=True)
class _Stage:
    """The files of a pipeline rank. shared: for each tensor-parallel rank, those of the ranks that share out a parameter of no experts, in order. experts: by
    expert-parallel rank, the same for its experts."""

    shared: list[list[_Cell]]
    experts: list[list[list[_Cell]]]


def optimizer_state(
    files: Files,
    names: Sequence[Sequence[Sequence[str]]],
    shape_of: Callable[[str], tuple[int, ...] | None],
    experts: ExpertsOf = lambda name: None,
) -> OptimizerState:
    """The optimizer's state by parameter.

    names: for each pipeline rank, for each group: the names of its parameters in order. shape_of: what a rank held of a parameter, for files that do not say
    (those of ZeRO-1 do). experts: of which parameters expert-parallel ranks had different experts. What several pipeline ranks have (tied weights) is the
    first one's. Raises ValueError if there are more or fewer, and if values are missing.
    """
    zero = is_zero(files.optimizer[min(files.optimizer)].data)
    found = OptimizerState({}, {}, [], zero, {})
    for stage in range(files.sizes["pp"]):
        own = [[experts(name) for name in group] for group in names[stage]]
        ep = max((len(held) for group in own for held in group if held is not None), default=1)
        flags = [[held is not None for held in group] for group in own]
        _add_stage(found, _stage(files, stage, zero, ep, flags), names[stage], shape_of, experts)
    return found


def _stage(files: Files, stage: int, zero: bool, ep: int, flags: expert_states.Flags) -> _Stage:
    def cell(rank: Rank) -> _Cell:
        file = files.optimizer[rank]
        if not zero or not (expert_states.is_combined(file.data) or any(flag for own in flags for flag in own)):
            return _Cell(file, file.data)
        try:
            return _Cell(file, expert_states.plain(file.data, flags))
        except ValueError as error:
            raise ValueError(f"{file.path}: {error}") from None

    tps = range(files.sizes["tp"])
    ranks = sorted(r for r in files.optimizer if r.pp == stage)
    if zero:
        shared = [[cell(r) for r in ranks if r.tp == t] for t in tps]
        return _Stage(shared, [[row[e::ep] for row in shared] for e in range(ep)])
    by_rank = [[[cell(r) for r in ranks if r.tp == t and r.dp == 0 and r.ep == e] for t in tps] for e in range(ep)]
    return _Stage(by_rank[0], by_rank)


def _add_stage(
    found: OptimizerState, stage: _Stage, names: Sequence[Sequence[str]], shape_of: Callable[[str], Any], experts: ExpertsOf
) -> None:
    first = stage.shared[0][0]
    groups = first.data["param_groups"]
    sizes = [len(g["params"]) for g in groups]
    if sizes != [len(n) for n in names]:
        raise ValueError(
            f"{first.file.path} has groups of {sizes} parameters, there are groups of {[len(n) for n in names]} here: the optimizer must get the same groups "
            "of the same parameters in the same order"
        )
    for k, (group, own) in enumerate(zip(groups, names, strict=True)):
        if len(found.groups) <= k:
            found.groups.append({**{o: v for o, v in group.items() if o != "params"}, "params": []})
        known = set(found.groups[k]["params"])
        found.groups[k]["params"] += [name for name in own if name not in known]
        for index, name in zip(group["params"], own, strict=True):
            if name not in known:
                _add_parameter(found, stage, index, name, shape_of, experts(name))


def _add_parameter(
    found: OptimizerState, stage: _Stage, index: int, name: str, shape_of: Callable[[str], Any], held: Experts | None
) -> None:
    """The state of one parameter. held: the experts of each expert-parallel rank, if it is of experts."""
    cells = [stage.shared] if held is None else stage.experts
    first = stage.shared[0][0]
    shape = tuple(first.data["shape_info"][index]) if found.zero else shape_of(name)
    if shape is not None:
        found.shapes[name] = shape
    own = [[[(c.file, state_of(c.data, index, found.zero)) for c in row] for row in rows] for rows in cells]
    for kind, value in own[0][0][0][1].items():
        if not is_tensor(value) or _is_number(kind, first.file.describe(value)[0], shape):
            found.plain.setdefault(name, {})[kind] = first.file.tensor(value) if is_tensor(value) else value
            continue
        parts = [[[(f, state[kind]) for f, state in row] for row in rows] for rows in own]
        label = f"{kind}/{name}"
        _check_there(label, parts)
        part = first.file.describe(value)[0]
        local = part if shape is None else shape
        if part == (_piece(local, len(parts[0][0])) if found.zero else local):
            joined = [[_joined_rows(row, local) for row in rows] for rows in parts]
            found.parts[label] = joined[0] if held is None else [expert_files.united(column, held) for column in zip(*joined, strict=True)]
        else:
            found.odd[label] = [_held(f, v) for rows in parts for row in rows for f, v in row]


def _check_there(label: str, parts: Sequence[Sequence[Sequence[tuple[File, Any]]]]) -> None:
    """Raise ValueError if the values of further expert-parallel ranks are missing."""
    for rows in parts[1:]:
        for file, value in (pair for row in rows for pair in row):
            if not file.holds(value):
                raise ValueError(
                    f"{file.path} has no values of {label}, of which each expert-parallel rank has its own experts': NxD writes those of the first rank alone, "
                    "if use_xser is on and ZeRO-1 is off. Load the model alone (optimizer=None)"
                )


def _is_number(kind: str, size: tuple[int, ...], shape: tuple[int, ...] | None) -> bool:
    """Whether a tensor of a parameter's state counts something, and is not shaped like the parameter."""
    return kind == STEP or (size == () and shape != ())


def state_of(data: Mapping[str, Any], index: int, zero: bool) -> dict[str, Any]:
    """What one rank keeps for a parameter."""
    if not zero:
        return dict(data["state"].get(index, {}))
    own = dict(data["base_state"].get(index, {}))
    master = data.get("sharded_master_weights") or {}
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
