"""Checkpoints in NxD's own formats (`original_files`): read into a model and an optimizer of any layout, and written so that NxD can read them.

A full tensor is joined from what tensor-parallel ranks held, by what the model's parameter says of how it is shared out, then cut for the ranks of now. One
tensor at a time is in host memory.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from nxd_jax.checkpoint import contents, expert_files, joining, original_files, original_states, pipeline_ranks, reading, united
from nxd_jax.checkpoint.joining import Joint, Need
from nxd_jax.checkpoint.original_files import Files, is_older, is_original
from nxd_jax.checkpoint.original_optimizers import Optimizer
from nxd_jax.checkpoint.original_states import ModelState
from nxd_jax.checkpoint.original_writing import export_original
from nxd_jax.checkpoint.targets import Pace, Target, target_of
from nxd_jax.tensor_parallel import full_weights, layer_groups, parallel_groups
from torch_bridge.runtime import executor

__all__ = ["export_original", "is_older", "is_original", "load"]

logger = logging.getLogger("nxd_jax")


def load(
    folder: Path,
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    strict: bool,
    optional: tuple[str, ...] = (),
) -> Any:
    """Fill a model, an optimizer and a scheduler from a checkpoint of NxD; returns its user content, or None. What is None is left alone.

    The sizes of tensor, pipeline, expert and data parallelism may differ from those it was saved with, so may ZeRO-1, fused or separate q, k and v, and the
    copies of K and V. The optimizer must have the same groups of the same parameters in the same order. optional: endings of names that may be missing on
    either side.

    Raises FileNotFoundError for parts that are missing, RuntimeError for names or shapes that differ (before anything changes), ValueError for the state of
    another optimizer, DamagedCheckpointError for files that cannot be read.
    """
    files = original_files.find(folder)
    for what, wanted, there in (("model", model, files.model), ("optimizer", optimizer, files.optimizer)):
        if wanted is not None and not there:
            raise FileNotFoundError(f"the checkpoint {folder} holds no {what}: do not pass {what}=, or load another tag")
    plan, error = _planned(files, optimizer, model)
    if model is not None:
        absent, fill = _plan_model(files, model, strict, error is not None or (plan is not None and plan.has_masters), optional)
    else:
        absent, fill = set(), lambda: None
    if error is not None:
        raise error
    fill()
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


def _planned(files: Files, optimizer: Any, model: Any) -> tuple[Optimizer | None, ValueError | None]:
    """How to fill the optimizer, and why that cannot be done: for the user to read once the model's names are known to agree."""
    try:
        return (None if optimizer is None else Optimizer(files, optimizer, model)), None
    except ValueError as error:
        return None, error


def _whole(path: Path) -> Any:
    return original_files.File(path).whole()


# -- models ------------------------------------------------------------------------------------------


def _plan_model(
    files: Files, model: torch.nn.Module, strict: bool, masters: bool, optional: tuple[str, ...] = ()
) -> tuple[set[str], Callable[[], None]]:
    """The names of weights that are only in the optimizer's master weights (masters: there are such, and they will be read), and what fills the model.

    Raises RuntimeError for a checkpoint that does not fit.
    """
    state = original_states.model_state(files.model)
    module = contents.unwrapped(model)
    found = contents.of_model(module, saving=False)
    targets = {name: target_of(name, t) for name, (t, _) in found.tensors.items()}
    needs = {k: n for target in targets.values() for k, n in target.needs.items()}
    disputed = _unite_experts(state, needs, files)
    missing = [name for name, target in targets.items() if not all(joining.is_there(state.parts, k) for k in target.keys)]
    loaded = {name: target for name, target in targets.items() if name not in missing}
    missing = [name for name in _wanted(model, module, targets, state, missing) if not name.endswith(optional)]
    used = {joining.source_of(state.parts, k) for target in loaded.values() for k in target.keys}
    absent = {name for name, target in loaded.items() if any(joining.source_of(state.parts, k) in state.absent for k in target.keys)}
    problems, joints = _joints(state, {n: t for n, t in loaded.items() if n not in absent}, needs, files)
    problems += disputed + state.differing() + _untied(state, {n: t for n, t in loaded.items() if n not in absent})
    if absent and not masters:
        problems.append(
            f"the values of {reading.listed(sorted(absent))} are in the optimizer's master weights only: pass optimizer= with ZeRO-1's states"
        )
    own = reading.Names([pipeline_ranks.said(name, pipeline_ranks.rank_of(targets[name].tensor)) for name in missing], used, problems)
    every = own.of_all() if united.needed() else own
    unexpected = [
        pipeline_ranks.said(name, state.ranks_of(name)) for name in sorted(set(state.parts) - every.used) if not name.endswith(optional)
    ]
    strict = strict and not hasattr(module, "checkpoint_state")
    problems = every.problems + _of_fewer_ranks(files) * bool(every.missing and strict)
    reading.refuse(files.folder, module, problems, every.missing, unexpected, strict)
    _warn_of_heads(files, loaded, joints)
    if absent:
        logger.info("Sharded master weights found in optim states, ignoring model weight tensors")

    def fill() -> None:
        _fill({n: t for n, t in loaded.items() if n not in absent}, joints, state)
        reading._set_extra_state(module, state.other)

    return absent, fill


def _unite_experts(state: ModelState, needs: Mapping[str, Need], files: Files) -> list[str]:
    """Join what expert-parallel ranks' files have of experts; returns why that cannot be done."""
    problems = []
    for name, peers in state.peers.items():
        try:
            held = expert_files.experts_of(name, peers.local, files.sizes["ep"], needs.get(name), peers.mark)
            if held is not None:
                state.unite(name, held)
        except ValueError as error:
            problems.append(str(error))
    return problems


def _wanted(model: Any, module: Any, targets: Mapping[str, Target], state: ModelState, missing: list[str]) -> list[str]:
    """Missing names that count: not other names of a tensor that is there, nor those that no stage of a pipeline uses, which NxD leaves out."""
    if not missing or len(state.stages) == 1:
        return missing
    there = {id(target.tensor) for name, target in targets.items() if name not in missing}
    by_rank = pipeline_ranks.names_if_known(model, {name: target.tensor for name, target in targets.items()})
    unused = set() if by_rank is None else set(pipeline_ranks.unused(targets, by_rank))
    return [name for name in missing if id(targets[name].tensor) not in there and name not in unused]


def _untied(state: ModelState, targets: Mapping[str, Target]) -> list[str]:
    """Tensors that are one here under several names, and have different values in the files."""
    problems: list[str] = []
    first: dict[int, str] = {}
    for name, target in targets.items():
        other = first.setdefault(id(target.tensor), name)
        pairs = [
            (joining.source_of(state.parts, a), joining.source_of(state.parts, b))
            for a, b in zip(targets[other].keys, target.keys, strict=True)
        ]
        if other != name and not all(original_states.same_values(state.parts[a], state.parts[b]) for a, b in pairs):
            problems.append(
                f"{pipeline_ranks.said(other, state.ranks_of(other))} and {pipeline_ranks.said(name, state.ranks_of(name))} are one tied weight here, and have "
                "different values in the checkpoint: load it into a model that does not tie them"
            )
    return problems


def _of_fewer_ranks(files: Files) -> list[str]:
    """What may be wrong where names are missing: nothing in files says how many pipeline ranks there were."""
    last = files.sizes["pp"] - 1
    if not last:
        return []
    return [
        f"the files are of pipeline ranks 0 to {last}: if there were more ranks, copy theirs (pp_rank_{last + 1:02d}) into the folder as well"
    ]


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
    problems: list[str] = []
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
    if target.where is None or not target.where.apart:
        return []
    saved, now = files.sizes["tp"], parallel_groups.size("tp")
    return [] if saved == now else [f"{name} is different on each rank, and the checkpoint is of {saved} tensor-parallel ranks, not {now}"]


def _fill(targets: Mapping[str, Target], joints: Mapping[str, Joint], state: ModelState) -> None:
    pace = Pace()
    with torch.no_grad():
        for target in targets.values():
            if target.where is not None and target.where.apart:
                _write_apart(target, state)
            else:
                target.write(lambda key: joints[key].read())
            pace.add(target.tensor)
    executor.sync()


def _write_apart(target: Target, state: ModelState) -> None:
    """Every tensor-parallel rank has a value of its own."""
    held, group = state.parts[target.keys[0]], layer_groups.tensor_parallel()
    full_weights.write(target.tensor, lambda r: held[layer_groups.place_of(group, r)].read())
