"""Parameters and buffers on xla that have no shape yet (`nn.LazyLinear(3, device="xla")`): torch's classes, as tensors of ours.

`materialize` makes one an ordinary parameter or buffer there, the same Python object, as torch's does on other devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, UninitializedTensorMixin  # type: ignore[attr-defined]

from torch_bridge.ir import layout as layouts
from torch_bridge.recorder import op_rules
from torch_bridge.recorder.tensor import DEVICE, XLATensor


class _Uninitialized(UninitializedTensorMixin):
    cls_to_become = XLATensor
    _allowed_methods = [*UninitializedTensorMixin._allowed_methods, torch.Tensor.is_inference]  # `XLATensor.data` asks

    def materialize(self, shape: Sequence[int], device: Any = None, dtype: torch.dtype | None = None) -> None:
        """As torch's, on xla, where the storage keeps what is known about it (its module)."""
        if device is not None and torch.device(device).type != "xla":
            raise ValueError(
                f"materialize(device={str(device)!r}) of a parameter or buffer on xla:0: it becomes one there; move the module first, with .to"
            )
        facts = self._storage.facts
        UninitializedTensorMixin.materialize(self, shape, DEVICE, dtype)
        if facts is not None:
            self._storage.describe(owner=facts.owner)


class XLAUninitializedParameter(_Uninitialized, UninitializedParameter, XLATensor):
    """torch's `UninitializedParameter` on xla."""

    def __new__(cls, requires_grad: bool = True, device: Any = None, dtype: torch.dtype | None = None) -> Any:
        made = _empty(cls, dtype, requires_grad)
        made._is_param = True
        return made

    def __reduce_ex__(self, proto: SupportsIndex) -> Any:
        return UninitializedParameter, (self.requires_grad,)  # as torch's: a file does not say where it was


class XLAUninitializedBuffer(_Uninitialized, UninitializedBuffer, XLATensor):
    """torch's `UninitializedBuffer` on xla."""

    def __new__(cls, requires_grad: bool = False, device: Any = None, dtype: torch.dtype | None = None, persistent: bool = True) -> Any:
        made = _empty(cls, dtype, requires_grad)
        made.persistent = persistent
        made._is_buffer = True
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = type(self)(self.requires_grad, dtype=self.data.dtype, persistent=self.persistent)
        return memo[id(self)]

    def __reduce_ex__(self, proto: SupportsIndex) -> Any:
        return UninitializedBuffer, (self.requires_grad,)


def _empty(cls: Any, dtype: torch.dtype | None, requires_grad: bool) -> Any:
    """A tensor of `cls` without elements."""
    plain = op_rules.uninitialized(layouts.base_of((0,), (1,), dtype or torch.get_default_dtype()))
    made = torch.Tensor._make_wrapper_subclass(cls, (0,), dtype=plain.dtype, device=DEVICE, requires_grad=requires_grad)
    made._storage, made._layout = plain._storage, plain._layout
    return made
