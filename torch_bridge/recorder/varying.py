"""How the value of an xla tensor lies on the mesh: which ranks hold different ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch

from torch_bridge.ir.layout import Layout
from torch_bridge.ir.segment import Storage
from torch_bridge.mesh import sharding, world
from torch_bridge.recorder import first_rank_files
from torch_bridge.runtime import executor


class Stored(Protocol):
    """What is asked of an xla tensor (`tensor.XLATensor`) for its value: a storage, and the layout that the tensor views it through."""

    _storage: Storage
    _layout: Layout


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
        return bool(self.axes) or world.process_count() == 1 or world.size() == 1

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
    storage = computed(t)
    size = tuple(t.shape)
    if storage.held is None or not sharding.active():
        return Varying((), sharding.REPLICATED, size, size)
    spec = sharding.spec_of(storage.held)
    whole = t._layout is storage.layout  # type: ignore[attr-defined]
    shape = tuple(storage.held.shape) if whole else sharding.global_shape(size, sharding.spec_for(sharding.axes_of(spec)))
    axes = sharding.ordered(sharding.axes_of(spec))
    return Varying(axes, spec, size, shape)


def computed(t: torch.Tensor) -> Storage:
    """The storage of an xla tensor, after what is pending has run."""
    storage = getattr(t, "_storage", None)
    if not isinstance(storage, Storage):
        raise TypeError(f"expected a tensor on xla, got one on {t.device}: a CPU tensor is the same for all ranks that this process hosts")
    executor.materialize(storage)
    return storage


def differs(t: Stored) -> bool:
    """Whether ranks hold different values of a tensor that has been computed."""
    held = t._storage.held
    return sharding.active() and held is not None and bool(sharding.axes_of(sharding.spec_of(held)))


def note_file(tensors: Iterable[torch.Tensor]) -> None:
    """Say once that a file is being written with the first hosted rank's values of tensors that differ among ranks. In a process of one they are its own."""
    if first_rank_files.noted() or len(world.current().hosted) == 1:
        return
    found = next((t for t in tensors if varying(t).axes), None)
    if found is not None:
        first_rank_files.note(str(varying(found)), 4)
