"""`torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel`: in a world of one there is nothing to shard, and the wrapper runs the module as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_bridge.mesh import world

if TYPE_CHECKING:
    from torch_bridge.mesh.groups import GroupLike

__all__ = ["ADVICE", "XlaFullyShardedDataParallel"]

ADVICE = (
    "is not there yet in a world of several ranks. Use neuronx_distributed (optimizer_config={'zero_one_enabled': True}) to shard optimizer state, or plain "
    "data parallelism (xm.optimizer_step); with one rank the module runs as it is."
)

_WITHOUT_EFFECT = frozenset(
    {
        "all_gather_bucket_size_mb",
        "auto_wrap_policy",
        "auto_wrapper_callable",
        "coalesce_all_gather_ops",
        "coalesce_reduce_scatter_ops",
        "disable_reshard_on_root",
        "execute_sharding_on_init",
        "flatten_parameters",
        "fp32_reduce_scatter",
        "mark_step_on_finalization",
        "mark_step_on_freeing",
        "optimization_barrier_in_backward",
        "optimization_barrier_in_forward",
        "pin_layout_in_collective_ops",
        "reduce_scatter_bucket_size_mb",
        "reshard_after_forward",
        "shard_param_on_dim_0",
        "sharding_groups",
        "sharding_rank",
        "sharding_world_size",
        "use_all_gather_via_all_reduce",
        "zero_cpu_init",
    }
)
"""Options about how, when and where weights are shared out."""

_DTYPES = ("compute_dtype", "buffer_dtype")


class XlaFullyShardedDataParallel(nn.Module):
    """`torch_xla.distributed.fsdp.XlaFullyShardedDataParallel` in a world of one: the module itself, moved to xla, under the same names.

    `state_dict()` and `load_state_dict()` have the module's own names, also where wrappers are nested. Options about sharding, and names with a leading
    underscore, are accepted without effect. Raises NotImplementedError in a world of several ranks and for a `compute_dtype` or `buffer_dtype` other than
    float32, TypeError for options that it does not know.
    """

    def __init__(self, module: nn.Module, *args: object, **options: Any):
        super().__init__()
        if world.size() > 1:
            raise NotImplementedError(f"torch_xla.distributed.fsdp.{type(self).__name__} {ADVICE}")
        _check(type(self).__name__, options)
        self.module = module if any(p.device.type == "meta" for p in module.parameters()) else module.to("xla")
        self._register_load_state_dict_pre_hook(_add_prefix)

    def forward(self, *args: object, **kwargs: object) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What the wrapper does not have is the module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        """For a wrapped `nn.Sequential`."""
        return self.module[key]  # type: ignore[index]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, under its own names."""
        return self.module.state_dict(*args, **kwargs)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, groups: GroupLike = None) -> torch.Tensor:
        """Clip the gradients to a total norm; returns the norm before that."""
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """No gradients are exchanged in a world of one."""
        yield

    def get_shard_metadata(self) -> dict[str, Any]:
        """What scripts save beside a rank's part: here the part is the whole."""
        return {"shard_info": {}, "flatten_info": {}, "buffer_info": {}, "world_size": 1, "rank": 0}


def _check(name: str, options: dict[str, Any]) -> None:
    for option in _DTYPES:
        if options.get(option) not in (None, torch.float32):
            raise NotImplementedError(
                f"{name}({option}={options[option]}) is not there yet: convert the module (module.to(torch.bfloat16)), or use torch.autocast('xla')"
            )
    unknown = [o for o in options if o not in _WITHOUT_EFFECT and o not in _DTYPES and not o.startswith("_")]
    if unknown:
        raise TypeError(f"{name}: unknown options {', '.join(sorted(unknown))}; it knows {', '.join(sorted({*_WITHOUT_EFFECT, *_DTYPES}))}")


def _add_prefix(state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before the wrapper loads: its entries get the name under which the wrapper holds the module."""
    inner = f"{prefix}module."
    own = {name: value for name, value in state.items() if name.startswith(prefix)}
    for name, value in own.items():
        del state[name]
        state[inner + name.removeprefix(prefix)] = value
