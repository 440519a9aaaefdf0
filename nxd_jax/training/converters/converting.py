"""The conversions themselves, each from a command line's namespace; they return a line that says what became what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nxd_jax.checkpoint.full_states import FullState
from nxd_jax.checkpoint.full_writing import Ranks
from nxd_jax.training.converters import merging, rank_files, sizes, sources, stages, writing
from nxd_jax.training.converters.entries import Plan
from nxd_jax.training.converters.setting import Setting, setting
from nxd_jax.training.converters.sources import Source

# -- Hugging Face to NxD Training ----------------------------------------------------------------------


def source_of(args: Any) -> Source:
    """The Hugging Face checkpoint that is meant. Raises ValueError if none is named."""
    name, path = getattr(args, "hf_model_name", None), getattr(args, "input_dir", None)
    if path is None and name is None:
        raise ValueError("give --input_dir, a folder or file with the weights, or --hf_model_name")
    where = downloaded(str(name)) if path is None else Path(path)
    return sources.open_source(where, getattr(args, "model_key", "model"), bool(getattr(args, "trust", False)))


def downloaded(name: str) -> Path:
    """The folder of a model of the Hugging Face Hub, which is downloaded unless it was before. Its token is huggingface_hub's (HF_TOKEN)."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.safetensors.index.json"]
    folder = Path(snapshot_download(name, allow_patterns=patterns))
    if not any(folder.glob("*.safetensors")):
        folder = Path(snapshot_download(name, allow_patterns=["*.json", sources.BIN]))
    return folder


def from_full_state(args: Any, source: Source | None = None) -> str:
    """A Hugging Face checkpoint into files of NxD Training's ranks, `<output_dir>/model`. source: in place of the one that is named."""
    source = source_of(args) if source is None else source
    found = setting(args, source.config)
    source = source.untied() if found.sizes.tied else source
    sizes.check(found.sizes, found.layout, found.megatron)
    plan = merging.plan_of(found)
    return write_ranks(args, found, plan, source.state(plan), source.path)


def write_ranks(args: Any, found: Setting, plan: Plan, state: FullState, where: object) -> str:
    """Files for each rank of what is in a state; returns the line."""
    head, embedding = merging.HEADS[found.megatron]
    state.aliases = {head: embedding} if found.sizes.tied and head not in state.model else {}
    layout, xser = found.layout, bool(getattr(args, "save_xser", False))
    pipeline = stages.pipeline(plan, found.sizes.layers, layout, list(state.aliases))
    ranks = Ranks(layout.tp, ep=layout.ep, fuse=layout.fuse_qkv, xser=xser, pipeline=pipeline)
    writing.to_ranks(state, plan, Path(args.output_dir), ranks, bool(getattr(args, "force", False)))
    return f"{where} (Hugging Face, {size(state)}) -> {Path(args.output_dir) / writing.MODEL} (NxD Training, {said(found)}{', xser' if xser else ''})"


def said(found: Setting) -> str:
    """A model's ranks in words."""
    of = found.layout
    words = [f"{'megatron' if found.megatron else 'hf'} style", f"tp {of.tp}, pp {of.pp}"]
    words += [f"vpp {of.vpp}"] * (of.vpp > 1) + [f"ep {of.ep}"] * (of.ep > 1)
    words += [f"K/V heads {of.copies} times as on {'trn2' if of.neighbours else 'trn1'}"] * (of.copies > 1)
    return ", ".join(words)


def size(state: FullState) -> str:
    """How much a checkpoint holds, in words."""
    total = sum(full.bytes for full in state.model.values())
    return f"{len(state.model)} tensors, {total / 1e9:.2f} GB"


# -- NxD Training to Hugging Face ----------------------------------------------------------------------


def to_full_state(args: Any) -> str:
    """A checkpoint of NxD Training into a Hugging Face one: the folder `output_dir`, or one torch file if that ends with .pt or .bin."""
    made = merging.merged(args)
    write_full(args, made.setting, made.plan, made.state)
    return f"{made.held.folder} (NxD Training, {said(made.setting)}) -> {args.output_dir} (Hugging Face, {size(made.state)})"


def write_full(args: Any, found: Setting, plan: Plan, state: FullState) -> None:
    """A Hugging Face checkpoint of what is in a state."""
    target, force = Path(args.output_dir), bool(getattr(args, "force", False))
    state.config = found.config
    if target.suffix in (".pt", ".bin"):
        writing.to_torch_file(state, plan, target, force)
    else:
        writing.to_hub(state, plan, target, int(float(getattr(args, "max_shard_gb", 5.0)) * 1e9), force)


# -- xser and plain files ------------------------------------------------------------------------------


def change_form(args: Any, xser: bool) -> str:
    """Files of ranks as they are, with a file for each tensor or without."""
    if getattr(args, "input_dir", None) is None:
        raise ValueError("give --input_dir, the folder of a checkpoint of NxD Training, or its model/")
    files = rank_files.open_files(Path(args.input_dir), bool(getattr(args, "trust", False))).files
    count = writing.to_form(files, Path(args.output_dir), xser, bool(getattr(args, "force", False)))
    return f"{files.folder} -> {Path(args.output_dir) / writing.MODEL}: {count} ranks' files as {'xser' if xser else 'plain files'}"
