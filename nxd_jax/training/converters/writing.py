"""A converted model to disk: files of NxD Training's ranks, a Hugging Face folder, or one torch file. What is half written has another name."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nxd_jax._progress import bar
from nxd_jax.checkpoint import expert_files, full_writing, joining, name_maps, original_files, original_writing, safetensors_files
from nxd_jax.checkpoint.full_states import FullState
from nxd_jax.checkpoint.full_writing import Ranks
from nxd_jax.checkpoint.original_files import File, Rank
from nxd_jax.training.converters.entries import Plan
from torch_bridge.runtime import whole_files

MODEL = "model"


def progress(items: Sequence[Any], what: str) -> Iterable[Any]:
    """The items, with a bar on a terminal."""
    return bar(items, what, 2)


@contextlib.contextmanager
def unfinished(beside: Path) -> Iterator[Path]:
    """A new folder within another one, which is made if it is not there; it is gone afterwards, unless it was moved to its place."""
    beside.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".nxdt_convert_", dir=beside))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def to_ranks(state: FullState, plan: Plan, folder: Path, ranks: Ranks, force: bool = False) -> None:
    """Write `folder`/model with a file for each rank. force: replace what is there. Raises FileExistsError otherwise."""
    refuse_existing(folder / MODEL, "*.pt", force)
    with unfinished(folder) as made:
        with full_writing.scratch(folder) as place:
            full_writing.to_original(state, made, ranks, plan.rules, place, progress)
        _put(made / MODEL, folder / MODEL)


def to_hub(state: FullState, plan: Plan, folder: Path, max_bytes: int, force: bool = False) -> None:
    """Write a Hugging Face folder: safetensors files, their index, config.json. force: replace files that are there. Raises FileExistsError otherwise."""
    refuse_existing(folder, "*.safetensors", force)
    full_writing.to_hub(state, folder, plan, progress, max_bytes=max_bytes)


def to_torch_file(state: FullState, plan: Plan, path: Path, force: bool = False) -> None:
    """Write one torch file with a Hugging Face state dict. force: replace one that is there. Raises FileExistsError otherwise."""
    if path.exists() and not force:
        raise FileExistsError(f"{path} exists: give another --output_dir, or --force to replace it")
    path.parent.mkdir(parents=True, exist_ok=True)
    once = safetensors_files.Once(lambda name: state.model[name].read())
    with full_writing.scratch(path.parent) as place:
        found = {m.name: place.keep(m.of(*[once(name) for name in m.sources])) for m in progress(plan.to_hub([]), "reading")}
        whole_files.save(found, path)


def to_form(source: original_files.Files, folder: Path, xser: bool, force: bool = False) -> int:
    """Write a model's files anew with or without a file for each tensor, rank by rank; returns how many. Raises FileExistsError for files that are there."""
    refuse_existing(folder / MODEL, "*.pt", force)
    named = any("_ep_rank_" in file.path.name for file in source.model.values())
    with unfinished(folder) as made:
        for rank, file in progress(list(source.model.items()), "writing"):
            own = {name: _value(source, rank, file, name, value) for name, value in file.data.items()}
            original_writing.write(made / MODEL / rank.file_name(named), own, xser, experts_alone=rank.ep > 0)
        _put(made / MODEL, folder / MODEL)
    return len(source.model)


def _value(source: original_files.Files, rank: Rank, file: File, name: str, value: Any) -> Any:
    """What a rank's file holds under a name, marked if it is of experts; what xser files leave out the first expert-parallel rank has."""
    if not original_files.is_tensor(value):
        return value
    if not file.holds(value):
        first = source.model[dataclasses.replace(rank, ep=0)]
        return first.tensor(first.data[name])
    found = file.tensor(value)
    if source.sizes["ep"] == 1:
        return found
    mark, split = file.mark(value), joining.rule_for(name, name_maps.EXPERTS)
    if mark.experts if mark is not None else split is not None and split.experts:
        found = found.detach()
        setattr(found, expert_files.FLAG, True)
        setattr(found, expert_files.ORDER, None if mark is None else mark.held)
    return found


def refuse_existing(folder: Path, pattern: str, force: bool) -> None:
    """Raise FileExistsError for files that a conversion would replace or stand beside."""
    if not force and folder.is_dir() and any(folder.glob(pattern)):
        raise FileExistsError(f"{folder} holds {pattern} files already: give another --output_dir, or --force to replace them")


def _put(made: Path, place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place)
    os.replace(made, place)
