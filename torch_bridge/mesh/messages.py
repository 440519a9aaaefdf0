"""Arrays from the ranks of one place to those of another, where the two are in different processes: a pipeline stage's results to the next stage, say.

Rank by rank: a rank's block goes to the rank of the other place that is in the same position there. Blocks travel through JAX's transfer server, between
devices, while the program goes on: neither side waits. Both sides name a message by one key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from torch_bridge import _compat
from torch_bridge.mesh import places, processes, sharding, world
from torch_bridge.mesh.places import Place


class Described(NamedTuple):
    """An array at a place, without its values. block: the shape of a rank's block; dtype: JAX's name of it; spec: how ranks differ."""

    block: tuple[int, ...]
    dtype: str
    spec: PartitionSpec


def describe(array: jax.Array) -> Described:
    """What the other side has to know of an array."""
    assert isinstance(array.sharding, NamedSharding)
    return Described(tuple(array.sharding.shard_shape(array.shape)), str(array.dtype), array.sharding.spec)


def within_process(*of: Place) -> bool:
    """Whether this process hosts all ranks of these places, so that nothing has to be sent."""
    return world.is_local() or all(len(_ranks(place).hosted) == _ranks(place).size for place in of)


def hosted(place: Place) -> bool:
    """Whether this process hosts a rank of a place."""
    return bool(_ranks(place).hosted)


def processes_of(place: Place) -> list[int]:
    """The processes that host ranks of a place, in order."""
    return sorted({world.process_of(rank) for rank in _ranks(place).order})


def _ranks(place: Place) -> world.World:
    found = places.ranks(place.mesh)
    return world.current() if found is None else found


def _pairs(source: Place, target: Place) -> Iterator[tuple[int, int]]:
    """Each rank of a place with the one of the other in the same position."""
    return zip(_ranks(source).order, _ranks(target).order, strict=True)


# -- sending and receiving --------------------------------------------------------------------------


Kept = dict[int, Any]
"""Blocks that stay in this process, by the rank that gets them."""


def send(key: str, array: jax.Array, source: Place, target: Place) -> Kept:
    """Send the blocks of this process's ranks at a place to those of another. What is for ranks of this process comes back, for `receive`."""
    here, own = world.process_index(), {shard.device: shard.data for shard in array.addressable_shards}
    leaving: dict[int, list[Any]] = {}
    kept: Kept = {}
    for a, b in _pairs(source, target):
        if world.process_of(a) != here:
            continue
        block = own[sharding.device_of(a)]
        to = world.process_of(b)
        if to == here:
            kept[b] = jax.device_put(block, sharding.device_of(b))
        else:  # a copy: a later program may take the block over before it has been read
            leaving.setdefault(to, []).append(jax.device_put(block, sharding.device_of(a), may_alias=False))
    if array.size:
        for to, blocks in leaving.items():
            _server().await_pull(_number(key, here, to), blocks)
    return kept


def receive(key: str, what: Described, source: Place, target: Place, kept: Kept) -> jax.Array:
    """The array that is sent under this key, at its target. kept: what `send` gave in this process. Its values come when they are there."""
    here = world.process_index()
    arriving: dict[int, list[int]] = {}
    blocks: dict[int, Any] = dict(kept)
    for a, b in _pairs(source, target):
        if world.process_of(b) == here and world.process_of(a) != here:
            arriving.setdefault(world.process_of(a), []).append(b)
    for sender, ranks in arriving.items():
        blocks.update(zip(ranks, _pulled(_number(key, sender, here), what, sender, ranks), strict=True))
    assert target.mesh is not None
    with _compat.enable_x64():
        shape = NamedSharding(target.mesh, what.spec)
        ordered = [blocks[rank] for rank in _ranks(target).order if rank in blocks]
        return jax.make_array_from_single_device_arrays(_whole(what, target), shape, ordered)


def _pulled(number: int, what: Described, sender: int, ranks: Sequence[int]) -> list[Any]:
    with _compat.enable_x64():
        wanted = [jax.ShapeDtypeStruct(what.block, what.dtype, sharding=SingleDeviceSharding(sharding.device_of(rank))) for rank in ranks]
        if not all(what.block):
            return [jax.device_put(jax.numpy.zeros(w.shape, w.dtype), w.sharding) for w in wanted]
        return list(_connection(sender).pull(number, wanted))


def _whole(what: Described, target: Place) -> tuple[int, ...]:
    """The shape of the array of all blocks."""
    sizes = target.mesh.shape if target.mesh is not None else {}
    return tuple(n * places.blocks_along(part, sizes) for n, part in zip(what.block, [*what.spec, *[None] * len(what.block)], strict=False))


def _number(key: str, sender: int, receiver: int) -> int:
    """A message's number on its sender's server."""
    text = f"{key} {sender} {receiver}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2


# -- the servers of processes -----------------------------------------------------------------------

_own_server: Any = None
_connections: dict[int, Any] = {}


def _server() -> Any:
    """This process's server; the first call tells the other processes where it is."""
    global _own_server
    if _own_server is None:
        _own_server = _compat.transfer_server(jax.local_devices()[0].client, processes.listening_address())
        processes.store().set(f"transfer/{world.process_index()}", _own_server.address())
    return _own_server


def _connection(process: int) -> Any:
    if process not in _connections:
        _connections[process] = _server().connect(processes.told(f"transfer/{process}").decode())
    return _connections[process]
