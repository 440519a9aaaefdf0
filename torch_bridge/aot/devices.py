"""Where the ranks of a program compute: on a device each, or all on one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from torch_bridge import _compat
from torch_bridge.aot import exporting, facts
from torch_bridge.mesh import sharding, world


@dataclasses.dataclass(frozen=True)
class Placement:
    """form: "mesh" or "one" (`exporting.FORMS`). mesh: the devices, None for one device. device: the one."""

    ranks: facts.Ranks
    form: str
    mesh: Mesh | None
    device: Any

    @property
    def hosted(self) -> tuple[int, ...]:
        """The ranks that this process computes for."""
        if self.mesh is None:
            return tuple(range(self.ranks.size))
        here = jax.process_index()
        return tuple(sorted(self.ranks.order[p] for p, d in enumerate(self.mesh.devices.flat) if d.process_index == here))

    def sharding(self, shared: bool) -> Any:
        """How an array of all ranks lies there, or one that they share."""
        if self.mesh is None:
            return SingleDeviceSharding(self.device)
        return NamedSharding(self.mesh, PartitionSpec() if shared else exporting.ranked(self.mesh))

    def put(self, of_rank: Any, shared: bool) -> Any:
        """An array of `of_rank(rank)`, each rank's own numpy array, or of rank 0's where it is shared."""
        with _compat.enable_x64():
            if shared or self.ranks.size == 1:
                host = _own([of_rank(self.hosted[0])])[0]
                return jax.device_put(host, self.sharding(True)) if self.mesh is None else self._shards(lambda rank: host, host.shape, True)
            if self.mesh is None:
                return jax.device_put(_own([of_rank(r) for r in self.ranks.order]), self.sharding(False))
            shape = of_rank(self.hosted[0]).shape
            return self._shards(lambda rank: _own([of_rank(rank)]), (self.ranks.size, *shape), False)

    def _shards(self, of_rank: Any, shape: Sequence[int], shared: bool) -> Any:
        assert self.mesh is not None
        hosted = set(self.hosted)
        parts = [
            jax.device_put(of_rank(self.ranks.order[p]), d) for p, d in enumerate(self.mesh.devices.flat) if self.ranks.order[p] in hosted
        ]
        return jax.make_array_from_single_device_arrays(tuple(shape), self.sharding(shared), parts)

    def read(self, array: Any, rank: int, shared: bool = False) -> np.ndarray:
        """A rank's values of an array, as numpy's; the memory may be the array's."""
        if self.mesh is None:
            host = np.asarray(array)
            return host if shared or self.ranks.size == 1 else host[self.ranks.places[rank]]
        device = self.mesh.devices.flat[self.ranks.places[rank]]
        shard = next(s.data for s in array.addressable_shards if s.device == device)
        host = np.asarray(shard)
        return host if shared else host[0]


def _own(parts: Sequence[np.ndarray]) -> np.ndarray:
    """A copy of arrays, one above the other. It begins as torch's memory does, so that JAX takes it as it is on CPUs: any other it would copy once more."""
    first = np.asarray(parts[0])
    found = torch.empty(len(parts) * first.nbytes, dtype=torch.uint8).numpy().view(first.dtype).reshape(len(parts), *first.shape)
    for k, part in enumerate(parts):
        found[k] = part
    return found


def place(ranks: facts.Ranks, forms: Mapping[str, exporting.Forms]) -> Placement:
    """The placement for ranks on the devices there are. forms: of all programs, by tag; that for one device is asked for only where it must be one.

    Raises RuntimeError if there are fewer devices than ranks and the programs cannot run on one.
    """
    if ranks.size > 1 and all(f.get("mesh") is not None for f in forms.values()):
        now = world.current()
        if now.processes > 1 and now.size == ranks.size:
            devices = [sharding.device_of(r) for r in ranks.order]
            return Placement(ranks, "mesh", Mesh(np.array(devices).reshape(tuple(ranks.axes.values())), tuple(ranks.axes)), None)
        _compat.provision_cpu_devices(ranks.size)
        found = jax.local_devices()
        if len(found) >= ranks.size:
            chosen = np.array([found[r] for r in ranks.order]).reshape(tuple(ranks.axes.values()))
            return Placement(ranks, "mesh", Mesh(chosen, tuple(ranks.axes)), None)
    for tag, of in forms.items():
        if of.get("one") is None:
            raise RuntimeError(
                f"the model was traced for {ranks.size} ranks, there are {len(jax.local_devices())} devices, and {lacks(tag, of, 'one')}. Set "
                f"JAX_NUM_CPU_DEVICES={ranks.size} for emulated devices, or use a machine with {ranks.size}"
            )
    return Placement(ranks, "one", None, jax.local_devices()[0])


def lacks(tag: str, forms: exporting.Forms, form: str) -> str:
    """What is said of a program without a form."""
    where = "one device" if form == "one" else "a device for each rank"
    return f"program {tag!r} cannot run on {where} ({forms.missing.get(form, 'its file does not say why')})"
