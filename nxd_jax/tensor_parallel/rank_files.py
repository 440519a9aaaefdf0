"""A checkpoint with one file, or one folder of tensors, for each tensor and pipeline parallel rank.

    <dir>/tp_rank_00_pp_rank_00/checkpoint.pt                                         torch.save of the rank's own data, tensors on the CPU
    <dir>/tp_rank_00_pp_rank_00, <dir>/tp_rank_00_pp_rank_00.tensors/tensor_0.pt ...  with `save_xser`

With `master_dp_only=False` the name goes on with `_dp_rank_00`. A process that hosts several ranks writes and reads all their files, so checkpoints
move between it, real processes and NxD. A file is written under another name first: one that has its name is whole.
"""

from __future__ import annotations

import copy
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from nxd_jax import _progress
from nxd_jax.tensor_parallel import full_weights, parallel_groups, rank_states, stage_states
from nxd_jax.tensor_parallel.casting import cast_tensor
from torch_bridge import nested
from torch_bridge.mesh import processes, world
from torch_bridge.recorder.sharded import from_ranks
from torch_bridge.runtime import executor, whole_files
from torch_bridge.torch_xla.utils import serialization as xser

logger = logging.getLogger("nxd_jax")

NXD_SKIP_RENDEZVOUS = "NXD_SKIP_RENDEZVOUS"
"""Name of the environment variable: with 1, processes do not wait for each other."""

_MANY = 8
"""Files from which on a progress bar is shown."""


def save(
    checkpoint: dict[Any, Any],
    output_dir: str | os.PathLike[str],
    save_serially: bool = True,
    save_xser: bool = False,
    down_cast_bf16: bool = False,
    master_dp_only: bool = True,
) -> None:
    """`parallel_layers.save`: write each tensor and pipeline parallel rank's own values of nested data such as `{"model": model.state_dict()}`.

    save_serially: one process writes after the other (host memory of real processes; without effect if there is one). save_xser: every tensor on xla into
    a file of its own; load it with `load_xser`. down_cast_bf16: float32 tensors as bfloat16. master_dp_only: only data (and context) parallel
    rank 0 writes; False: all of them do, each under its own name, which ZeRO-1 states and experts need.

    All processes must call it. Numbers that differ by rank are written as each rank's own. Of what a pipeline's `local_state_dict()` returned, each
    pipeline rank's file has what its stages read; a copy of that, and the state of an optimizer in a process with several pipeline ranks, are in all files.

    Raises ValueError for a ZeRO-1 optimizer's state of which some ranks' parts would be in no file.
    """
    directory = os.fspath(output_dir)
    logger.info("saving checkpoint to %s", directory)
    if master_dp_only and parallel_groups.size("ep") > 1:
        warnings.warn(
            "parallel_layers.save(master_dp_only=True) keeps the experts of expert parallel rank 0 only: pass master_dp_only=False, or use "
            "neuronx_distributed.save_checkpoint",
            stacklevel=2,
        )
    _check_shards(checkpoint, master_dp_only)
    executor.sync()
    os.makedirs(directory, exist_ok=True)
    writers = _writers(directory, master_dp_only)
    cast = cast_tensor if down_cast_bf16 else None
    write = _write_xser if save_xser else _write_plain
    by_stage = stage_states.by_rank(checkpoint)
    turns = range(world.process_count()) if save_serially and not save_xser else [world.process_index()]
    for turn in turns:
        if turn == world.process_index():
            for data, own in _of_stages(checkpoint, by_stage, writers):
                write(data, own, cast)
        if len(turns) > 1:
            wait("save turn")
    wait("save")


def load(
    chkpt_path: str | os.PathLike[str],
    model: torch.nn.Module | None = None,
    model_or_optimizer: object = None,
    model_key: str | None = "model",
    load_xser: bool = False,
    sharded: bool = True,
    strict: bool = True,
    master_dp_only: bool = True,
    weights_only: bool = False,
) -> Any:
    """`parallel_layers.load`: read what `save` wrote, every rank its own; into a model or an optimizer if one is given.

    model, model_or_optimizer: what to load into (two names for one thing). model_key: where its state is in the checkpoint; None: it is the whole
    checkpoint. load_xser, master_dp_only: as it was saved. sharded=False: `chkpt_path` is one file with full weights; each rank takes its
    part (`get_sharded_model_dict`). strict: as in `torch.nn.Module.load_state_dict`. weights_only: as in `torch.load`; the default False runs whatever
    code a file contains, as NxD's does: load only files that you trust.

    Returns the rest of the checkpoint: all of it without a model, None if the model's state was the whole. Tensors in it on which ranks
    disagree are on xla. The order of arguments in the API guide (`load(dir, model, "model")`) works as well.

    Raises FileNotFoundError (naming the files that are there), KeyError without `model_key` in the checkpoint, RuntimeError for missing and unexpected
    keys and other shapes, ValueError for `sharded=False` without a model.
    """
    if isinstance(model_or_optimizer, str):
        model_or_optimizer, model_key = None, model_or_optimizer
    target = model if model is not None else model_or_optimizer
    if not sharded and target is None:
        raise ValueError("load(sharded=False) needs the model: its parameters say which part each rank takes")
    path = os.fspath(chkpt_path)
    logger.info("loading checkpoint from %s", path)
    executor.sync()
    found = _read(path, load_xser, sharded, master_dp_only, weights_only)
    rest = found.merge(found.states) if target is None else _load_into(target, found, model_key, sharded, strict, path)
    wait("load")
    return rest


def ensure_directory_exists(filename: str | os.PathLike[str]) -> None:
    """Make the directory that a file will be in."""
    directory = os.path.dirname(os.fspath(filename))
    if directory:
        os.makedirs(directory, exist_ok=True)


def get_sharded_model_dict(model: torch.nn.Module, model_state_dict: dict[str, Any]) -> dict[str, Any]:
    """This rank's parts of a state dict with full weights: a new dict, ready for `model.load_state_dict` (NxD's changes the one given).

    Parameters with attributes of tensor or expert parallelism are cut as those say. K/V weights may be full or hold their copies already; fused GQA weights are
    full Q, K and V below each other. Modules with a `preshard_hook(state_dict, prefix + "weight")` may change the full weights first (padding).
    In a process that hosts several ranks, parts are xla tensors that differ by rank.
    """
    module = _unwrapped(model)
    full = copy.copy(model_state_dict)
    preshard(module, full, "")
    for name, parameter in _tensors_of(module).items():
        if name in full and full_weights.is_divided(parameter):
            full[name] = _cut(name, parameter, full[name])
    return full


def _check_shards(checkpoint: Any, master_dp_only: bool) -> None:
    """Raise ValueError if ranks that share a file have different parts of a ZeRO-1 optimizer's state."""
    lost = {"data": parallel_groups.size("dp") if master_dp_only else 1, "context": parallel_groups.size("cp")}
    kinds = [f"{size} {kind}-parallel ranks" for kind, size in lost.items() if size > 1]
    if kinds and nested.collect(checkpoint, _is_zero1_state):
        remedy = "use neuronx_distributed.save_checkpoint" if lost["context"] > 1 else "pass master_dp_only=False, to load too"
        raise ValueError(
            f"parallel_layers.save(master_dp_only={master_dp_only}) keeps the ZeRO-1 optimizer state of the first of {' and '.join(kinds)} only, and each has "
            f"its own part: {remedy}"
        )


def _is_zero1_state(value: object) -> bool:
    return isinstance(value, dict) and {"base_state", "shape_info"} <= value.keys()


# -- names -------------------------------------------------------------------------------------------


def _names(master_dp_only: bool) -> list[str]:
    """The name of every rank's file, by rank; ranks with the same values share one."""
    tp, pp, dp = (parallel_groups.places(kind) for kind in ("tp", "pp", "dp"))
    tail = "" if master_dp_only else "_dp_rank_{:02d}"
    return [f"tp_rank_{tp[r]:02d}_pp_rank_{pp[r]:02d}" + tail.format(dp[r]) for r in range(world.size())]


def _writers(directory: str, master_dp_only: bool) -> dict[int, str]:
    """The ranks here that write, and the files that they write: of the ranks that share a file, the first."""
    names = _names(master_dp_only)
    return {r: os.path.join(directory, names[r]) for r in world.current().hosted if names.index(names[r]) == r}


# -- writing -----------------------------------------------------------------------------------------


def _of_stages(checkpoint: Any, by_stage: list[Any] | None, writers: dict[int, str]) -> list[tuple[Any, dict[int, str]]]:
    """The data of each pipeline rank here with its writers; without a pipeline's state in it, all have the same."""
    if by_stage is None:
        return [(checkpoint, writers)] if writers else []
    places = parallel_groups.places("pp")
    return [(by_stage[pp], {r: path for r, path in writers.items() if places[r] == pp}) for pp in sorted({places[r] for r in writers})]


def _write_plain(checkpoint: Any, writers: dict[int, str], cast: Any) -> None:
    states = rank_states.split(checkpoint, list(writers), cast)
    for path, state in _with_bar(list(zip(writers.values(), states, strict=True)), "saving"):
        if os.path.isfile(path):
            os.remove(path)  # what save_xser left under this name
        os.makedirs(path, exist_ok=True)
        whole_files.save(state, os.path.join(path, "checkpoint.pt"))


def _write_xser(checkpoint: Any, writers: dict[int, str], cast: Any) -> None:
    """Tensor by tensor, so that no more than one is in host memory."""
    found = nested.collect(checkpoint, _on_xla)
    folders = {r: xser._get_tensors_folder(path) for r, path in writers.items()}
    for folder in folders.values():
        shutil.rmtree(_unfinished(folder), ignore_errors=True)
        os.makedirs(_unfinished(folder))
    for tid, t in _with_bar(list(enumerate(found)), "saving"):
        for folder, value in zip(folders.values(), rank_states.values(t, list(writers)), strict=True):
            torch.save(value if cast is None else cast(value), xser._get_tensor_file(_unfinished(folder), tid))
    for r, path in writers.items():
        references = nested.replace(rank_states.numbers_of(checkpoint, r), _on_xla, [xser.TensorReference(k) for k in range(len(found))])
        if cast is not None:
            references = rank_states.split(references, [r], cast)[0]
        _remove(path)
        _remove(folders[r])
        os.replace(_unfinished(folders[r]), folders[r])
        whole_files.save(references, path)


def _unfinished(path: str) -> str:
    return f"{path}.unfinished"


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.exists(path):
        os.remove(path)


def _on_xla(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "xla"


def _with_bar(items: Sequence[Any], what: str) -> Iterable[Any]:
    """The items, with a bar on a terminal if there are many and tqdm is installed."""
    return _progress.bar(items, what, _MANY)


# -- reading -----------------------------------------------------------------------------------------


class _Contents(NamedTuple):
    """What each hosted rank's file holds (ranks with the same file share one object), tensors on the CPU; and the ids of those that were on xla."""

    states: dict[int, Any]
    on_xla: set[int]

    def merge(self, states: dict[int, Any], likes: rank_states.Likes | None = None) -> Any:
        return rank_states.merge(states, likes, self.on_xla)


def _read(path: str, load_xser: bool, sharded: bool, master_dp_only: bool, weights_only: bool) -> _Contents:
    hosted = world.current().hosted
    names = _names(master_dp_only)
    files = {r: os.path.join(path, names[r]) if sharded else path for r in hosted}
    if sharded and not load_xser:
        files = {r: os.path.join(f, "checkpoint.pt") for r, f in files.items()}
    missing = [f for f in dict.fromkeys(files.values()) if not os.path.isfile(f)]
    if missing:
        raise FileNotFoundError(_explain_missing(missing, path, load_xser, sharded))
    on_xla: set[int] = set()
    contents = {}
    for file in _with_bar(list(dict.fromkeys(files.values())), "loading"):
        contents[file] = read_xser(file, weights_only, on_xla) if load_xser else _read_plain(file, weights_only)
    return _Contents({r: contents[f] for r, f in files.items()}, on_xla)


def _read_plain(path: str, weights_only: bool) -> Any:
    return torch.load(path, map_location="cpu", weights_only=weights_only)


def read_xser(path: str, weights_only: bool, on_xla: set[int]) -> Any:
    """A checkpoint whose tensors have files of their own; their ids are added to `on_xla`."""
    with torch.serialization.safe_globals([xser.TensorReference]):
        data = _read_plain(path, weights_only)
    folder = xser._get_tensors_folder(path)
    references = nested.collect(data, _is_reference)
    found = {tid: _read_plain(xser._get_tensor_file(folder, tid), weights_only) for tid in dict.fromkeys(r.tid for r in references)}
    on_xla.update(map(id, found.values()))
    return nested.replace(data, _is_reference, [found[r.tid] for r in references])


def _is_reference(x: object) -> bool:
    return isinstance(x, xser.TensorReference)


def _explain_missing(missing: list[str], path: str, load_xser: bool, sharded: bool) -> str:
    shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    text = f"no checkpoint file {shown}"
    if not sharded:
        return f"{text}: with sharded=False, load takes the path of one file with full weights"
    if not os.path.isdir(path):
        return f"{text}: there is no directory {path}"
    there = sorted(os.listdir(path))
    other = "load_xser=False" if load_xser else "load_xser=True"
    if any(n.endswith(".tensors") for n in there) != load_xser:
        text += f" (it was saved the other way: pass {other})"
    listed = ", ".join(there[:8]) + (f" and {len(there) - 8} more" if len(there) > 8 else "")
    return f"{text}; {path} has {listed or 'no files'}. Tensor and pipeline parallel sizes, and master_dp_only, must be those it was saved with"


# -- into models and optimizers ----------------------------------------------------------------------


def _load_into(target: Any, found: _Contents, key: str | None, sharded: bool, strict: bool, path: str) -> Any:
    """Load into a model or optimizer; what is left of the checkpoint."""
    first = next(iter(found.states.values()))
    if key is not None and key not in first:
        raise KeyError(
            f"{path} has no key {key!r}, only {', '.join(map(repr, list(first)[:8]))}: pass model_key=..., or model_key=None if the file is the state itself"
        )
    own = {r: state if key is None else state[key] for r, state in found.states.items()}
    if not isinstance(target, torch.nn.Module):
        target.load_state_dict(found.merge(own, _states_of(target, next(iter(own.values())))))
    elif sharded:
        tensors = {(name,): t for name, t in _tensors_of(_unwrapped(target)).items()}
        target.load_state_dict(found.merge(own, tensors), strict=strict)
    else:
        target.load_state_dict(get_sharded_model_dict(target, next(iter(own.values()))), strict=strict)
    if key is None:
        return None
    return found.merge({r: {k: v for k, v in state.items() if k != key} for r, state in found.states.items()})


def _unwrapped(model: torch.nn.Module) -> Any:
    """The module whose parameters have the names of the full model's."""
    return getattr(model, "original_torch_module", None) or model


def _tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by their names in the state dict."""
    return {name: t for name, t in module.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}


def _states_of(optimizer: Any, state: Any) -> dict[tuple[Any, ...], torch.Tensor]:
    """For the tensors of an optimizer's state dict that have their parameter's shape: that parameter."""
    parameters = [p for group in getattr(optimizer, "param_groups", []) for p in group["params"]]
    found = {}
    for index, entry in (state.get("state") or {}).items() if isinstance(state, dict) else ():
        for name, t in entry.items() if isinstance(entry, dict) else ():
            if isinstance(index, int) and index < len(parameters) and getattr(t, "shape", None) == parameters[index].shape:
                found["state", index, name] = parameters[index]
    return found


def _cut(name: str, parameter: Any, full: Any) -> torch.Tensor:
    """Each rank's part of a full weight, as a tensor that lies among the ranks as the parameter does."""
    try:
        if parameter.device.type != "xla":
            return full_weights.cut_full(parameter, full, world.first())
        return from_ranks(lambda r: full_weights.cut_full(parameter, full, r), full_weights.cuts_now(parameter))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def preshard(module: torch.nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Let modules that have a `preshard_hook` change the full weights; those below such a module are its business."""
    hook: Callable[[dict[str, Any], str], Any] | None = getattr(module, "preshard_hook", None)
    if hook is None:
        for name, child in module.named_children():
            preshard(child, state, f"{prefix}{name}.")
        return
    hook(state, f"{prefix}weight")
    if f"{prefix}bias" in state and _is_ours(module):
        hook(state, f"{prefix}bias")


def _is_ours(module: torch.nn.Module) -> bool:
    from nxd_jax.tensor_parallel.base_layer import BaseParallelLayer

    return isinstance(module, BaseParallelLayer)


def wait(what: str) -> None:
    """Wait for all processes."""
    if os.environ.get(NXD_SKIP_RENDEZVOUS) != "1":
        processes.barrier(f"checkpointing {what}")
