"""Conversions of subclasses that change the full state: `pre_process_full_state_before_tp_conversion` and its counterpart.

Such a hook gets and gives whole state dicts, as in the original; tensors are mapped to memory, not read. What it names by names of its own, such as stacked
experts, is shared out as `get_partition_dim` and the class's partition dims say; gate and up of one module become one weight.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nxd_jax.checkpoint import reading
from nxd_jax.checkpoint.joining import Split
from nxd_jax.training.converters import converting, entries, megatron_plan, merging, sizes, sources
from nxd_jax.training.converters.entries import FIRST, LAST, Entry, Plan
from nxd_jax.training.converters.setting import Setting, setting
from nxd_jax.training.converters.sources import Source

logger = logging.getLogger("nxd_jax")

_LAYER = re.compile(r"(?:model|language_model\.encoder)\.layers\.(\d+)\.")
_PAIR = re.compile(r"(.*)\.(gate|up)_proj\.weight")
_HF, _MEGATRON = "model.layers.", f"{megatron_plan.ROOT}.encoder.layers."

DIM = "get_partition_dim"
"""The method that says along which dim ranks share a tensor out."""


def from_full_state(converter: Any, args: Any, own: Collection[str]) -> str:
    """Hugging Face to NxD Training, through the hook. own: the converter's methods that are not the base class's."""
    named = getattr(args, "input_dir", None) or getattr(args, "hf_model_name", None)
    source = None if "load_full_state" in own else converting.source_of(args)
    found = setting(args, source.config if source is not None else {})
    sizes.check(found.sizes, found.layout, found.megatron)
    with _config_file(args, found):
        state = converter.load_full_state(args) if source is None else _whole(source)
        changed = converter.pre_process_full_state_before_tp_conversion(state, args)
    changed = repaired({name: t for name, t in changed.items() if isinstance(t, torch.Tensor)}, _module_shapes(found))
    where = Path(named or "load_full_state")
    made = sources.of_tensors(changed, where, found.config)
    made = made.untied() if found.sizes.tied else made
    plan = plan_of(found, None, converter, {name: len(shape) for name, (shape, _) in made.shapes.items()}, DIM in own)
    return converting.write_ranks(args, found, plan, made.state(plan), where)


def to_full_state(converter: Any, args: Any, own: Collection[str]) -> str:
    """NxD Training to Hugging Face, through the hook. own: as in `from_full_state`."""
    found = merging.merged(args, lambda said, held: plan_of(said, held.attention, converter, held.dims, DIM in own))
    with _config_file(args, found.setting):
        state = {p.name: p.read() for p in merging.planned_hub(found.plan, found.state)}
        changed = converter.post_process_full_state_after_tp_conversion(state, args)
    usual = merging.plan_of(found.setting)
    changed = repaired(changed, usual.shapes)
    source = sources.of_tensors(changed, found.held.folder)
    plan = usual if set(changed) == set(usual.shapes) else _as_they_are(source)
    plan.check_hub({name: shape for name, (shape, _) in source.shapes.items()}, "what the hook returned")
    copied = _as_they_are(source)
    converting.write_full(args, found.setting, copied, source.state(copied))
    return (
        f"{found.held.folder} (NxD Training, {converting.said(found.setting)}) -> {args.output_dir} (Hugging Face, {len(changed)} tensors)"
    )


def _whole(source: Source) -> dict[str, torch.Tensor]:
    return {name: source.read(name) for name in source.shapes}


def _as_they_are(source: Source) -> Plan:
    return Plan([Entry(name, (name,), (shape,), Split(None), FIRST) for name, (shape, _) in source.shapes.items()])


@contextmanager
def _config_file(args: Any, found: Setting) -> Iterator[None]:
    """`args.config` as the path of a config.json, which hooks read; a file for the time being unless there is one. Numbers of ranks are the setting's."""
    before = getattr(args, "config", None)
    layout = found.layout
    ranks = {
        "tp_size": layout.tp,
        "pp_size": layout.pp,
        "ep_size": layout.ep,
        "virtual_pp_size": layout.vpp,
        "kv_size_multiplier": layout.copies,
    }
    for name, number in {**ranks, "n_layers": found.sizes.layers}.items():
        setattr(args, name, number)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(found.config))
        args.config = str(file)
        try:
            yield
        finally:
            args.config = before


# -- plans by name -------------------------------------------------------------------------------------


def plan_of(found: Setting, attention: str | None, converter: Any, dims: Mapping[str, int], asks: bool) -> Plan:
    """The usual plan for what has the usual names, of either side; for other names what the converter says. dims: of each tensor.

    asks: whether the converter says it for the usual names, too.
    """
    dense = dataclasses.replace(found, sizes=dataclasses.replace(found.sizes, experts=0))
    every = merging.plan_of(dense, attention).entries
    names = {e.ours: {e.ours, *e.theirs} for e in every}
    odd = {_module(name) for name in dims.keys() - set().union(*names.values())} - {""}  # with names of the converter's own
    usual = [e for e in every if names[e.ours] & dims.keys() or _module(_theirs(e.ours)) not in odd]
    usual = [_with_dim(e, converter) for e in usual] if asks else usual
    known = {name for e in usual for name in (e.ours, *e.theirs, re.sub(r"_[qkv]$", "_qkv", e.ours))}
    rest = {name: count for name, count in dims.items() if name not in known and not entries.is_computed(name)}
    return Plan([*usual, *_by_names(rest, found, converter)])


def _module(name: str) -> str:
    """The MLP that a tensor is in; "" for tensors elsewhere."""
    head, mlp, _ = _theirs(name).partition(".mlp.")
    return head if mlp else ""


def _with_dim(e: Entry, converter: Any) -> Entry:
    dim = _dim(converter, e.theirs[0])
    return e if e.split.dim is None or dim is None else dataclasses.replace(e, split=dataclasses.replace(e.split, dim=dim))


def _by_names(dims: Mapping[str, int], found: Setting, converter: Any) -> list[Entry]:
    made = []
    for name, count in dims.items():
        experts = "expert_mlps" in name
        if (match := _PAIR.fullmatch(name)) and f"{match[1]}.{'up' if match[2] == 'gate' else 'gate'}_proj.weight" in dims:
            if match[2] == "gate":
                made.append(_fused(match[1], count, _number(converter, name), experts, found))
        elif name.endswith(".gate_up_proj.weight"):
            prefix = _theirs(name.removesuffix(".gate_up_proj.weight"))
            made.append(_fused(prefix, count, _number(converter, name), experts, found))
        else:
            theirs = _theirs(name)
            split = Split(_dim(converter, name), experts=experts)
            made.append(Entry(_ours(theirs, found), (theirs,), ((None,) * count,), split, _stage(name, found)))
    return made


def _fused(prefix: str, count: int, dim: int, experts: bool, found: Setting) -> Entry:
    names = f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"
    pack = lambda gate, up: torch.cat([gate, up], dim=dim)  # noqa: E731
    take = lambda t, k: t.chunk(2, dim=dim)[k]  # noqa: E731
    stage = _stage(names[0], found)
    return Entry(
        _ours(f"{prefix}.gate_up_proj.weight", found), names, ((None,) * count,) * 2, Split(dim, 2, experts=experts), stage, pack, take
    )


def _number(converter: Any, name: str) -> int:
    dim = _dim(converter, name)
    if dim is None:
        raise ValueError(f"{name}: get_partition_dim must say along which dim ranks share out gate and up projections")
    return dim


def _dim(converter: Any, name: str) -> int | None:
    """What the converter says; None for names that it does not know, of which every rank has all."""
    try:
        return int(converter.get_partition_dim(name))
    except AssertionError:
        return None


def _stage(name: str, found: Setting) -> int | str:
    if match := _LAYER.match(name):
        return int(match[1])
    if found.layout.stages > 1:
        raise ValueError(f"{name} is in no layer, and which of {found.layout.stages} pipeline stages has it is not known: use --pp_size 1")
    return LAST


def _ours(name: str, found: Setting) -> str:
    return name.replace(_HF, _MEGATRON, 1) if found.megatron else name


def _theirs(name: str) -> str:
    return name.replace(_MEGATRON, _HF, 1)


# -- experts as hooks stack them -----------------------------------------------------------------------


def _module_shapes(found: Setting) -> dict[str, tuple[int | None, ...]]:
    """Of stacked experts as modules hold them, by the ends of names."""
    of = found.sizes
    wide, back = (of.experts, of.hidden, of.intermediate), (of.experts, of.intermediate, of.hidden)
    return {
        ".expert_mlps.mlp_op.gate_proj.weight": wide,
        ".expert_mlps.mlp_op.up_proj.weight": wide,
        ".expert_mlps.mlp_op.down_proj.weight": back,
    }


def repaired(state: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int | None, ...]]) -> dict[str, torch.Tensor]:
    """The tensors, those of experts transposed that a hook left in the layout of the other side (as the original's own does), with a warning."""
    ends = {end: shape for end, shape in shapes.items() if "expert" in end}
    found, turned = {}, []
    for name, t in state.items():
        shape = ends.get(name) or next((s for end, s in ends.items() if end.startswith(".") and name.endswith(end)), None)
        if shape is not None and t.dim() > 1 and tuple(t.shape) != shape and tuple(t.transpose(-1, -2).shape) == shape:
            t = t.transpose(-1, -2)
            turned.append(name)
        found[name] = t
    if turned:
        logger.warning("%s: transposed, as the model holds experts the other way round than the hook gave them", reading.listed(turned))
    return found
