"""`torch_xla.core.xla_model`, known as `xm`.

Names that newer releases removed (`xrt_world_size`, `get_ordinal`, `parse_xla_device`, ...) are here too.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch.types import Device

from torch_bridge import nested
from torch_bridge.config import environment
from torch_bridge.mesh import random_state, rank_numbers, world
from torch_bridge.recorder import prefetch
from torch_bridge.runtime import backend, steps, whole_files
from torch_bridge.torch_xla import _XLAC, runtime
from torch_bridge.torch_xla._deprecation import warn_once
from torch_bridge.torch_xla._spmd_ops import XLA_LIB
from torch_bridge.torch_xla.core import _rng_state
from torch_bridge.torch_xla.core._arena import RateTracker, ToXlaTensorArena, check_view_sharing
from torch_bridge.torch_xla.core._collectives import (
    REDUCE_AND,
    REDUCE_MAX,
    REDUCE_MIN,
    REDUCE_MUL,
    REDUCE_OR,
    REDUCE_SUM,
    _fetch_gradients,
    all_gather,
    all_gather_bucketized,
    all_reduce,
    all_reduce_bucketized_gradients,
    all_to_all,
    broadcast_master_param,
    collective_broadcast,
    collective_permute,
    do_on_ordinals,
    mesh_reduce,
    recv,
    reduce_gradients,
    reduce_scatter,
    reduce_scatter_bucketized,
    rendezvous,
    send,
    xla_rendezvous,
)

if TYPE_CHECKING:
    from torch_bridge.mesh.groups import GroupLike

__all__ = [
    "REDUCE_AND",
    "REDUCE_MAX",
    "REDUCE_MIN",
    "REDUCE_MUL",
    "REDUCE_OR",
    "REDUCE_SUM",
    "XLA_LIB",
    "RateTracker",
    "ToXlaTensorArena",
    "_fetch_gradients",
    "_maybe_convert_to_cpu",
    "add_step_closure",
    "all_gather",
    "all_gather_bucketized",
    "all_reduce",
    "all_reduce_bucketized_gradients",
    "all_to_all",
    "broadcast_master_param",
    "check_view_sharing",
    "collective_broadcast",
    "collective_permute",
    "do_on_ordinals",
    "fork_rng",
    "get_local_ordinal",
    "get_memory_info",
    "get_ordinal",
    "get_rng_state",
    "get_stablehlo",
    "get_stablehlo_bytecode",
    "get_xla_supported_devices",
    "is_master_ordinal",
    "is_xla_tensor",
    "mark_step",
    "master_print",
    "mesh_reduce",
    "optimization_barrier_",
    "optimizer_step",
    "parse_xla_device",
    "recv",
    "reduce_gradients",
    "reduce_scatter",
    "reduce_scatter_bucketized",
    "rendezvous",
    "save",
    "send",
    "send_cpu_data_to_device",
    "set_replication",
    "set_rng_state",
    "unlazy",
    "wait_device_ops",
    "xla_device",
    "xla_device_hw",
    "xla_device_kind",
    "xla_real_devices",
    "xla_rendezvous",
    "xla_replication_devices",
    "xrt_world_size",
]


# -- devices and ranks ----------------------------------------------------------------------------


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """`xm.xla_device`: this worker's device, `xla:0`. Deprecated upstream in favour of `torch_xla.device()`."""
    warn_once("Use torch_xla.device instead")
    environment.prepare()
    return runtime.xla_device(n, devkind)


def get_xla_supported_devices(devkind: str | None = None, max_devices: int | None = None) -> list[str]:
    """`xm.get_xla_supported_devices`: `['xla:0']`."""
    if devkind:
        warnings.warn("`devkind` argument is deprecated and will be removed in a future release.", stacklevel=2)
        if devkind != runtime.device_type():
            return []
    return [f"xla:{i}" for i in range(runtime.addressable_device_count())][: max_devices or None]


def parse_xla_device(device: str) -> tuple[str, int] | None:
    """`xm.parse_xla_device` (removed upstream): `('NEURON', 0)` for `'NEURON:0'`, None for what is no such name."""
    match = re.match(r"([A-Z]+):(\d+)$", str(device))
    return (match[1], int(match[2])) if match else None


def xla_real_devices(devices: Sequence[Any] | None = None) -> list[str]:
    """`xm.xla_real_devices`: `['NEURON:0']` for `['xla:0']`."""
    real = _XLAC._xla_get_devices()
    if not devices:
        return real
    return [real[_index(d)] for d in devices]


def _index(device: Device) -> int:
    match = re.match(r"xla(?::(\d+))?$", str(device))
    if not match:
        raise RuntimeError(f"Invalid device format: {device}")
    return runtime.device_at(int(match[1] or 0)).index or 0


def xla_device_hw(device: Device) -> str:
    """`xm.xla_device_hw`: the kind of hardware scripts believe in, "NEURON" (see `torch_xla.runtime.device_type`)."""
    return xla_real_devices([device])[0].split(":")[0]


def xla_device_kind(device: Device = None) -> str:
    """`xm.xla_device_kind`: what JAX calls the device that really computes, such as "cpu" or "NVIDIA H100 80GB HBM3"."""
    return runtime.runtime_device_attributes(device)["device_kind"]


def xla_replication_devices(local_devices: Sequence[Any] | None = None) -> list[str]:
    """`xm.xla_replication_devices`: names of all the job's devices."""
    return [f"{runtime.device_type()}:{i}" for i in range(world.size())]


def set_replication(device: Device, devices: Sequence[Any] | None) -> None:
    """`xm.set_replication`: accepts this process's device; replication needs no setting up here.

    Its one caller today, `accelerate`, then takes its local rank from `LOCAL_RANK`, or -1 without it, and in a plain `python script.py` would
    show neither logs nor progress: so the variable is set if it is not.
    """
    for d in (device, *(devices or ())):
        _index(d)
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank()))


def get_ordinal(defval: int = 0) -> int:
    """`xm.get_ordinal` (removed upstream): this worker's rank."""
    return world.ordinal()


def get_local_ordinal(defval: int = 0) -> int:
    """`xm.get_local_ordinal`: this worker's rank on its host."""
    return world.local_ordinal()


def xrt_world_size(defval: int = 1) -> int:
    """`xm.xrt_world_size` (removed upstream): workers in the job."""
    return world.size()


def is_master_ordinal(local: bool = True) -> bool:
    """`xm.is_master_ordinal`: whether this worker is rank 0 of its host (`local`) or of the job."""
    return (world.local_ordinal() if local else world.ordinal()) == 0


def master_print(*args: object, fd: TextIO | None = None, local: bool = False, flush: bool = False) -> None:
    """`xm.master_print`: print on rank 0 only."""
    if is_master_ordinal(local=local):
        print(*args, file=fd or sys.stdout, flush=flush)


def is_xla_tensor(tensor: torch.Tensor) -> bool:
    """`xm.is_xla_tensor`."""
    return tensor.device.type == "xla"


def get_memory_info(device: Device = None) -> dict[str, int]:
    """`xm.get_memory_info`: bytes_used, bytes_limit, peak_bytes_used, and kb_total, kb_free of older releases."""
    from torch_bridge.telemetry import memory

    found = memory.usage()
    return {**found, "kb_total": found["bytes_limit"] // 1024, "kb_free": max(0, found["bytes_limit"] - found["bytes_used"]) // 1024}


# -- steps ----------------------------------------------------------------------------------------


def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """`xm.mark_step`: compile and run what was recorded, then call the step closures. Upstream prefers `torch_xla.sync()`."""
    warn_once("Use torch_xla.sync instead")
    steps.mark(wait=wait)


def add_step_closure(closure: Callable[..., Any], args: Iterable[Any] = (), run_async: bool = False) -> None:
    """`xm.add_step_closure`: call `closure(*args)` at the next mark_step, when its tensors have values; on a thread if `run_async`."""
    steps.add_closure(closure, tuple(args), run_async)


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: dict[str, Any] | None = None,
    groups: GroupLike = None,
    pin_layout: bool = True,
) -> Any:
    """`xm.optimizer_step`: average gradients over workers and step; `barrier` ends the step. Returns what `optimizer.step` does."""
    reduce_gradients(optimizer, groups=groups, pin_layout=pin_layout)
    result = optimizer.step(**(optimizer_args or {}))
    if barrier:
        steps.mark()
    return result


def wait_device_ops(devices: Sequence[Any] = ()) -> None:
    """`xm.wait_device_ops`: block until the device has finished what it was given."""
    _XLAC._xla_wait_device_ops()


def unlazy(tensors: Sequence[torch.Tensor]) -> None:
    """`xm.unlazy`: block until these tensors are computed."""
    _XLAC._xla_sync_multi(tensors, wait=True)


def optimization_barrier_(tensors: Sequence[torch.Tensor]) -> None:
    """`xm.optimization_barrier_`: keep the compiler from moving or merging computations across this point."""
    _XLAC._xla_optimization_barrier_(tensors)


def get_stablehlo(tensors: Sequence[torch.Tensor] | None = None) -> str:
    """`xm.get_stablehlo`: StableHLO of the graph that computes these tensors; without an argument, of the graphs that ran last."""
    from torch_bridge.export import hlo_text

    return hlo_text.hlo(list(tensors)) if tensors else hlo_text.hlo()


def get_stablehlo_bytecode(tensors: Sequence[torch.Tensor] | None = None) -> bytes:
    """`xm.get_stablehlo_bytecode`: the same as portable bytes."""
    import io

    from torch_bridge.export import hlo_text

    if not tensors:
        raise ValueError("get_stablehlo_bytecode needs the tensors whose graph it should give")
    buffer = io.BytesIO()
    hlo_text.lower(hlo_text.pending_graph(tensors)).compiler_ir(dialect="stablehlo").operation.write_bytecode(buffer)
    return buffer.getvalue()


# -- data -----------------------------------------------------------------------------------------


def send_cpu_data_to_device(datas: Any, device: Any, input_sharding: Any = None) -> Any:
    """`xm.send_cpu_data_to_device`: nested data with its CPU tensors on the device. A single tensor comes back in a list, as upstream.

    input_sharding: an `xs.ShardingSpec` for tensors with as many dims, or a dict of them by key of `datas` (a dict); None: replicated.
    """
    from torch_bridge.torch_xla.distributed import input_sharding as inputs

    given = [datas] if isinstance(datas, torch.Tensor) else datas
    return inputs.move(given, torch.device(device), inputs.checked(input_sharding))


def _maybe_convert_to_cpu(data: Any, convert: bool = True) -> Any:
    """`xm._maybe_convert_to_cpu`: nested data with its xla tensors on the CPU; only computed, and left on the device, if not `convert`."""
    if convert:
        return prefetch.to_host(data)
    _XLAC._xla_sync_multi((), wait=True)
    return data


def save(data: Any, file_or_path: Any, master_only: bool = True, global_master: bool = False) -> None:
    """`xm.save`: `torch.save` of the data on the CPU, by rank 0 of each host (of the job if `global_master`) or by all if not
    `master_only`.

    Tied weights stay one tensor in the file; torch_xla writes them twice. A process that hosts several ranks writes a file for each, if not `master_only` and
    the path has the first rank's number, as `xm.get_ordinal()` prints, of data that differs by rank. Shards of `XlaFullyShardedDataParallel` need such a path
    (ValueError). A file that was there stays until the new one is whole; OSError says why it cannot be written.
    """
    backend.ensure()
    from torch_bridge.fsdp import rank_files
    from torch_bridge.recorder import first_rank_files, sharded

    if not master_only and rank_files.needed(data, file_or_path):
        rank_files.save(data, file_or_path)
        return
    writes = not master_only or is_master_ordinal(local=not global_master)
    on_cpu = _maybe_convert_to_cpu(data, convert=writes or (world.size() == 1 and world.process_count() > 1))
    if writes:
        with first_rank_files.asked_for(master_only and not rank_files.has_shards(data)):
            sharded.note_file(nested.collect(data, lambda x: isinstance(x, torch.Tensor) and is_xla_tensor(x)))
            whole_files.save(on_cpu, file_or_path)


# -- random numbers -------------------------------------------------------------------------------


def set_rng_state(seed: int, device: Device = None) -> None:
    """`xm.set_rng_state`: seed the device's random numbers, or put back what `get_rng_state` gave."""
    _rng_state.restore(random_state.DEFAULT, seed if rank_numbers.is_ranked(seed) else int(seed))


def get_rng_state(device: Device = None) -> int:
    """`xm.get_rng_state`: the random state as an int that fits a signed 64-bit number; the seed, until random numbers have been drawn."""
    return _rng_state.pack(random_state.DEFAULT)


@contextlib.contextmanager
def fork_rng(device: Device = None, enabled: bool = True) -> Iterator[None]:
    """`xm.fork_rng`: put the device's random state back at the end of the block."""
    before = random_state.DEFAULT.get_state()
    try:
        yield
    finally:
        if enabled:
            random_state.DEFAULT.set_state(before)
