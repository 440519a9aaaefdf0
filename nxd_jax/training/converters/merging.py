"""A checkpoint of NxD Training put together: full tensors, what they are of, and the plan that says which of Hugging Face's each one holds."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nxd_jax.checkpoint import full_states, joining, reading, writing
from nxd_jax.checkpoint.full_states import FullState, How
from nxd_jax.checkpoint.original_states import MASTER
from nxd_jax.checkpoint.safetensors_files import Planned, planned
from nxd_jax.training.converters import adapters, hf_plan, megatron_plan, rank_files, sizes, sources
from nxd_jax.training.converters.arguments import given
from nxd_jax.training.converters.entries import COMPUTED, Entry, Plan
from nxd_jax.training.converters.held import Held
from nxd_jax.training.converters.rank_files import RankFiles
from nxd_jax.training.converters.setting import Setting, setting
from nxd_jax.training.converters.sizes import Layout

HEADS = {False: ("lm_head.weight", "model.embed_tokens.weight")}
HEADS[True] = (f"{megatron_plan.ROOT}.output_layer.weight", megatron_plan.EMBEDDING)
"""The head and the embedding in NxD Training's models; by whether it is Megatron."""


PlanOf = Callable[[Setting, Held], Plan]


def plan_of(found: Setting, attention: str | None = None) -> Plan:
    """The plan of a model."""
    return (
        megatron_plan.plan(found.sizes, found.layout.vocabulary_unit)
        if found.megatron
        else hf_plan.plan(found.sizes, found.layout, attention)
    )


@dataclasses.dataclass(frozen=True)
class Merged:
    """A checkpoint, what it is of, and its full tensors under NxD Training's names."""

    held: Held
    setting: Setting
    plan: Plan
    state: FullState


def merged(args: Any, plan_for: PlanOf | None = None) -> Merged:
    """The checkpoint that is meant: files of NxD Training's ranks, or what nxdt-train saved. plan_for: another plan than the model's.

    Raises ValueError for flags that are not so of the files, and naming tensors that are missing, of no use, or of another shape.
    """
    if getattr(args, "input_dir", None) is None:
        raise ValueError("give --input_dir, the folder of a checkpoint of NxD Training, or its model/")
    path, trust = Path(args.input_dir), bool(getattr(args, "trust", False))
    folder = folder_of(path)
    if full_states.format_of(folder) == full_states.NXD:
        return _of_nxdt_train(args, folder, trust, plan_for)
    files = rank_files.open_files(folder, trust)
    adapters.refuse(files.dims, folder)
    found = _setting(args, files)
    found = dataclasses.replace(found, layout=_of_files(args, files, found))
    plan = _checked(files, found, plan_for, files.same)
    how = How([*plan.rules, *_more_rules(found)], found.config, found.layout.copies, trust=trust, optimizer=False)
    return _finished(files, found, plan, full_states.of_original(folder, how))


def _of_nxdt_train(args: Any, folder: Path, trust: bool, plan_for: PlanOf | None) -> Merged:
    """Full arrays, query heads in the model's order: as one rank would have them."""
    state = full_states.of_nxd(folder, How(trust=trust, optimizer=_left_out(folder)))
    adapters.add(state, folder)
    held = Held(folder, {name: full.need.shape for name, full in state.model.items()})
    found = _setting(args, held)
    unit = max(found.layout.vocabulary_unit, megatron_plan.VOCABULARY_UNIT * found.layout.tp)
    found = dataclasses.replace(found, layout=Layout(vocabulary_unit=unit))
    same = lambda one, other: torch.equal(state.model[one].read(), state.model[other].read())  # noqa: E731
    return _finished(held, found, _checked(held, found, plan_for, same), state)


def _left_out(folder: Path) -> bool:
    """Whether weights are only in the optimizer's master weights (`use_master_weights_in_ckpt`)."""
    if not (folder / writing.OPTIMIZER).is_dir():
        return False
    names = (name.partition("/") for name in reading.Folder(folder / writing.OPTIMIZER).names())
    masters = {name for kind, _, name in names if kind == MASTER}
    return not masters <= reading.Folder(folder / writing.MODEL).names().keys()


def folder_of(path: Path) -> Path:
    """The folder of a checkpoint, given it or its model/."""
    return path.parent if path.name == "model" and full_states.format_of(path) is None else path


def _setting(args: Any, held: Held) -> Setting:
    found = setting(args, sources.config_in(held.folder))
    if held.megatron != found.megatron:
        raise ValueError(f"{held.folder} holds a model of --model_style {'megatron' if held.megatron else 'hf'}: give that")
    return found


def _checked(held: Held, found: Setting, plan_for: PlanOf | None, same: Callable[[str, str], bool]) -> Plan:
    """The plan, whose tensors are all there and no others. same: whether two tensors have the same values."""
    plan = plan_of(found, None if found.megatron else held.attention) if plan_for is None else plan_for(found, held)
    held.check_names(Plan([*plan.entries, *_tied(held, found, plan, same)]))
    return plan


def _finished(held: Held, found: Setting, plan: Plan, state: FullState) -> Merged:
    state.model = {e.ours: state.model[e.ours] for e in plan.entries}
    plan.check_hub({p.name: p.shape for p in planned_hub(plan, state)}, held.folder)
    return Merged(held, found, plan, state)


def planned_hub(plan: Plan, state: FullState) -> list[Planned]:
    """Hugging Face's tensors of what is in a state."""
    shapes = {name: (full.need.shape, full.dtype) for name, full in state.model.items()}
    return planned(plan.to_hub([]), shapes, lambda name: state.model[name].read())


def _of_files(args: Any, files: RankFiles, found: Setting) -> Layout:
    """The layout that files are of. Raises ValueError for flags that say otherwise."""
    there = {f"{name}_size": files.files.sizes[name] for name in ("tp", "pp", "ep")}
    there["kv_size_multiplier"] = copies = files.copies(found.sizes)
    wrong = [
        f"--{flag} {getattr(args, flag)}, the files are of {n}"
        for flag, n in there.items()
        if given(args, flag) and getattr(args, flag) != n
    ]
    if wrong:
        raise ValueError(f"{files.folder}: {'; '.join(wrong)}: leave these flags out, or give the files of those ranks")
    asked = getattr(args, "hw_backend", None)
    neighbours = files.neighbours(found.sizes, None if asked is None else asked == "trn2")
    tp, unit = there["tp_size"], found.layout.vocabulary_unit
    layout = dataclasses.replace(
        found.layout,
        tp=tp,
        pp=there["pp_size"],
        ep=there["ep_size"],
        copies=copies,
        neighbours=neighbours,
        vocabulary_unit=unit if unit > 1 else megatron_plan.VOCABULARY_UNIT * tp,
    )
    sizes.check(found.sizes, dataclasses.replace(layout, pp=1, vpp=1), found.megatron)
    return layout


def _tied(held: Held, found: Setting, plan: Plan, same: Callable[[str, str], bool]) -> list[Entry]:
    """The head of a model whose head is its embedding, which files may hold besides."""
    head, embedding = HEADS[found.megatron]
    if not found.sizes.tied or head not in held.dims:
        return []
    if not same(head, embedding):
        raise ValueError(f"{held.folder}: {head} is not {embedding}, and config.json has tie_word_embeddings: true. Set it to false")
    return [dataclasses.replace(e, ours=head) for e in plan.entries if e.ours == embedding]


def _more_rules(found: Setting) -> joining.Rules:
    """Of tensors that files may hold besides: a head that is the embedding, and what follows from the configuration."""
    rules = [(re.compile(f".*{re.escape(end)}"), joining.Split(None)) for end in COMPUTED]
    return [*rules, *[(re.compile(re.escape(HEADS[found.megatron][0])), joining.Split(0))] * found.sizes.tied]
