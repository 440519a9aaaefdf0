"""An array of which this process has some blocks, or none: stages of a pipeline are in several processes, and Orbax writes what all of them have together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from torch_bridge import _compat


@dataclasses.dataclass
class Share:
    """What a process has of an array to be saved.

    shape: of the whole array. sharding: where its blocks lie, on devices of at least two processes (Orbax takes an array of one for that process's own
    business); the last copy of a block need not exist. blocks: this process's, none if it has nothing. first: whether it is the first process that has some:
    it notes shape and dtype.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: NamedSharding | None = None
    blocks: Sequence[jax.Array] = ()
    first: bool = False

    @property
    def nbytes(self) -> int:
        """Of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def on_host(self) -> Share:
        """The same with copies of the blocks on the host, from devices with memory of their own."""
        if all(device.platform == "cpu" for block in self.blocks for device in block.devices()):
            return self
        assert self.sharding is not None
        copies = [jax.device_put(b, b.sharding.with_memory_kind("pinned_host")) for b in self.blocks]
        return dataclasses.replace(self, blocks=copies, sharding=self.sharding.with_memory_kind("pinned_host"))

    def array(self) -> jax.Array:
        """The array as Orbax takes it."""
        assert self.sharding is not None
        with _compat.enable_x64():
            return jax.make_array_from_single_device_arrays(self.shape, self.sharding, list(self.blocks))


def handler() -> Any:
    """Orbax's registry of what writes what, for trees of `Share`s."""
    import orbax.checkpoint as ocp

    class Shares(ocp.type_handlers.ArrayHandler):
        """Writes `Share`s as `ArrayHandler` writes arrays. Each block is written by its first copy's process."""

        async def serialize(self, values: Sequence[Share], infos: Sequence[Any], args: Sequence[Any] | None = None) -> list[Any]:
            futures: list[Any] = []
            for first in (True, False):
                chosen = [k for k, share in enumerate(values) if share.blocks and share.first is first]
                if chosen:
                    arrays = [values[k].array() for k in chosen]
                    picked = [infos[k] for k in chosen], None if args is None else [args[k] for k in chosen]
                    futures += await _writer(first).serialize(arrays, *picked)
            return futures

    return ocp.type_handlers.create_type_handler_registry((Share, Shares(**_OPTIONS)), (jax.Array, _writer(True)))


_OPTIONS = {"use_replica_parallel": False, "enable_write_sharding_file": False}


def _writer(notes: bool) -> Any:
    """What writes blocks. notes: whether it also writes shapes and dtypes, which one process does."""
    import orbax.checkpoint as ocp

    here = jax.process_index()
    return ocp.type_handlers.ArrayHandler(primary_host=here if notes else here + 1, **_OPTIONS)
