"""`torch_xla._XLAC`: the few functions of torch_xla's C++ extension that scripts call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.types import Device

from torch_bridge import metrics
from torch_bridge.config.variables import VARIABLES
from torch_bridge.ir import graph_text
from torch_bridge.runtime import steps
from torch_bridge.telemetry import metrics_report


def _get_xla_tensors_hlo(tensors: Sequence[torch.Tensor]) -> str:
    """HLO text of the pending graph that computes these tensors; with `XLA_DUMP_POST_OPTIMIZATIONS=1` what XLA made of it for this machine. Nothing is run."""
    from torch_bridge.export import hlo_text

    if VARIABLES["XLA_DUMP_POST_OPTIMIZATIONS"].now():
        return hlo_text.hlo(list(tensors), stage="optimized")
    return hlo_text.lower(hlo_text.pending_graph(tensors)).compiler_ir(dialect="hlo").as_hlo_text()


def _get_stablehlo(tensors: Sequence[torch.Tensor], *args: Any) -> str:
    """StableHLO text of the pending graph that computes these tensors. Nothing is run."""
    from torch_bridge.export import hlo_text

    return hlo_text.hlo(list(tensors))


def _get_xla_tensors_text(tensors: Sequence[torch.Tensor]) -> str:
    """The recorded aten ops that compute these tensors, one line each, with the user's source lines."""
    from torch_bridge.export import hlo_text

    return "IR {\n" + "".join(f"  {line}\n" for line in graph_text.graph_text(hlo_text.pending_graph(tensors)).splitlines()) + "}\n"


def _get_graph_hash(tensors: Sequence[torch.Tensor]) -> bytes:
    """A digest of that graph: equal for graphs that share a compiled program."""
    import hashlib

    return hashlib.sha256(_get_xla_tensors_hlo(tensors).encode()).digest()[:16]


def _xla_sync_multi(tensors: Sequence[torch.Tensor], devices: Sequence[str] = (), wait: bool = True, sync_xla_data: bool = False) -> None:
    """Compute these tensors (and everything else that is pending: the bridge runs a step as one graph)."""
    from torch_bridge.runtime import executor

    executor.sync(wait=wait)


def _xla_sync_live_tensors(device: str = "", devices: Sequence[str] = (), wait: bool = True) -> None:
    """Compute every pending tensor."""
    _xla_sync_multi((), devices, wait)


def _xla_step_marker(device: str = "", devices: Sequence[str] = (), wait: bool = False, reset_scope: bool = True) -> None:
    """End the step."""
    steps.mark(wait=wait)


def _xla_wait_device_ops(devices: Sequence[str] = ()) -> None:
    """Block until the device is done."""
    from torch_bridge.runtime import executor

    executor.wait_all()


def _xla_get_tensor_id(tensor: torch.Tensor) -> int:
    """A number for the tensor's storage: equal for tensors that share memory (tied weights, views).

    `transformers` finds shared tensors by it.
    """
    return id(_xla(tensor)._storage)


def _xla_get_tensor_view_alias_id(tensor: torch.Tensor) -> int:
    """The number of the storage that a view looks into; 0 for a tensor that is its whole storage."""
    t = _xla(tensor)
    return 0 if t._layout is t._storage.layout else id(t._storage)


def _xla(tensor: torch.Tensor) -> Any:
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "xla":
        raise RuntimeError(
            f"Input tensor is not an XLA tensor: {tensor.device if isinstance(tensor, torch.Tensor) else type(tensor).__name__}"
        )
    return tensor


def _xla_get_cpu_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Values of these tensors on the CPU."""
    from torch_bridge.recorder import prefetch

    return prefetch.to_host(list(tensors))


def _xla_tensors_from_aten(tensors: Sequence[torch.Tensor], devices: Sequence[str], shardings: Any = None) -> list[torch.Tensor]:
    """Copies of CPU tensors on the device."""
    return [t.to(d) for t, d in zip(tensors, devices, strict=True)]


def _xla_get_devices() -> list[str]:
    from torch_bridge.torch_xla import runtime

    return [f"{runtime.device_type()}:{i}" for i in range(runtime.addressable_device_count())]


_xla_real_devices = _xla_get_devices


def _xla_get_all_devices() -> list[str]:
    from torch_bridge.torch_xla import runtime

    return [f"{runtime.device_type()}:{i}" for i in range(runtime.global_device_count())]


def _xla_get_auto_sharding() -> bool:
    """False: no pass chooses shardings by itself."""
    return False


def _ensure_xla_coordinator_initialized(
    global_rank: int = 0, world_size: int = 1, master_addr: str = "localhost", port: str | None = None
) -> None:
    """Accepted: the processes of a job know each other already."""


def _xla_get_default_device() -> str:
    return "xla:0"


def _xla_get_default_device_ordinal() -> int:
    return 0


def _xla_set_default_device(device: Any) -> str:
    """Accepts `xla:0`, the only device."""
    from torch_bridge.torch_xla import runtime

    runtime.device_at(torch.device(device).index)
    return "xla:0"


def _xla_num_devices() -> int:
    return 1


def _xla_get_replication_devices_count() -> int:
    from torch_bridge.mesh import world

    return world.size()


def _xla_memory_info(device: Device = None) -> dict[str, int]:
    from torch_bridge.telemetry import memory

    return memory.usage()


def _xla_set_rng_seed(seed: int, device: Device = None) -> None:
    from torch_bridge.torch_xla.core import xla_model

    xla_model.set_rng_state(seed)


def _xla_get_rng_seed(device: Device = None) -> int:
    from torch_bridge.torch_xla.core import xla_model

    return xla_model.get_rng_state()


def _xla_counter_names() -> list[str]:
    return sorted(metrics.COUNTERS)


def _xla_counter_value(name: str) -> int | None:
    return metrics.COUNTERS.get(name)


def _xla_metric_names() -> list[str]:
    return metrics_report.used_metrics()


def _xla_metric_data(name: str) -> Any:
    return metrics_report.data(name)


def _xla_metrics_report() -> str:
    return metrics_report.report()


def _short_xla_metrics_report(counter_names: Sequence[str] = (), metric_names: Sequence[str] = ()) -> str:
    return metrics_report.short(metric_names, counter_names)


def _get_executed_fallback_ops() -> list[str]:
    return metrics_report.fallback_ops()


def _xla_optimization_barrier_(tensors: Sequence[torch.Tensor]) -> None:
    from torch_bridge.recorder import barrier

    barrier.barrier_(tensors)


def _set_ir_debug(enabled: bool) -> None:
    """Accepted: source lines are always recorded."""


def _get_ir_debug() -> bool:
    return True


_mat_mul_precision = "default"


def _xla_set_mat_mul_precision(precision: str) -> None:
    """Set the precision of matrix products: 'default', 'high' or 'highest'."""
    import jax

    global _mat_mul_precision
    jax.config.update("jax_default_matmul_precision", precision)
    _mat_mul_precision = precision


def _xla_get_mat_mul_precision() -> str:
    """What was set; 'default' at first."""
    return _mat_mul_precision


_OF_ANNOTATIONS = {
    "OpSharding": "OpSharding",
    "_get_local_shard_replica_and_indices": "replicas_and_indices",
    "_get_local_shards": "local_shards",
    "_get_xla_op_sharding": "op_sharding",
    "_get_xla_sharding_spec": "spec",
    "_get_xla_sharding_type": "type_of",
    "_get_xla_tensor_debug_info": "debug_info",
    "_global_tensor_from_cpu_shards": "from_cpu_shards",
    "_load_local_shards": "load_shards",
    "_spmd_full_to_shard_shape": "full_to_shard_shape",
    "_spmd_shard_to_full_shape": "shard_to_full_shape",
    "_activate_preemption_sync_manager": "activate_preemption",
    "_deactivate_preemption_sync_manager": "deactivate_preemption",
    "_sync_point_reached": "sync_point_reached",
    "_xla_clear_sharding": "clear",
    "_xla_mark_sharding": "mark",
    "_xla_spmd_all_reduce": "all_reduce",
    "_xla_spmd_reduce_scatter": "reduce_scatter",
}


def __getattr__(name: str) -> Any:
    """What is about sharding annotations (`_spmd_functions`), once it is asked for."""
    if name in _OF_ANNOTATIONS:
        from torch_bridge.torch_xla import _spmd_functions

        return getattr(_spmd_functions, _OF_ANNOTATIONS[name])
    if name == "lowering":
        raise NotImplementedError(
            "torch_xla._XLAC.lowering (LoweringContext): graphs are not built by hand here. xm.get_stablehlo(tensors) and "
            "torch_xla._XLAC._get_xla_tensors_hlo(tensors) give the HLO of the graph that computes tensors"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _get_xla_sharding_specs(tensors: Sequence[torch.Tensor]) -> list[str]:
    """The sharding of each tensor, as XLA writes it."""
    from torch_bridge.torch_xla import _spmd_functions

    return [_spmd_functions.spec(t) for t in tensors]
