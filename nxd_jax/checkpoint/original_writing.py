"""Checkpoints that NxD itself can read: a file for each of its ranks, as `original_files` says."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nxd_jax import _wrapper
from nxd_jax.checkpoint import contents, expert_files, original_numbers, pipeline_ranks, reading, savers, tags, writing
from nxd_jax.checkpoint.original_files import STEP, Rank
from nxd_jax.checkpoint.storage import create_checkpoint_storage
from nxd_jax.tensor_parallel import expert_shares, expert_states, parallel_groups, rank_states, stage_states
from torch_bridge import nested
from torch_bridge.mesh import groups, processes, world
from torch_bridge.recorder import sharded
from torch_bridge.runtime import executor
from torch_bridge.torch_xla.utils import serialization as xser_format

logger = logging.getLogger("nxd_jax")


def export_original(
    path: Any,
    tag: str,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    user_content: object = None,
    xser: bool = False,
) -> None:
    """Write a tag that NxD loads with as many tensor-, pipeline- and (under ZeRO-1) data-parallel ranks as there are now: its own `save_checkpoint`.

    path: a directory, or an address that fsspec knows. model: a module or a state dict; optimizer: `initialize_parallel_optimizer`'s, or one of torch.
    xser: a file for each tensor (`use_xser=True`). Complete tags of that name are replaced once the new one is written. All processes must call it.
    Of a pipeline each rank's file has the weights of its own stages, stage s with rank s modulo their number; the optimizer needs the model.

    Under ZeRO-1 with context parallelism, the number after `dp_rank_` counts all ranks that share a parameter out. Raises ValueError if there is nothing to
    write.
    """
    if model is None and optimizer is None and scheduler is None and user_content is None:
        raise ValueError("export_original has nothing to write: give model=, optimizer=, scheduler= or user_content=")
    storage = create_checkpoint_storage(path)
    tags.check(tag)
    executor.sync()
    parts = {} if model is None else {"model": model_files(model, xser)}
    if optimizer is not None:
        parts["optim"] = optimizer_files(optimizer, xser, model)
    first = world.process_index() == 0
    folder = savers.begin(storage, tag)
    with savers.writing(folder, storage.dirname(), first):
        for part, files in parts.items():
            files.write(folder / part)
        if first:
            _write_rest(folder, scheduler, user_content)
        processes.barrier("export_original written")
        if first:
            storage.commit(tag, folder)
    processes.barrier("export_original done")


def write(path: Path, data: Any, xser: bool = False, without: Collection[str] = (), experts_alone: bool = False) -> None:
    """One rank's file; as "xser" with its tensors in files of their own, but for the values of those `without`. experts_alone: of these files, too, leave out
    those of tensors that are not of experts: the first expert-parallel rank has them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not xser:
        torch.save(data, path)
        return
    found = nested.collect(data, _is_tensor)
    folder = Path(xser_format._get_tensors_folder(path))
    folder.mkdir()
    absent = {id(data[name]) for name in without}
    absent |= {id(t) for t in found if experts_alone and not getattr(t, expert_files.FLAG, False)}
    for tid, t in enumerate(found):
        if id(t) not in absent:
            torch.save(t, xser_format._get_tensor_file(os.fspath(folder), tid))
    torch.save(nested.replace(data, _is_tensor, [xser_format.TensorReference(k) for k in range(len(found))]), path)
    torch.save({k: _info(t) for k, t in enumerate(found)}, f"{path}.info.pt")


def _info(t: torch.Tensor) -> dict[str, Any]:
    """What NxD notes of a tensor; of experts also how ranks hold them, which it does not."""
    found = {"dtype": t.dtype, "shape": t.shape, expert_files.FLAG: getattr(t, expert_files.FLAG, False)}
    return found | {expert_files.ORDER: getattr(t, expert_files.ORDER, None)} if found[expert_files.FLAG] else found


def _is_tensor(x: object) -> bool:
    return isinstance(x, torch.Tensor)


def _write_rest(folder: Path, scheduler: Any, user_content: object) -> None:
    if scheduler is not None:
        writing.write_bytes(folder / "scheduler.pt", writing.pickled(scheduler.state_dict()))
    if user_content is not None:
        writing.write_bytes(folder / "user_content.pt", writing.pickled(user_content))


# -- which ranks write what --------------------------------------------------------------------------


@dataclasses.dataclass
class RankFiles:
    """`model/` or `optim/`, ready to be written.

    states: for each pipeline rank what stands for all its ranks' states; one for all if they have the same. ranks: for each file that is written here the rank
    whose state it holds. experts: names tell expert-parallel ranks. of_experts: the tensors of experts among a rank's state, each with what is to be marked
    on it. without: tensors whose values are left out, with `xser`.
    """

    states: Sequence[Any]
    ranks: Mapping[Rank, int]
    xser: bool
    experts: bool = False
    of_experts: Callable[[Rank, Any], list[tuple[torch.Tensor, dict[str, Any]]]] = lambda rank, own: []
    without: Collection[str] = ()
    bytes: int = 0
    """Of the tensors written."""
    _held: dict[Rank, Any] | None = None

    def hold(self) -> None:
        """Copy to the host what is to be written: from now on nothing changes it."""
        self._held = {}
        for pp in {rank.pp for rank in self.ranks}:
            own = [rank for rank in self.ranks if rank.pp == pp]
            found = rank_states.split(self._state(pp), [self.ranks[rank] for rank in own], torch.clone)
            self._held.update(zip(own, found, strict=True))
        self.states = ()

    def _state(self, pp: int) -> Any:
        return self.states[pp] if len(self.states) > 1 else self.states[0]

    def write(self, folder: Path) -> None:
        """All processes call it. Unless all is held, one rank's state at a time is on the host."""
        for rank, r in self.ranks.items():
            own = self._held[rank] if self._held is not None else rank_states.split(self._state(rank.pp), [r], _alone)[0]
            for t, marks in self.of_experts(rank, own):
                for attribute, value in marks.items():
                    setattr(t, attribute, value)
            alone = self.xser and rank.ep > 0
            self.bytes += sum(t.nbytes for t in nested.collect(own, _is_tensor) if not alone or getattr(t, expert_files.FLAG, False))
            write(folder / rank.file_name(self.experts), own, self.xser, [name for name in self.without if name in own], alone)


def model_files(model: torch.nn.Module, xser: bool, without: Collection[str] = ()) -> RankFiles:
    """A model's (a module, or a state dict). without: names of weights to leave out. Raises ValueError for these unless `xser`, and for a pipeline's state
    dict."""
    if without and not xser:
        raise ValueError(
            "weights whose master weights are in the optimizer's state can be left out of NxD's files only where each tensor has its own: "
            "save_checkpoint(..., avoid_saving_lower_precision_weights=True) needs use_xser=True, or NXD_JAX_CHECKPOINT_FORMAT=nxd"
        )
    found = contents.of_model(model)
    tensors = {name: t for name, (t, _) in found.tensors.items()} | _lent_weights(model)
    state: dict[str, Any] = {name: t.detach() for name, t in tensors.items()}
    marks = {name: expert_files.marks_for(t) for name, t in tensors.items() if _is_of_experts(model, t)}
    tp, pp, ep = (_places_in(kind) for kind in ("tp", "pp", "ep"))
    ranks = _firsts({r: Rank(0, tp[r], pp[r], ep[r]) for r in range(world.size())})
    other = found.other["other"]
    by_rank = pipeline_ranks.names_of(model, tensors)
    states = [{**state, **other}] if by_rank is None else _of_stages(state, other, by_rank)
    left_out = without if by_rank is None else _with_aliases(without, tensors)

    def of_experts(_: Rank, own: Any) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        return [(own[name], said) for name, said in marks.items() if name in own]

    return RankFiles(states, ranks, xser, _expert_parallel(), of_experts, left_out)


def _is_of_experts(model: Any, t: torch.Tensor) -> bool:
    """Whether expert-parallel ranks have different experts of a tensor. Tensors of a state dict have lost the attributes that say so."""
    if not isinstance(model, Mapping) or not _expert_parallel() or t.device.type != "xla":
        return expert_shares.is_shared_out(t)
    return bool(set(sharded.varying(t).axes) & set(sharded.axes_of(parallel_groups.group("ep"))))


def _lent_weights(model: Any) -> dict[str, torch.Tensor]:
    """Weights that pipeline ranks here read, and that lie with other processes."""
    module = contents.unwrapped(model)
    own = dict(module.named_parameters(remove_duplicate=False)) if isinstance(module, torch.nn.Module) else {}
    found = pipeline_ranks.lent_to(model, lambda name: own[name])
    if found and hasattr(module, "checkpoint_state"):
        raise NotImplementedError(
            f"{reading.listed(list(found))} lie with another process, and NxD's file of this one would have to say whether adapters leave them out: start the "
            "script with nxd-run, which hosts all ranks in one process, or use NXD_JAX_CHECKPOINT_FORMAT=nxd"
        )
    return found


def _of_stages(state: Mapping[str, Any], other: Mapping[str, Any], by_rank: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """What each pipeline rank has of a state, and of what is no tensor."""
    unused = pipeline_ranks.unused(state, by_rank)
    if unused:
        logger.warning("no stage of the pipeline uses %s: NxD's files do not have them", reading.listed(unused))
    return stage_states.parts({**state, **other}, by_rank)


def _with_aliases(names: Collection[str], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names with the other ones of the same tensors."""
    same = {id(tensors[name]) for name in names if name in tensors}
    return [name for name, t in tensors.items() if id(t) in same]


def optimizer_files(optimizer: torch.optim.Optimizer, xser: bool, model: Any = None) -> RankFiles:
    """An optimizer's, or those of its state dict. model: of a pipeline, which says which parameters each rank has.

    Raises ValueError for a pipeline without its model or the optimizer itself.
    """
    state, place = _optimizer_state(optimizer)
    tp, pp, ep = (_places_in(kind) for kind in ("tp", "pp", "ep"))
    named = _expert_parallel() and "base_state" not in state  # of ZeRO-1's files the data-parallel rank says whose experts they have
    ranks = _firsts({r: Rank(place(r), tp[r], pp[r], ep[r] if named else 0) for r in range(world.size())})
    original_numbers.check(optimizer, state, model)
    alone = _wrapper.pipeline_of(model) is None
    found = [(state, _flags(optimizer, state))] if alone else original_numbers.by_rank(optimizer, state, model)
    flags = [own for _, own in found]
    states = [_numbered(own, of) for own, of in found]

    def of_experts(rank: Rank, own: Any) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        return _moments_of_experts(own, flags[rank.pp] if len(flags) > 1 else flags[0])

    return RankFiles(states, ranks, xser, named, of_experts)


def _flags(optimizer: Any, state: Mapping[str, Any]) -> list[list[bool]]:
    """For each group which parameters are of experts; of a state dict, those whose state differs among expert-parallel ranks."""
    if not isinstance(optimizer, Mapping):
        return contents.are_experts(optimizer)
    if not _expert_parallel() or "state" not in state:
        return []
    axes = set(sharded.axes_of(parallel_groups.group("ep")))

    def differs(own: Mapping[str, Any]) -> bool:
        return any(isinstance(t, torch.Tensor) and t.device.type == "xla" and set(sharded.varying(t).axes) & axes for t in own.values())

    return [[differs(state["state"].get(k, {})) for k in group["params"]] for group in state["param_groups"]]


def _numbered(state: Mapping[str, Any], flags: expert_states.Flags) -> Mapping[str, Any]:
    """The state as NxD numbers it: ZeRO-1's with experts by themselves."""
    if not _expert_parallel() or "base_state" not in state or expert_states.is_combined(state):
        return state
    return expert_states.combined(state, flags)


def _moments_of_experts(own: Mapping[str, Any], flags: expert_states.Flags) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """The tensors of experts in a state that is not ZeRO-1's."""
    if "base_state" in own:
        return []
    pairs = zip(own["param_groups"], flags, strict=False)
    kept = [own["state"].get(k, {}) for group, of in pairs for k, flag in zip(group["params"], of, strict=True) if flag]
    return [(t, {expert_files.FLAG: True}) for state in kept for kind, t in state.items() if _is_tensor(t) and kind != STEP]


def _places_in(kind: str) -> dict[int, int]:
    """Every rank's place in its groups of a kind: all the same one before ranks are laid out."""
    return parallel_groups.places(kind) if parallel_groups.initialized() else dict.fromkeys(range(world.size()), 0)


def _expert_parallel() -> bool:
    return parallel_groups.initialized() and parallel_groups.size("ep") > 1


def _firsts(ranks: Mapping[int, Rank]) -> dict[Rank, int]:
    """Of ranks with the same file the first one, if it is here."""
    firsts: dict[Rank, int] = {}
    for r, rank in ranks.items():
        firsts.setdefault(rank, r)
    return {rank: r for rank, r in firsts.items() if r in world.current().hosted}


def _optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[Mapping[str, Any], Callable[[int], Any]]:
    """The state, and for a rank the number of its file: under ZeRO-1 its place among those that share a parameter out."""
    if isinstance(optimizer, Mapping):
        state = contents.every_ranks(optimizer)
        if "base_state" not in state:
            return state, lambda r: 0
        return state, groups.resolve(parallel_groups.layout().zero1_lists()).index
    found = contents.inner(optimizer)
    state = dict(contents.plain_state(found, found.state_dict()))
    params = [p for group in found.param_groups for p in group["params"]]
    if not contents.is_zero1(found) or not params:
        return state, lambda r: 0
    if any(found.shard_of[p].dtype != p.dtype for p in params):  # NxD itself leaves them out unless use_master_weights_in_ckpt
        state["sharded_master_weights"] = {i: found.shard_of[p].detach() for i, p in enumerate(params)}
    return state, found.shards_of(params[0]).among.index


def _alone(t: torch.Tensor) -> torch.Tensor:
    """A tensor without the rest of a storage that it shows a part of."""
    return t if t.numel() * t.element_size() == t.untyped_storage().nbytes() else t.clone()
