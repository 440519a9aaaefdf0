"""Checkpoints that NxD itself can read: a file for each of its ranks, as `original_files` says."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from nxd_jax.checkpoint import contents, tags, writing
from nxd_jax.checkpoint.original_files import Rank
from nxd_jax.parallel_layers import parallel_state
from nxd_jax.parallel_layers.checkpointing import _places
from nxd_jax.utils import rank_states
from torch_bridge import executor, nested, processes, world
from torch_bridge.torch_xla.utils import serialization as xser_format


def export_original(
    path: Any, tag: str, model: Any = None, optimizer: Any = None, scheduler: Any = None, user_content: Any = None, xser: bool = False
) -> None:
    """Write a tag that NxD loads with as many tensor- and (under ZeRO-1) data-parallel ranks as there are now: its own `save_checkpoint`.

    path: a directory, or an address that fsspec knows. model: a module or a state dict; optimizer: `initialize_parallel_optimizer`'s, or one of torch.
    xser: a file for each tensor (`use_xser=True`). Complete tags of that name are replaced once the new one is written. All processes must call it.

    Under ZeRO-1 with context parallelism, the number after `dp_rank_` counts all ranks that share a parameter out. Raises NotImplementedError for an
    optimizer under expert parallelism, ValueError if there is nothing to write.
    """
    from nxd_jax.trainer.checkpoint_storage import create_checkpoint_storage

    if model is None and optimizer is None and scheduler is None and user_content is None:
        raise ValueError("export_original has nothing to write: give model=, optimizer=, scheduler= or user_content=")
    if optimizer is not None and parallel_state.get_expert_model_parallel_size() > 1:
        raise NotImplementedError(
            "optimizers under expert parallelism cannot be written in NxD's format: pass optimizer=None, or use nxd.save_checkpoint"
        )
    storage = create_checkpoint_storage(path)
    tags.check(tag)
    executor.sync()
    first = world.process_index() == 0
    name = storage.begin(tag).name if first else ""
    folder = storage.root / processes.exchange("export_original", name.encode())[0].decode()
    try:
        if model is not None:
            _write_ranks(folder / "model", _model_ranks(), lambda r: _model_state(model, r), xser)
        if optimizer is not None:
            _write_ranks(folder / "optim", _optimizer_ranks(optimizer), _by_rank(contents.inner(optimizer).state_dict()), xser)
        if first:
            _write_rest(folder, scheduler, user_content)
        processes.barrier("export_original written")
        if first:
            storage.commit(tag, folder)
    except BaseException:
        if first:
            tags.abandon(folder)
        raise
    processes.barrier("export_original done")


def write(path: Path, data: Any, xser: bool = False) -> None:
    """One rank's file; as "xser" with its tensors in files of their own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not xser:
        torch.save(data, path)
        return
    found = nested.collect(data, _is_tensor)
    folder = Path(xser_format._get_tensors_folder(path))
    folder.mkdir()
    for tid, t in enumerate(found):
        torch.save(t, xser_format._get_tensor_file(os.fspath(folder), tid))
    torch.save(nested.replace(data, _is_tensor, [xser_format.TensorReference(k) for k in range(len(found))]), path)
    info = {
        k: {"dtype": t.dtype, "shape": t.shape, "expert_model_parallel": getattr(t, "expert_model_parallel", False)}
        for k, t in enumerate(found)
    }
    torch.save(info, f"{path}.info.pt")


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _write_rest(folder: Path, scheduler: Any, user_content: Any) -> None:
    if scheduler is not None:
        writing.write_bytes(folder / "scheduler.pt", writing.pickled(scheduler.state_dict()))
    if user_content is not None:
        writing.write_bytes(folder / "user_content.pt", writing.pickled(user_content))


# -- which ranks write what --------------------------------------------------------------------------


def _write_ranks(folder: Path, ranks: Mapping[int, Rank], state: Callable[[int], Any], xser: bool) -> None:
    """The files of the ranks here; of ranks with the same file the first one's. One rank's state at a time is on the host."""
    experts = parallel_state.get_expert_model_parallel_size() > 1
    firsts: dict[Rank, int] = {}
    for r, rank in ranks.items():
        firsts.setdefault(rank, r)
    for rank, r in firsts.items():
        if r in world.current().hosted:
            write(folder / rank.file_name(experts), state(r), xser)


def _model_ranks() -> dict[int, Rank]:
    tp, pp, ep = (_places(kind) for kind in ("tensor_model", "pipeline_model", "expert_model"))
    return {r: Rank(0, tp[r], pp[r], ep[r]) for r in range(world.size())}


def _optimizer_ranks(optimizer: Any) -> dict[int, Rank]:
    tp, pp = (_places(kind) for kind in ("tensor_model", "pipeline_model"))
    found = contents.inner(optimizer)
    params = [p for group in found.param_groups for p in group["params"]]
    place: Callable[[int], Any] = found.shards_of(params[0]).among.index if contents.is_zero1(found) and params else lambda r: 0
    return {r: Rank(place(r), tp[r], pp[r]) for r in range(world.size())}


def _model_state(model: Any, rank: int) -> dict[str, Any]:
    found = contents.of_model(model)
    state: dict[str, Any] = {name: t.detach() for name, (t, _) in found.tensors.items()}
    own: dict[str, Any] = rank_states.split({**state, **found.other["other"]}, [rank], _alone)[0]
    for name, (t, _) in found.tensors.items():
        if getattr(t, "expert_model_parallel", False):
            own[name].expert_model_parallel = True
    return own


def _by_rank(state: Any) -> Callable[[int], Any]:
    return lambda r: rank_states.split(state, [r], _alone)[0]


def _alone(t: torch.Tensor) -> torch.Tensor:
    """A tensor without the rest of a storage that it shows a part of."""
    return t if t.numel() * t.element_size() == t.untyped_storage().nbytes() else t.clone()
