"""`neuronx_distributed.quantization.observer`: what is measured of tensors before they are quantized."""

from __future__ import annotations

import warnings
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.ao.quantization.observer import UniformQuantizationObserverBase


class PerChannelAbsMaxObserver(UniformQuantizationObserverBase):
    """The largest absolute value of each channel over all tensors that it was called with.

    ch_axis: the dim of channels. `max_val` is [channels, 1]; scales are max_val / quant_max (127), at least `eps`. The other arguments are those of torch's
    observers. Raises AssertionError for another dtype than qint8, ValueError for a scheme that is not symmetric.
    """

    max_val: torch.Tensor

    def __init__(
        self,
        ch_axis: int = 0,
        dtype: torch.dtype = torch.qint8,
        qscheme: torch.qscheme = torch.per_channel_symmetric,
        reduce_range: bool = False,
        quant_min: int | None = None,
        quant_max: int | None = None,
        factory_kwargs: dict[str, Any] | None = None,
        eps: float = torch.finfo(torch.float32).eps,
    ):
        if dtype is not torch.qint8:
            raise AssertionError(f"PerChannelAbsMaxObserver supports torch.qint8 only, got dtype={dtype}")
        if qscheme not in (torch.per_tensor_symmetric, torch.per_channel_symmetric):
            raise ValueError(f"PerChannelAbsMaxObserver supports per_tensor_symmetric and per_channel_symmetric, got qscheme={qscheme}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            super().__init__(dtype, qscheme, reduce_range, quant_min, quant_max, factory_kwargs, eps)
        self.ch_axis = ch_axis
        self.register_buffer("max_val", torch.tensor([], **torch.nn.factory_kwargs(factory_kwargs)))

    def forward(self, x_orig: torch.Tensor) -> torch.Tensor:
        """The tensor itself, once it is measured."""
        if x_orig.numel():
            rows = x_orig.detach().movedim(self.ch_axis, 0).flatten(1) if x_orig.dim() > 1 else x_orig.detach().unsqueeze(1)
            largest = rows.to(self.max_val.dtype).abs().amax(dim=1, keepdim=True)
            self.max_val = torch.maximum(largest, self.max_val) if self.max_val.numel() else largest
        return x_orig

    def calculate_qparams(self, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(scales float32 [channels], zero points int64 [channels], all 0). Raises RuntimeError before anything was measured."""
        if not self.max_val.numel():
            raise RuntimeError("PerChannelAbsMaxObserver has measured nothing yet: call it with a tensor first")
        scale = torch.maximum((self.max_val / float(self.quant_max)).to(torch.float32), self.eps.to(torch.float32)).squeeze(1)
        return scale, torch.zeros_like(scale, dtype=torch.int64)

    def reset_min_max_vals(self) -> None:
        """Forget what was measured."""
        self.max_val = self.max_val.new_empty(0)

    def extra_repr(self) -> str:
        return f"abs_max_val={self.max_val}"

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("PerChannelAbsMaxObserver has no state to load: call it with the tensors to measure")
