"""Checkpoints in NxD's own formats (`original_files`): read into a model and an optimizer of any layout, and written so that NxD can read them.

A full tensor is joined from what tensor-parallel ranks held, by what the model's parameter says of how it is shared out, then cut for the ranks of now. One
tensor at a time is in host memory.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nxd_jax.checkpoint import contents, joining, original_files, original_states, reading
from nxd_jax.checkpoint.contents import Part
from nxd_jax.checkpoint.joining import Joint, Need
from nxd_jax.checkpoint.original_files import Files, is_older, is_original
from nxd_jax.checkpoint.original_states import MASTER, ModelState
from nxd_jax.checkpoint.original_writing import export_original
from nxd_jax.checkpoint.targets import Pace, Target, target_of, write
from nxd_jax.tensor_parallel import full_weights, grads, layer_groups, parallel_groups
from torch_bridge.mesh import world
from torch_bridge.recorder import sharded
from torch_bridge.runtime import executor

__all__ = ["export_original", "is_older", "is_original", "load"]

logger = logging.getLogger("nxd_jax")


def load(folder: Path, model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None, scheduler: Any, strict: bool) -> Any:
    """Fill a model, an optimizer and a scheduler from a checkpoint of NxD; returns its user content, or None. What is None is left alone.

    The sizes of tensor, pipeline and data parallelism may differ from those it was saved with, so may ZeRO-1, fused or separate q, k and v, and the copies of K
    and V. With expert parallelism the model loads at the same size. The optimizer must have the same groups of the same parameters in the same order.

    Raises FileNotFoundError for parts that are missing, RuntimeError for names or shapes that differ (before anything changes), ValueError for the state of
    another optimizer, DamagedCheckpointError for files that cannot be read.
    """
    files = original_files.find(folder)
    for what, wanted, there in (("model", model, files.model), ("optimizer", optimizer, files.optimizer)):
        if wanted is not None and not there:
            raise FileNotFoundError(f"the checkpoint {folder} holds no {what}: do not pass {what}=, or load another tag")
    absent: set[str] = set()
    plan = _Optimizer(files, optimizer, model) if optimizer is not None else None
    if model is not None:
        absent = _load_model(files, model, strict, plan)
    if plan is not None:
        plan.load(absent)
    if files.older:
        if scheduler is not None:
            scheduler.load_state_dict(files.scheduler())
        return files.rest() or None
    if scheduler is not None:
        path = folder / "scheduler.pt"
        if not path.exists():
            raise FileNotFoundError(
                f"the checkpoint {folder} holds no scheduler: there is no {path}. Do not pass scheduler=, or load another tag"
            )
        scheduler.load_state_dict(_whole(path))
    return _whole(folder / "user_content.pt") if (folder / "user_content.pt").exists() else None


def _whole(path: Path) -> Any:
    return original_files.File(path).whole()


# -- models ------------------------------------------------------------------------------------------


def _load_model(files: Files, model: torch.nn.Module | None, strict: bool, plan: _Optimizer | None) -> set[str]:
    """Fill a model; returns the names of weights that are only in the optimizer's master weights."""
    state = original_states.model_state(files.model)
    module = contents.unwrapped(model)
    found = contents.of_model(module, saving=False)
    targets = {name: target_of(name, t) for name, (t, _) in found.tensors.items()}
    needs = {k: n for target in targets.values() for k, n in target.needs.items()}
    missing = [name for name, target in targets.items() if not all(joining.is_there(state.parts, k) for k in target.keys)]
    loaded = {name: target for name, target in targets.items() if name not in missing}
    used = {joining.source_of(state.parts, k) for target in loaded.values() for k in target.keys}
    unexpected = sorted(set(state.parts) - used)
    absent = {name for name, target in loaded.items() if any(joining.source_of(state.parts, k) in state.absent for k in target.keys)}
    problems, joints = _joints(state, {n: t for n, t in loaded.items() if n not in absent}, needs, files)
    if absent and (plan is None or not plan.has_masters):
        problems.append(
            f"the values of {reading.listed(sorted(absent))} are in the optimizer's master weights only: pass optimizer= with ZeRO-1's states"
        )
    reading.refuse(files.folder, module, problems, missing, unexpected, strict and not hasattr(module, "checkpoint_state"))
    _warn_of_heads(files, loaded, joints)
    if absent:
        logger.info("Sharded master weights found in optim states, ignoring model weight tensors")
    _fill(files, {n: t for n, t in loaded.items() if n not in absent}, joints, state)
    reading._set_extra_state(module, state.other)
    return absent


def _warn_of_heads(files: Files, targets: Mapping[str, Target], joints: Mapping[str, Joint]) -> None:
    """With copies of K/V heads, query heads are in the order of the ranks that wrote the files, and stay in it."""
    now = parallel_groups.size("tp") if parallel_groups.initialized() else 1
    for name, target in targets.items():
        key = next((k for k in target.keys if k.endswith("weight_k")), None)
        if key is None or key not in joints:
            continue
        tp, copies = len(joints[key].held), len(joints[key].held) // joints[key].count
        fused = getattr(target.tensor, "qkv_partition", None)
        here = fused[2] if fused is not None else now // getattr(target.tensor, "num_partitions", now)
        if (copies > 1 or here > 1) and (tp, copies) != (now, here):
            warnings.warn(
                f"{files.folder} was written by {tp} tensor-parallel ranks that hold {copies} copies of K/V heads, here {now} ranks hold {here}: query heads "
                f"({name} and the output projection) come in another order, so the model computes something else. Load it with the sizes it was written with, "
                "then save_checkpoint, whose files load anywhere",
                stacklevel=5,
            )
            return


def _joints(
    state: ModelState, targets: Mapping[str, Target], needs: Mapping[str, Need], files: Files
) -> tuple[list[str], dict[str, Joint]]:
    problems = _expert_problems(files)
    joints: dict[str, Joint] = {}
    for name, target in targets.items():
        problems += _place_problems(name, target, files)
        for key in target.keys:
            try:
                joints[key] = joining.joint(state.parts, key, needs)
            except ValueError as error:
                problems.append(str(error))
    return problems, joints


def _place_problems(name: str, target: Target, files: Files) -> list[str]:
    """Tensors that every rank has its own of load in the same layout only."""
    if grads.is_expert(target.tensor):
        saved, now = files.sizes["ep"], parallel_groups.size("ep")
        return [] if saved == now else [f"{name} is of experts that {now} ranks share out here, {saved} in the checkpoint"]
    if target.where is None or not target.where.apart:
        return []
    saved, now = files.sizes["tp"], parallel_groups.size("tp")
    return [] if saved == now else [f"{name} is different on each rank, and the checkpoint is of {saved} tensor-parallel ranks, not {now}"]


def _expert_problems(files: Files) -> list[str]:
    """Which tensors are of experts is not in the files: those of several ranks load at that size only."""
    saved = files.sizes["ep"]
    now = parallel_groups.size("ep") if saved > 1 else 1
    if saved == now:
        return []
    return [f"the checkpoint is of {saved} expert-parallel ranks, there are {now} here: load it at expert_parallel_size={saved}"]


def _fill(files: Files, targets: Mapping[str, Target], joints: Mapping[str, Joint], state: ModelState) -> None:
    pace = Pace()
    experts = {ep: original_states.model_state(files.model, ep) for ep in range(files.sizes["ep"])} if files.sizes["ep"] > 1 else {}
    with torch.no_grad():
        for target in targets.values():
            if experts and grads.is_expert(target.tensor):
                _write_expert(target, experts)
            elif target.where is not None and target.where.apart:
                _write_apart(target, state)
            else:
                target.write(lambda key: joints[key].read())
            pace.add(target.tensor)
    executor.sync()


def _write_apart(target: Target, state: ModelState) -> None:
    """Every tensor-parallel rank has a value of its own."""
    held, group = state.parts[target.keys[0]], layer_groups.tensor_parallel()
    full_weights.write(target.tensor, lambda r: held[layer_groups.place_of(group, r)].read())


def _write_expert(target: Target, experts: Mapping[int, ModelState]) -> None:
    """Expert-parallel ranks have experts of their own."""
    group = parallel_groups.group("ep")
    full = {ep: joining.joint(state.parts, target.keys[0], target.needs).read() for ep, state in experts.items()}
    full_weights.write(target.tensor, lambda r: full_weights.cut_full(target.tensor, full[layer_groups.place_of(group, r)], r))


# -- optimizers --------------------------------------------------------------------------------------


class _Optimizer:
    """An optimizer to fill from a checkpoint's files."""

    def __init__(self, files: Files, optimizer: Any, model: Any):
        if not files.optimizer:
            raise FileNotFoundError(f"the checkpoint {files.folder} holds no optimizer: do not pass optimizer=, or load another tag")
        self.files = files
        self.optimizer = optimizer
        self.names = contents.names_of(model)
        self.model = original_states.model_state(files.model) if files.model else None
        self.parts = contents.parts_of(optimizer, self.names)
        self.targets = {part.name: target_of(part.name, part.parameter) for part in self.parts}
        self.needs = {k: n for t in self.targets.values() for k, n in t.needs.items()}
        self.state = original_states.optimizer_state(files, self._names_by_stage(), self._shape)
        self.joints = self._plan()

    @property
    def has_masters(self) -> bool:
        """Whether there are master weights."""
        return MASTER in self.state.kinds

    def _names_by_stage(self) -> list[list[list[str]]]:
        """For each stage, for each group: the names of the parameters that the files number."""
        groups, k = [], 0
        known = [name for stage in self.model.stages for name in stage] if self.model is not None else []
        for group in contents.inner(self.optimizer).param_groups:
            own = [part.name for part in self.parts[k : k + len(group["params"])]]
            k += len(own)
            groups.append(original_states.file_names(own, known) if known else own)
        stages = self.files.sizes["pp"]
        if stages == 1:
            return [groups]
        if self.model is None:
            raise FileNotFoundError(
                f"{self.files.folder} has the optimizer of {stages} pipeline stages, but no model that would say which parameters each stage has"
            )
        return [[[n for n in group if n in set(names)] for group in groups] for names in self.model.stages]

    def _shape(self, name: str) -> tuple[int, ...] | None:
        """What a rank held of a parameter, where that is known."""
        if self.model is not None and name in self.model.parts:
            return self.model.parts[name][0].shape
        need = self.needs.get(name)
        return None if need is None or need.dim is not None else need.shape

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
            found[kind] = _like(part, full)
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
                found[kind] = reading._plain(held[0].read().clone(), part, on_device)
        return found

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


def _like(part: Part, full: full_weights.Full) -> torch.Tensor:
    """A full tensor as the optimizer keeps it for a parameter: each rank's part, under ZeRO-1 its rows of that."""
    p = part.parameter
    if p.device.type != "xla":
        return full_weights.cut_full(p, full, world.first()).reshape(p.shape).clone()
    axes, dim = ((), 0) if not full_weights.is_shared_out(p) else (sharded.axes_of(layer_groups.tensor_parallel()), p.partition_dim)  # type: ignore[attr-defined]
    found = sharded.from_ranks(lambda r: full_weights.cut_full(p, full, r).reshape(p.shape).contiguous(), axes, dim)
    return found if part.rows is None else part.rows.cut(found)
