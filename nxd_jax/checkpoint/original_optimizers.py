"""Optimizers filled from NxD's files, whatever ranks wrote them and whatever ranks there are now."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nxd_jax.checkpoint import arrays, contents, expert_files, joining, original_states, pipeline_ranks, reading, united
from nxd_jax.checkpoint.contents import Part
from nxd_jax.checkpoint.joining import Joint
from nxd_jax.checkpoint.original_files import Files
from nxd_jax.checkpoint.original_states import MASTER
from nxd_jax.checkpoint.targets import Pace, target_of, write
from nxd_jax.tensor_parallel import expert_states, full_weights
from torch_bridge.mesh import world
from torch_bridge.recorder import sharded
from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.runtime import executor


def _aliases(model: Any, names: Mapping[torch.Tensor, str]) -> dict[str, str]:
    """Names of a model's parameters by their other names (of tied weights)."""
    if not names:
        return {}
    return {
        name: first
        for name, t in contents.state_of(model, saving=False).items()
        if isinstance(t, torch.Tensor) and (first := names.get(t, name)) != name
    }


def _groups(optimizer: Any, parts: Sequence[Part]) -> list[list[str]]:
    """The names of the parameters of each group."""
    found, k = [], 0
    for group in contents.inner(optimizer).param_groups:
        found.append([part.name for part in parts[k : k + len(group["params"])]])
        k += len(group["params"])
    return found


def _of_all(groups: list[list[str]], aliases: dict[str, str], order: Sequence[str]) -> tuple[list[list[str]], dict[str, str]]:
    """Groups and aliases of the whole model's optimizer, where other processes have some of its stages. order: names of the whole model.

    Raises ValueError if processes have different numbers of groups, and without names.
    """
    if not united.needed():
        return groups, aliases
    everyone: list[tuple[list[list[str]], dict[str, str]]] = united.of_all("optimizer", (groups, aliases))
    counts = [len(own) for own, _ in everyone]
    if len(set(counts)) > 1:
        raise ValueError(
            f"processes have optimizers of {', '.join(map(str, counts))} groups, and NxD's files number parameters group by group: give each process the same "
            "groups, also where it has no parameters of one"
        )
    if not order:
        raise ValueError("each process has the optimizer of its own pipeline stages: pass model= as well, so that parameters go by name")
    place = {name: k for k, name in enumerate(order)}
    whole = []
    for column in zip(*(own for own, _ in everyone), strict=True):
        ordered = [sorted(own, key=lambda name: place.get(name, len(place))) for own in column]
        names = [name for own in column for name in own]
        whole.append(sorted(names, key=place.__getitem__) if ordered == list(column) and place.keys() >= set(names) else names)
    return [list(dict.fromkeys(own)) for own in whole], {name: first for _, own in everyone for name, first in own.items()}


def _sizes(names: Sequence[Sequence[Sequence[str]]]) -> list[list[int]]:
    return [[len(group) for group in groups] for groups in names]


class UnwrittenShardsError(ValueError):
    """The states of some data-parallel ranks were never written, or their files are missing."""


def _check_shards(files: Files) -> None:
    """Raise UnwrittenShardsError if the shards of ZeRO-1 in the files are of more data-parallel ranks than there are files of."""
    first = files.optimizer[min(files.optimizer)]
    if not isinstance(first.data, Mapping) or "base_state" not in first.data or expert_states.is_combined(first.data):
        return
    shapes = dict(first.data.get("shape_info", ()))
    ranks = 1
    for k, state in dict(first.data["base_state"]).items():
        if k not in shapes:
            continue
        held = [first.describe(v)[0] for kind, v in state.items() if original_states.is_tensor(v) and kind not in contents.MEANS]
        rows = [shape[0] for shape in held if len(shape) == len(shapes[k]) and shape[1:] == tuple(shapes[k][1:]) and shape and shape[0]]
        ranks = max([ranks, *(-(-shapes[k][0] // n) for n in rows)])
    if ranks > files.sizes["dp"]:
        raise UnwrittenShardsError(
            f"{files.folder} has the optimizer states of {files.sizes['dp']} data-parallel rank(s), and they are shards of {ranks}: NxD Training wrote "
            "those of one rank alone unless model.wrap_with_zero was True, or files of other nodes were not copied. Load the model without the optimizer"
        )


class Optimizer:
    """An optimizer to fill from a checkpoint's files."""

    def __init__(self, files: Files, optimizer: Any, model: Any):
        if not files.optimizer:
            raise FileNotFoundError(f"the checkpoint {files.folder} holds no optimizer: do not pass optimizer=, or load another tag")
        _check_shards(files)
        self.files = files
        self.optimizer = optimizer
        self.names = contents.names_of(model)
        self.here = pipeline_ranks.names_if_known(model, contents.state_of(model, saving=False)) if self.names else None
        self.model = original_states.model_state(files.model) if files.model else None
        self.parts = contents.parts_of(optimizer, self.names)
        self.groups, self.aliases = _of_all(_groups(optimizer, self.parts), _aliases(model, self.names), pipeline_ranks.order_of(model))
        self.order = pipeline_ranks.order_of(model) or list(self.names.values())
        self.targets = {part.name: target_of(part.name, part.parameter) for part in self.parts}
        self.needs = {k: n for t in self.targets.values() for k, n in t.needs.items()}
        self.ep = files.sizes["ep"]
        self.state = original_states.optimizer_state(files, self._names_by_stage(), self._shape, self._experts())
        self.joints = self._plan()

    @property
    def has_masters(self) -> bool:
        """Whether there are master weights."""
        return MASTER in self.state.kinds

    def _names_by_stage(self) -> list[list[list[str]]]:
        """For each pipeline rank, for each group: the names of the parameters that the files number."""
        known = [name for stage in self.model.stages for name in stage] if self.model is not None else []
        groups = [original_states.file_names(own, known) if known else own for own in self.groups]
        stages = self.files.sizes["pp"]
        if stages == 1:
            return [groups]
        if self.model is None:
            raise FileNotFoundError(
                f"{self.files.folder} has the optimizer of {stages} pipeline ranks, but no model that would say which parameters each rank has"
            )
        if not self.names:
            raise ValueError(
                f"{self.files.folder} has the optimizer of {stages} pipeline ranks, each with its own parameters: pass model= as well, so that they go by name"
            )
        whole = original_states.file_names(self.order, known)
        found = self._numbered(groups, self.model.stages, whole)
        counts = [original_states.counts(self.files.optimizer, stage) for stage in range(stages)]
        if (
            counts != _sizes(found) and self.here is not None and len(self.here) == stages
        ):  # the model's files do not have all: adapters alone, say
            other = self._numbered(groups, self.here, whole)
            return other if counts == _sizes(other) else found
        return found

    def _numbered(self, groups: Sequence[Sequence[str]], local: Sequence[Sequence[str]], whole: Sequence[str]) -> list[list[list[str]]]:
        own = [[self.aliases.get(name, name) for name in names] for names in local]
        return [[pipeline_ranks.numbered(group, names, whole) for group in groups] for names in own]

    def _shape(self, name: str) -> tuple[int, ...] | None:
        """What a rank held of a parameter, where that is known."""
        if self.model is not None and name in self.model.parts:
            return self.model.local(name)
        need = self.needs.get(name)
        if need is None or need.dim is not None:
            return None
        return (need.shape[0] // self.ep, *need.shape[1:]) if need.experts else need.shape

    def _experts(self) -> original_states.ExpertsOf:
        """Which experts each rank had of a parameter, by its name. Raises ValueError if there are some and nothing says which parameters those are."""
        first = self.files.optimizer[min(self.files.optimizer)].data
        shapes = first["shape_info"] if expert_states.is_combined(first) else {}
        held = [tuple(shape) for k, shape in shapes.items() if k >= first["ep_shape_info_offset"]]
        if self.ep == 1 and held and self.model is None:
            self.ep = self._ranks_by_shape(held[0])
        found = {} if self.ep == 1 else {name: own for name in self.needs if (own := self._experts_of(name)) is not None}
        if held and not found and not self.names:
            raise ValueError(
                f"{self.files.folder} has the optimizer of a model with experts, and which of the parameters here are of experts is not known: pass model= as "
                "well, so that they go by name"
            )
        if united.needed():
            found.update({name: own for others in united.of_all("experts", found) for name, own in others.items()})
        return found.get

    def _ranks_by_shape(self, local: tuple[int, ...]) -> int:
        """How many expert-parallel ranks there were, given what one had of experts. Raises ValueError if that cannot be told."""
        experts = [need for need in self.needs.values() if need.experts]
        if not experts or experts[0].shape[0] % local[0]:
            raise ValueError(
                f"{self.files.folder} has an optimizer of a model with experts and no model, and which of the parameters here are of experts is not known: "
                "save the model as well, or load it at the expert_parallel_size that it was saved with"
            )
        return experts[0].shape[0] // local[0]

    def _experts_of(self, name: str) -> expert_files.Experts | None:
        need, peers = self.needs.get(name), None if self.model is None else self.model.peers.get(name)
        if peers is not None:
            return expert_files.experts_of(name, peers.local, self.ep, need, peers.mark)
        if need is None or not need.experts:
            return None
        return expert_files.experts_of(name, (need.shape[0] // self.ep, *need.shape[1:]), self.ep, need, None)

    def _plan(self) -> dict[str, Joint]:
        """How to make every tensor of the state. Raises ValueError if something does not fit."""
        problems = [self._odd_problem(label) for label in self.state.odd]
        found = {}
        for kind in self.state.kinds:
            for part in self.parts:
                for key in self.targets[part.name].keys:
                    if joining.is_there(self.state.parts, f"{kind}/{key}"):
                        try:
                            found[f"{kind}/{key}"] = joining.joint(self.state.parts, key, self.needs, f"{kind}/")
                        except ValueError as error:
                            problems.append(str(error))
        problems = [p for p in problems if p]
        if problems:
            raise ValueError(f"cannot load the optimizer of {self.files.folder}: " + "; ".join(problems[:8]))
        return found

    def _odd_problem(self, label: str) -> str:
        held = self.state.odd[label]
        first = held[0].read()
        if all(h.shape == held[0].shape and torch.equal(first, h.read()) for h in held[1:]):
            return ""
        return (
            f"{label} has shape {list(held[0].shape)}, not its parameter's, and is different on each rank: how it would be joined is not known. Load it into "
            "the same layout with parallel_layers.load, or leave the optimizer out"
        )

    def load(self, absent: set[str]) -> None:
        """Fill the optimizer. absent: weights of the model that take their master weight's value."""
        zero = contents.is_zero1(self.optimizer)
        if zero:
            contents.inner(self.optimizer).init_zero()
            self.parts = contents.parts_of(self.optimizer, self.names)
        base = contents.stepping(self.optimizer)
        reading._set_options(self.optimizer, self._groups(), {p.parameter: self.targets[p.name].keys for p in self.parts})
        on_device = reading._on_device(base)
        base.state.clear()
        pace = Pace()
        with torch.no_grad():
            for part in self.parts:
                found = self._plain(part, on_device)
                for kind in self.state.kinds:
                    if f"{kind}/{self.targets[part.name].keys[0]}" in self.joints:
                        self._take(part, kind, found, part.name in absent)
                        pace.add(part.parameter)
                if found:
                    base.state[part.held] = found
            if zero and self.has_masters:
                contents.inner(self.optimizer)._publish([part.parameter for part in self.parts])
        if zero:
            contents.inner(self.optimizer)._share_options(contents.inner(self.optimizer).param_groups, base.param_groups)
        executor.sync()

    def _take(self, part: Part, kind: str, found: dict[str, Any], absent: bool) -> None:
        values = tuple(self.joints[f"{kind}/{k}"].read() for k in self.targets[part.name].keys)
        full = values if len(values) > 1 else values[0]
        if kind != MASTER:
            found[kind] = self._in_dtype(part, _like(part, full))
        elif part.held is not part.parameter:
            part.held.detach().copy_(_like(part, full))
        elif absent:
            write(part.parameter, full)

    def _plain(self, part: Part, on_device: bool) -> dict[str, Any]:
        """What is not shaped like the parameter."""
        name = self._source(part)
        found = {kind: reading._plain(v, part, on_device) for kind, v in self.state.plain.get(name, {}).items()}
        for label, held in self.state.odd.items():
            kind, _, of = label.partition("/")
            if of == name:
                value = held[0].read().clone()
                dims = part.reduced(kind, value.shape)
                found[kind] = self._in_dtype(part, _like_reduced(part, value, dims)) if dims else reading._plain(value, part, on_device)
        return found

    def _in_dtype(self, part: Part, value: torch.Tensor) -> torch.Tensor:
        """State in the dtype that the optimizer keeps it in."""
        key = self.targets[part.name].keys[0]
        model = {} if self.model is None else self.model.parts
        updated = None
        if (master := f"{MASTER}/{key}") in self.joints:
            updated = self.joints[master].dtype
        elif joining.is_there(model, key):
            updated = model[joining.source_of(model, key)][0].dtype
        return value.to(contents.state_dtype(contents.stepping(self.optimizer), part.held, value.dtype, updated))

    def _source(self, part: Part) -> str:
        """The name that the files have a parameter's state under."""
        key = self.targets[part.name].keys[0]
        there = {n for group in self.state.groups for n in group["params"]}
        fused = joining.fused_name(key)
        return next((n for n in (part.name, key, fused[0] if fused else key) if n in there), part.name)

    def _groups(self) -> list[dict[str, Any]]:
        """Groups with the keys of their parameters."""
        found = []
        for group in self.state.groups:
            keys = [k for name in group["params"] for k in ([name] if not name.endswith("_qkv") else [name, *joining.separate_names(name)])]
            found.append({**group, "params": keys})
        return found


def _like_reduced(part: Part, value: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """State with one entry along some dims of a whole parameter, as the optimizer keeps it."""
    where = part.placement()
    shapes = [piece.full_shape(where.shape) for piece in where.pieces]
    whole = [sum(shape[0] for shape in shapes), *shapes[0][1:]]
    rows = None if 0 in dims else part.rows
    found = _like(dataclasses.replace(part, rows=rows), value.expand([whole[d] if d in dims else n for d, n in enumerate(value.shape)]))
    for d in dims:
        found = found.narrow(d, 0, 1)
    return arrays.own(found) if isinstance(found, XLATensor) else found.clone()


def _like(part: Part, full: full_weights.Full) -> torch.Tensor:
    """A full tensor as the optimizer keeps it for a parameter: each rank's part, under ZeRO-1 its rows of that."""
    p = part.parameter
    if p.device.type != "xla":
        return full_weights.cut_full(p, full, world.first()).reshape(p.shape).clone()
    found = sharded.from_ranks(lambda r: full_weights.cut_full(p, full, r).reshape(p.shape).contiguous(), full_weights.cuts_of(p))
    there = full_weights.beside(found, p)
    return there if part.rows is None else part.rows.cut(there)
