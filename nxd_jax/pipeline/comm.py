"""`neuronx_distributed.pipeline.comm`: a tensor or a Python object from this process's pipeline rank to the next or the one before, and back.

Ranks form a ring: after the last one comes the first. Messages from one rank to another arrive in the order in which they were sent; neither side waits for
the other's tensors. `NxDPPModel` needs none of this: it moves values between stages itself.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from typing import Any

import torch

from nxd_jax.tensor_parallel import parallel_groups
from nxd_jax.utils.serialization import TensorMeta
from torch_bridge.mesh import messages, places, processes, world
from torch_bridge.recorder import placed

MAX_LENGTH = 2**20
"""Bytes that an object may have, pickled, with `method="gloo"`."""

_sent: dict[str, int] = defaultdict(int)
_received: dict[str, int] = defaultdict(int)
_kept: dict[str, messages.Kept] = {}


def send(tensor: torch.Tensor, send_next: bool = True, all_reduce_send_recv: bool = False) -> torch.Tensor:
    """`comm.send`: send an xla tensor to the next pipeline rank, or to the one before if not `send_next`; gives a copy of it without its history.

    `all_reduce_send_recv` is accepted: it chooses how NxD sends. Raises ValueError for a tensor that is not on xla, RuntimeError without other pipeline ranks,
    NotImplementedError in a process that hosts several of them.
    """
    here, there = _ends("send", send_next)
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "xla":
        given = f"one on {tensor.device}" if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
        raise ValueError(f"comm.send takes a tensor on xla, got {given}: move it with .to('xla'), or use send_python_object")
    source, target = places.along("pp", here), places.along("pp", there)
    key = _next(_sent, f"tensor {_first_rank(here)} to {_first_rank(there)}")
    array = placed.array_at(placed.own(tensor), source)
    kept = messages.send(f"comm {key}", array, source, target)
    if kept:
        _kept[key] = kept
    if messages.processes_of(source)[0] == world.process_index():
        processes.store().set(key, pickle.dumps((messages.describe(array), tensor.dtype, tuple(tensor.shape))))
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def recv_from(tensor_meta: TensorMeta, recv_prev: bool = True, tracing: bool = False, all_reduce_send_recv: bool = False) -> torch.Tensor:
    """`comm.recv_from`: the tensor that the pipeline rank before sends, or the next one if not `recv_prev`; it takes gradients if `tensor_meta` says so.

    tensor_meta: its dtype and shape. `tracing` and `all_reduce_send_recv` are accepted. Raises RuntimeError if something else was sent, and without other
    pipeline ranks; NotImplementedError in a process that hosts several of them.
    """
    here, there = _ends("recv_from", not recv_prev)
    source, target = places.along("pp", there), places.along("pp", here)
    key = _next(_received, f"tensor {_first_rank(there)} to {_first_rank(here)}")
    what, dtype, size = pickle.loads(_taken(key, len(messages.processes_of(target))))
    array = messages.receive(f"comm {key}", what, source, target, _kept.pop(key, {}))
    if (dtype, size) != (tensor_meta.dtype, tuple(tensor_meta.shape)):
        raise RuntimeError(
            f"pipeline rank {there} sent {dtype} {list(size)}, and pipeline rank {here} calls recv_from for {tensor_meta.dtype} {list(tensor_meta.shape)}: "
            "messages arrive in the order in which they were sent; give recv_from a TensorMeta of this one"
        )
    found = placed.from_array(array, dtype, size)
    return placed.joined({target: found}, "pp").requires_grad_(tensor_meta.requires_grad)


def send_python_object(obj: Any, send_next: bool = True, method: str = "tcp") -> None:
    """`comm.send_python_object`: send an object, pickled, to the next pipeline rank, or to the one before if not `send_next`.

    method: "tcp", or "gloo", which NxD limits to `MAX_LENGTH` bytes; here both go through the processes' store. Raises AssertionError for larger objects with
    "gloo", ValueError for other methods, RuntimeError without other pipeline ranks, NotImplementedError in a process that hosts several of them.
    """
    peers = _peers("send_python_object", send_next, method)
    data = pickle.dumps(obj)
    if method == "gloo" and len(data) >= MAX_LENGTH:
        raise AssertionError(
            f"an object of {len(data)} bytes is too large for method='gloo', which takes less than {MAX_LENGTH}: use method='tcp'"
        )
    for peer in peers:
        processes.store().set(_next(_sent, f"object {world.process_index()} to {peer}"), data)


def recv_python_object(recv_prev: bool = True, method: str = "tcp") -> Any:
    """`comm.recv_python_object`: the object that the pipeline rank before sends, or the next one if not `recv_prev`. It waits for that.

    Where ranks of this process have neighbours in several processes, it is the first one's. Raises as `send_python_object`. Unpickling runs code: objects come
    from processes of this job only.
    """
    peers = _peers("recv_python_object", not recv_prev, method)
    found = [_taken(_next(_received, f"object {peer} to {world.process_index()}"), 1) for peer in peers]
    return pickle.loads(found[0])


# -- neighbours and messages ------------------------------------------------------------------------


def _ends(name: str, forward: bool) -> tuple[int, int]:
    """This process's pipeline rank, and its neighbour."""
    size = parallel_groups.layout().size["pp"]
    if size == 1:
        raise RuntimeError(
            f"comm.{name} needs another pipeline rank, and there is one: call initialize_model_parallel(pipeline_model_parallel_size=...) with 2 or more"
        )
    at = parallel_groups.places("pp")
    here = sorted({at[rank] for rank in world.current().hosted})
    if len(here) > 1:
        raise NotImplementedError(
            f"comm.{name} cannot be meant for one pipeline rank here: this process hosts pipeline ranks {here[0]} to {here[-1]}, and runs each line of the "
            "script once for all of them. Let NxDPPModel.run_train move values between stages, or start the script with torchrun, one process for each rank"
        )
    return here[0], (here[0] + (1 if forward else -1)) % size


def _first_rank(index: int) -> int:
    """The first rank of the world with a place in the pipeline: with another's it names a pair of places in any layout."""
    return min(rank for rank, at in parallel_groups.places("pp").items() if at == index)


def _peers(name: str, forward: bool, method: str) -> list[int]:
    """The processes that host the neighbours of this process's ranks, the first rank's first."""
    if method not in ("tcp", "gloo"):
        raise ValueError(f"comm.{name}(method={method!r}): the method is 'tcp' or 'gloo'")
    _, there = _ends(name, forward)
    groups = parallel_groups.lists("pp")
    return list(dict.fromkeys(world.process_of(group[there]) for rank in world.current().hosted for group in groups if rank in group))


def _next(counts: dict[str, int], name: str) -> str:
    """The key of the next message with this name."""
    counts[name] += 1
    return f"pipeline comm {name} {counts[name]}"


def _taken(key: str, readers: int) -> bytes:
    """What stands in the store under a key, which the last of its readers deletes."""
    found = processes.told(key)
    if readers == 1 or processes.store().add(f"{key} read", 1) == readers:
        processes.store().delete_key(key)
    return found
