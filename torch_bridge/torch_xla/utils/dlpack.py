"""`torch_xla.utils.dlpack`: tensors to and from other libraries. Values are copied: arrays behind xla tensors are never written to."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.dlpack

from torch_bridge.mesh import world
from torch_bridge.torch_xla import _XLAC


def to_dlpack(xla_tensor: torch.Tensor) -> Any:
    """`torch_xla.utils.dlpack.to_dlpack`: a DLPack capsule of a copy of an xla tensor, where JAX has it (`torch.utils.dlpack.from_dlpack` takes it).

    Raises RuntimeError for other tensors, NotImplementedError in a world of several ranks.
    """
    from torch_bridge.mesh import sharding
    from torch_bridge.runtime import executor, transfer

    t = _XLAC._xla(xla_tensor)
    if sharding.active():
        raise NotImplementedError(
            f"to_dlpack: in a world of {world.size()} ranks a tensor lies on several devices; pass on t.cpu(), which is rank 0's"
        )
    own: Any = t.detach().clone(memory_format=torch.contiguous_format)
    executor.materialize(own._storage)
    array = own._storage.array
    return (transfer.to_array(own.cpu()) if array is None else array).__dlpack__()


def from_dlpack(ext_tensor: Any) -> torch.Tensor:
    """`torch_xla.utils.dlpack.from_dlpack`: an xla tensor with the values of a DLPack capsule, or of a tensor or array that has `__dlpack__`."""
    return torch.utils.dlpack.from_dlpack(ext_tensor).cpu().to("xla")
