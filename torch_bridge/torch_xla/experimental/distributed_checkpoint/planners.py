"""Planners for `torch.distributed.checkpoint`: tensors on xla are written as whole CPU tensors, and read into tensors that stay divided as they are.

So a checkpoint loads on a mesh of any shape, and into a model on the CPU with torch's own planners.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from torch_bridge import nested
from torch_bridge.torch_xla.distributed.spmd.xla_sharded_tensor import XLAShardedTensor
from torch_bridge.torch_xla.experimental.distributed_checkpoint._helpers import _CpuShards, is_divided, on_cpu, plain

__all__ = ["SPMDLoadPlanner", "SPMDSavePlanner"]


def _on_xla(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "xla"


def _parted(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """By name, what is divided, and everything else."""
    flat, _ = flatten_state_dict(state_dict)
    divided = {
        name: x if isinstance(x, _CpuShards) else XLAShardedTensor(x)
        for name, x in flat.items()
        if isinstance(x, _CpuShards) or is_divided(x)
    }
    return divided, {name: x for name, x in flat.items() if name not in divided}


class SPMDSavePlanner(DefaultSavePlanner):
    """`SPMDSavePlanner`: for `torch.distributed.checkpoint.save(state_dict, planner=...)` of an annotated model.

    sharded_state_dict, unsharded_state_dict: after `set_up_planner`, by name, what is divided and what is not.
    """

    def set_up_planner(self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False) -> None:
        """Take the values of now."""
        self.sharded_state_dict, self.unsharded_state_dict = _parted(plain(state_dict))
        super().set_up_planner(on_cpu(state_dict), storage_meta, is_coordinator)


class SPMDLoadPlanner(DefaultLoadPlanner):
    """`SPMDLoadPlanner`: for `torch.distributed.checkpoint.load(state_dict, planner=...)`. The tensors of `state_dict` are written to; other values are
    replaced in it. sharded_state_dict, unsharded_state_dict: as those of `SPMDSavePlanner`."""

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Read into CPU tensors, which are moved as they come."""
        self._given = plain(state_dict)
        self._outer = state_dict
        tensors = nested.collect(self._given, _on_xla)
        staged = nested.replace(self._given, _on_xla, [torch.empty(t.shape, dtype=t.dtype) for t in tensors])
        self._xla, _ = flatten_state_dict(self._given)
        self.sharded_state_dict, self.unsharded_state_dict = _parted(self._given)
        super().set_up_planner(staged, metadata, is_coordinator)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """What is no tensor."""
        super().load_bytes(read_item, value)
        name = read_item.dest_index.fqn
        if self.flatten_state_dict:
            found = self.original_state_dict
            for key in self.mappings[name]:
                found = found[key]  # type: ignore[index]
            set_element(self._outer, self.mappings[name], found)
        else:
            self._outer[name] = self.state_dict[name]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """A part of a tensor has been read."""
        super().commit_tensor(read_item, tensor)
        there = self._xla.get(read_item.dest_index.fqn)
        if there is not None and _on_xla(there):
            with torch.no_grad():
                there.copy_(self.lookup_tensor(read_item.dest_index))
