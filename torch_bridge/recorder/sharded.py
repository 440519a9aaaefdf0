"""Tensors that differ among ranks, for those who make or read them: one tensor per rank in, one per rank out.

`torch_bridge.varying(t)` says how a tensor lies on the mesh.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from torch_bridge.mesh import groups, sharding, world
from torch_bridge.mesh.groups import Groups


class Varying(NamedTuple):
    """How a tensor lies on the mesh.

    axes: the mesh axes along which ranks hold different values, outermost first (empty: all ranks agree). spec: the `PartitionSpec` of the
    global array. local_shape: what each rank sees. global_shape: of the array that holds all ranks' blocks.
    """

    axes: tuple[str, ...]
    spec: Any
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]

    @property
    def known(self) -> bool:
        """False under torchrun where `axes` is empty: each process has put its own data on xla, and nobody has compared them."""
        return bool(self.axes) or world.process_count() == 1

    def __str__(self) -> str:
        if not self.known:
            return (
                f"shape {list(self.local_shape)}, the same on all ranks if each process put the same data on xla: this is one of several processes, and "
                "nothing that this one knows of makes it differ"
            )
        if not self.axes:
            return f"shape {list(self.local_shape)}, the same on all ranks"
        return f"shape {list(self.local_shape)}, different along {', '.join(self.axes)}: {list(self.global_shape)} sharded as {self.spec}"


def varying(t: torch.Tensor) -> Varying:
    """Which mesh axes an xla tensor varies over, and its sharding; runs what is pending."""
    storage = _storage_of(t)
    size = tuple(t.shape)
    if storage.held is None or not sharding.active():
        return Varying((), sharding.REPLICATED, size, size)
    spec = sharding.spec_of(storage.held)
    whole = t._layout is storage.layout  # type: ignore[attr-defined]
    shape = tuple(storage.held.shape) if whole else sharding.global_shape(size, sharding.spec_for(sharding.axes_of(spec)))
    axes = sharding.ordered(sharding.axes_of(spec))
    return Varying(axes, spec, size, shape)


def shards(t: torch.Tensor) -> list[torch.Tensor]:
    """Every hosted rank's own value, as CPU tensors in rank order, of an xla tensor (which runs what is pending) or a copy of one on the CPU."""
    from torch_bridge.recorder import copies, rank_tensor

    if isinstance(t, rank_tensor.RankTensor):
        return list(t.parts)
    storage = _storage_of(t)
    hosted = world.current().hosted
    if storage.held is None or not sharding.active():
        return [t.detach().cpu()] * len(hosted)
    return [copies.view_of(block, t) for block in sharding.blocks(storage.array, storage.layout.size)]  # type: ignore[arg-type]


def from_ranks(of: Callable[[int], torch.Tensor], axes: Iterable[str] | None = None, dim: int = 0) -> torch.Tensor:
    """An xla tensor whose value on each rank is `of(rank)`, a CPU tensor (called once for each distinct place along `axes`).

    axes: mesh axes along which the values differ; None: all of them. dim: along which the blocks lie side by side in the global array.
    """
    from torch_bridge.recorder import copies

    names = sharding.ordered(world.current().axes if axes is None else axes)
    places = [world.coordinates(a) for a in names]
    made: dict[tuple[int, ...], torch.Tensor] = {}
    blocks = []
    for rank in world.current().hosted:
        place = tuple(p[rank] for p in places)
        if place not in made:
            made[place] = of(rank)
        blocks.append(made[place])
    if not sharding.active():
        return copies.upload(blocks[0])
    spec = sharding.spec_for(names, dim if blocks[0].dim() else 0)
    return copies.upload_blocks(blocks, spec)


def expect(t: torch.Tensor, axes: Iterable[str], dim: int = 0) -> None:
    """Declare that ranks hold different parts of a tensor along these axes (a tensor-parallel weight), side by side along `dim` in the global array.

    Updates that differ along them are then no drift.
    """
    if sharding.active():
        t._storage.describe(spec=sharding.spec_for(axes, dim))  # type: ignore[attr-defined]


def axes_of(among: Groups | Any) -> tuple[str, ...]:
    """The mesh axes that groups run along; all axes if they are no lines of the mesh."""
    found = among if isinstance(among, Groups) else groups.resolve(among)
    return tuple(world.current().axes) if found.axes is None else found.axes


_files_noted = False


def note_file(tensors: Iterable[torch.Tensor]) -> None:
    """Say once that a file is being written with the first hosted rank's values of tensors that differ among ranks."""
    if _files_noted or len(world.current().hosted) == 1:
        return
    found = next((t for t in tensors if varying(t).axes), None)
    if found is not None:
        note_values(str(varying(found)), 4)


def note_values(what: str, stacklevel: int = 3) -> None:
    """The same, of a tensor in words."""
    global _files_noted
    if _files_noted:
        return
    _files_noted = True
    warnings.warn(
        f"a tensor ({what}) is saved as rank {world.first()} holds it: this process runs the script once for several ranks, so the "
        "other ranks' values are not in the file. neuronx_distributed's save_checkpoint keeps all of them; torchrun, with one process per rank, "
        "writes every rank's file.",
        stacklevel=stacklevel,
    )


def _storage_of(t: torch.Tensor) -> Any:
    from torch_bridge.recorder.tensor import XLATensor
    from torch_bridge.runtime import executor

    if not isinstance(t, XLATensor):
        raise TypeError(f"expected a tensor on xla, got one on {t.device}: a CPU tensor is the same for all ranks that this process hosts")
    executor.materialize(t._storage)
    return t._storage
