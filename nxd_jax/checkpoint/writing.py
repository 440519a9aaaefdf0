"""From a model, an optimizer and the rest to what a checkpoint's folder holds: arrays with an index, and pickled objects."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from nxd_jax.checkpoint import arrays, contents, heads, orbax_files, pipeline_ranks, united
from nxd_jax.checkpoint.contents import Contents, Part
from nxd_jax.checkpoint.placement import Placement
from nxd_jax.checkpoint.shares import Share
from nxd_jax.tensor_parallel import parallel_groups, rank_states
from torch_bridge import nested
from torch_bridge.mesh import world
from torch_bridge.mesh.stacked_arrays import Row
from torch_bridge.recorder import sharded
from torch_bridge.runtime import executor, transfer

MODEL, OPTIMIZER, SCHEDULER, USER, RANDOM = "model", "optim", "scheduler.pt", "user_content.pt", "random"
OBJECTS = "objects.pt"
"""In the folders of model and optimizer: what is no tensor."""


Unite = Callable[[Sequence[Any], Sequence[str]], Any]
"""Makes one of what each process has, given the order of names in the whole model."""


@dataclasses.dataclass
class Item:
    """A folder of a checkpoint, ready to be written: full arrays (or this process's shares of them), their index, and pickled objects.

    sources: the tensors' own arrays, with which the full ones share memory. Held here, a step that would update them in place takes new memory instead.
    """

    arrays: dict[str, Any]
    index: dict[str, Any]
    objects: bytes
    sources: list[Any]

    def write(self, folder: Path) -> None:
        """All processes call it."""
        orbax_files.save(folder, self.arrays, self.index)
        if world.process_index() == 0:
            write_bytes(folder / OBJECTS, self.objects)

    def hold(self) -> None:
        """For devices with memory of their own: copy the arrays to the host, so that a save in the background keeps no device memory."""
        for name, a in self.arrays.items():
            if isinstance(a, Share) and a.on_host() is not a:
                self.arrays[name] = a.on_host()
                self.sources.clear()
            if isinstance(a, jax.Array) and next(iter(a.devices())).platform != "cpu":
                self.arrays[name] = jax.device_put(a, a.sharding.with_memory_kind("pinned_host"))
                self.sources.clear()

    @property
    def bytes(self) -> int:
        """Of all arrays."""
        return sum(a.nbytes for a in self.arrays.values())


def write_bytes(path: Path, data: bytes) -> None:
    """A whole file."""
    path.write_bytes(data)


def model_item(model: contents.Model, without: set[str] = frozenset()) -> Item:  # type: ignore[assignment]
    """A model's folder. without: names that are not to be written."""
    found = contents.of_model(model)
    found.tensors = {name: value for name, value in found.tensors.items() if name not in without}
    return _item(found, united.extras, pipeline_ranks.order_of(model))


def optimizer_item(optimizer: torch.optim.Optimizer | Mapping[str, Any], model: contents.Model | None) -> Item:
    """An optimizer's folder. Parameters go by the model's names, if there is a model."""
    if isinstance(optimizer, Mapping):
        return _nested_item(optimizer)
    parts = contents.parts_of(optimizer, contents.names_of(model))
    return named_item(contents.of_optimizer(optimizer, parts), parts, model)


def named_item(found: Contents, parts: Sequence[Part], model: contents.Model | None) -> Item:
    """An optimizer's folder, from the state of its parameters. Fused q, k and v go by their own names.

    Raises ValueError without the model of a pipeline in several processes, whose parameters have no common numbers.
    """
    if united.needed() and any(part.name.isdigit() for part in parts):
        raise ValueError(
            "the optimizer of a pipeline in several processes has this process's parameters alone, which go by name: pass model= as well"
        )
    keys = {part.name: contents.keys_of(part.name, part.placement()) for part in parts}
    for what in ("state", "dtypes"):
        found.other[what] = {k: v for name, v in found.other[what].items() for k in keys[name]}
    for group in found.other["param_groups"]:
        group["params"] = [k for name in group["params"] for k in keys[name]]
    found.other["order"] = [k for name in found.other["order"] for k in keys[name]]
    by_name = {part.name: part for part in parts}
    like = [name for name, (t, _) in found.tensors.items() if _is_like(by_name[name.partition("/")[2]], name.partition("/")[0], t)]
    found.other["like"] = sorted({k for name in like for k in contents.keys_of(name, found.tensors[name][1])})
    return _item(found, united.states, pipeline_ranks.order_of(model))


def _is_like(part: Part, kind: str, t: torch.Tensor) -> bool:
    """Whether state has an entry for each of the parameter's."""
    return t.shape == part.shape() and not part.reduced(kind, t.shape)


def _nested_item(state: Mapping[str, Any]) -> Item:
    """The folder of an optimizer's state dict. Raises ValueError where it is a part of the whole optimizer's."""
    if united.needed():
        raise ValueError(
            "the state dict of an optimizer whose pipeline is in several processes numbers this process's parameters alone: give save_checkpoint the optimizer "
            "itself, and model="
        )
    state = contents.every_ranks(state)
    tensors = nested.collect(state, _is_large)
    found: dict[str, tuple[torch.Tensor, Placement | None]] = {f"nested/{k}": (t, contents.placed(t)) for k, t in enumerate(tensors)}
    stubs = nested.replace(state, _is_large, [_Stub(k) for k in range(len(tensors))])
    return _item(Contents(found, {"nested": stubs}), united.extras, ())


class _Stub:
    """The place of a tensor in an optimizer's state dict."""

    def __init__(self, index: int):
        self.index = index


def _is_large(x: object) -> bool:
    return isinstance(x, torch.Tensor) and (x.device.type == "xla" or x.numel() > contents.SMALL)


def _item(found: Contents, unite: Unite, order: Sequence[str]) -> Item:
    """unite: makes what is no tensor of what several processes have of it. order: names of the whole model."""
    recorded: list[tuple[str, torch.Tensor, arrays.Blocks]] = []
    made: dict[str, Any] = {}
    entries: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    seen: dict[int, str] = {}
    for name, (t, where) in found.tensors.items():
        if id(t) in seen:
            aliases.update(zip(contents.keys_of(name, where), contents.keys_of(seen[id(t)], where), strict=True))
            continue
        seen[id(t)] = name
        if where is None:
            made[name] = np.array(transfer.to_numpy(t)).reshape(t.shape or (1,))  # a number counts as one row, as on xla
            entries[name] = _entry(made[name].shape, made[name].shape, t.dtype)
            continue
        own = t.detach().unsqueeze(0) if where.apart else t
        pieces = arrays.pieces_of(own, where)
        for key, piece, tensor, how in zip(contents.keys_of(name, where), where.pieces, pieces, arrays.blocks(where), strict=True):
            recorded.append((key, tensor, how))
            entries[key] = _entry(piece.full_shape(where.shape), how.shape, t.dtype)
            if where.apart:
                entries[key]["apart"] = list(piece.part)
            if piece.experts is not None:
                entries[key]["experts"] = True
            if (rank := pipeline_ranks.rank_of(t)) is not None:
                entries[key][pipeline_ranks.AXIS] = rank
            if piece is where.pieces[0] and heads.arrangement(t):
                entries[key]["heads"] = heads.arrangement(t)
    executor.sync()
    values = [tensor._storage.held for _, tensor, _ in recorded]  # type: ignore[attr-defined]
    sources = [x for x in values if type(x) is not Row]  # of a row, what is saved is a copy
    held = {key: arrays.held(tensor, how) for key, tensor, how in recorded}
    if united.needed():
        data = found.other | {"modules": sorted({name.rpartition(".")[0] for name in found.tensors})}
        all_of_it = united.whole({**made, **held}, entries, aliases, pickled(data), order)
        index = {"layout": layout(), "tensors": all_of_it.entries, "aliases": all_of_it.aliases}
        return Item(dict(all_of_it.arrays), index, pickled(unite(all_of_it.objects, order)), sources)
    made |= {key: own.full() for key, own in held.items()}
    index = {"layout": layout(), "tensors": entries, "aliases": aliases}
    return Item(made, index, pickled(found.other), sources)


def _entry(full: Any, stored: Any, dtype: torch.dtype) -> dict[str, Any]:
    return {"shape": list(full), "stored": list(stored), "dtype": str(dtype).removeprefix("torch.")}


def layout() -> dict[str, int]:
    """The sizes of the ranks' groups, for those who look at a checkpoint."""
    if not parallel_groups.initialized():
        return {"world": world.size()}
    return {
        "world": world.size(),
        "tp": parallel_groups.size("tp"),
        "pp": parallel_groups.size("pp"),
        "dp": parallel_groups.size("dp"),
        "cp": parallel_groups.size("cp"),
        "ep": parallel_groups.size("ep"),
    }


def pickled(data: object) -> bytes:
    """Nested data with xla tensors on the CPU and numbers that differ by rank as the first rank's. Raises ValueError for tensors that differ among ranks."""
    for t in nested.collect(data, lambda x: isinstance(x, torch.Tensor) and x.device.type == "xla"):
        if sharded.varying(t).axes:
            raise ValueError(
                f"a tensor ({sharded.varying(t)}) in the state to be saved is different on each rank, and no parameter says how it is shared out: gather it "
                "first (xm.all_gather), or keep it in a buffer of the model"
            )
    buffer = io.BytesIO()
    torch.save(rank_states.split(data, [world.first()])[0], buffer)
    return buffer.getvalue()
