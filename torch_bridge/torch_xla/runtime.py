"""`torch_xla.runtime`: which worker this is, what devices there are, and the compilation cache."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.types import Device

from torch_bridge.mesh import spmd_mode, world
from torch_bridge.torch_xla import _spmd_variable
from torch_bridge.torch_xla.core import xla_env_vars as xenv


def device_type() -> str:
    """`xr.device_type`: the kind of device that scripts believe they run on: `PJRT_DEVICE` if set, else "NEURON".

    See `runtime_device_attributes` for the real one.
    """
    return os.environ.get(xenv.PJRT_DEVICE, "").split(":")[0].upper() or "NEURON"


def set_device_type(pjrt_device: str) -> None:
    """`xr.set_device_type`."""
    os.environ[xenv.PJRT_DEVICE] = pjrt_device


def using_pjrt() -> bool:
    """`xr.using_pjrt` (removed upstream): True."""
    return True


def is_bf16_supported() -> bool:
    """`xr.is_bf16_supported`: True."""
    return True


def device_at(n: int | None) -> torch.device:
    """The n-th xla device of this process."""
    _spmd_variable.begin_if_asked()
    if n not in (None, 0):
        raise ValueError(f"this process has one xla device, number 0; got {n!r}. Each worker of a job owns one device and calls it xla:0.")
    return torch.device("xla", 0)


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """`xr.xla_device`: this worker's device, `xla:0`."""
    if devkind is not None and devkind != device_type():
        raise ValueError(f"devkind={devkind!r}: the only kind of device here is {device_type()!r}")
    return device_at(n)


def world_size() -> int:
    """`xr.world_size`: workers in the job."""
    return world.size()


def global_ordinal() -> int:
    """`xr.global_ordinal`: this worker's rank; with `use_spmd`, this process's number."""
    return world.ordinal()


def local_ordinal() -> int:
    """`xr.local_ordinal`: this worker's rank on its host."""
    return world.local_ordinal()


def process_index() -> int:
    """`xr.process_index`: this process's number in the job."""
    return world.process_index()


def process_count() -> int:
    """`xr.process_count`: processes in the job."""
    return world.process_count()


def local_process_count() -> int:
    """`xr.local_process_count`: processes on this host."""
    return world.local_size()


def global_device_count() -> int:
    """`xr.global_device_count`: devices in the job that scripts see; with `use_spmd` 1, which stands for all (`global_runtime_device_count`)."""
    return 1 if _spmd_variable.begin_if_asked() else world.size()


def local_device_count() -> int:
    """`xr.local_device_count`: those on this host; with `use_spmd` 1 (`addressable_runtime_device_count`)."""
    return 1 if _spmd_variable.begin_if_asked() else world.local_size()


def addressable_device_count() -> int:
    """`xr.addressable_device_count`: devices that this process's script sees."""
    return 1


def global_runtime_device_count() -> int:
    """`xr.global_runtime_device_count`: devices in the job."""
    _spmd_variable.begin_if_asked()
    return len(spmd_mode.devices()) or world.size()


def addressable_runtime_device_count() -> int:
    """`xr.addressable_runtime_device_count`: devices that this process's script computes on: 1 for a worker, those of the process with `use_spmd`."""
    _spmd_variable.begin_if_asked()
    return len(spmd_mode.here()) or 1


def host_index() -> int:
    """`xr.host_index`: this host's number in the job."""
    return world.process_index() // world.local_size()


def get_master_ip() -> str:
    """`xr.get_master_ip`: the address of the host of rank 0."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def runtime_device_attributes(device: Device = "xla:0") -> dict[str, Any]:
    """`xr.runtime_device_attributes`: what JAX says of the device behind `xla:0`."""
    import jax

    real = jax.devices()[0]
    return {
        "name": str(real),
        "device_kind": real.device_kind,
        "platform": real.platform,
        "id": real.id,
        "process_index": real.process_index,
    }


def global_runtime_device_attributes() -> list[dict[str, Any]]:
    """`xr.global_runtime_device_attributes`: of each device of the job with `use_spmd`, else of this worker's."""
    _spmd_variable.begin_if_asked()
    count = len(spmd_mode.devices()) or 1
    return [{**runtime_device_attributes(), "id": k, "name": f"{device_type()}:{k}"} for k in range(count)]


def memory_info(device: Device = None) -> dict[str, int]:
    """Bytes used and bytes available on the device (see `xm.get_memory_info`)."""
    from torch_bridge.telemetry import memory

    return memory.usage()


def is_spmd() -> bool:
    """`xr.is_spmd`: whether `use_spmd` was called, or `XLA_USE_SPMD=1` is set."""
    return _spmd_variable.begin_if_asked()


def use_spmd(auto: bool = False) -> None:
    """`xr.use_spmd`: from now on programs run over all devices of the job, divided as annotations say (`torch_xla.distributed.spmd`).

    There is one worker then, with tensors of their global shape; call it before the first tensor goes to xla. Raises NotImplementedError for auto=True.
    """
    if auto:
        raise NotImplementedError(
            "torch_xla.runtime.use_spmd(auto=True): no pass chooses shardings by itself here. Annotate inputs and weights (xs.mark_sharding, or "
            "SpmdFullyShardedDataParallel); XLA propagates the rest"
        )
    from torch_bridge.mesh import spmd

    spmd.use()


_initialized: str | None = None
"""The folder of `initialize_cache`, if it may be written to."""


def initialize_cache(path: str, readonly: bool = False) -> None:
    """`xr.initialize_cache`: keep compiled programs in this directory, JAX's persistent compilation cache, across processes.

    readonly: use what is there and add nothing.
    """
    from torch_bridge.compiler import xla_cache

    global _initialized
    xla_cache.use(path, readonly)
    _initialized = None if readonly else os.fspath(path)


def clear_computation_cache() -> None:
    """`xr.clear_computation_cache`: forget the compiled programs: those in memory, and those in the folder of `initialize_cache` unless that is readonly."""
    import pathlib

    from torch_bridge.runtime import executor

    executor.clear_cache()
    if _initialized is not None:
        for pattern in ("*-cache", "*-atime", "executables/*.executable"):
            for file in pathlib.Path(_initialized).glob(pattern):
                file.unlink(missing_ok=True)


def get_num_cached_compilation_graph() -> int:
    """`xr.get_num_cached_compilation_graph`: compiled programs held in memory."""
    from torch_bridge.runtime import session

    return sum(len(by_donation) for trace in session.current().traces.values() for by_donation in trace.programs.values())
