"""Observers of `torch.ao.quantization`, which write their averages into buffers while they round."""

from __future__ import annotations

import math
from typing import Any

import torch

from torch_bridge.recorder.dispatch import record, resize, special
from torch_bridge.recorder.schema import info

aten = torch.ops.aten


@special(aten._fused_moving_avg_obs_fq_helper.default)
def observe_and_fake_quantize(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An observer of channels has nothing in its buffers before the first call, which says how many there are."""
    x, _, _, running_min, running_max, scale, zero_point, *_ = args
    given = dict(zip(info(func).names, args, strict=False)) | kwargs
    if given.get("per_row_fake_quant") and not running_min.numel():
        for held, value in ((running_min, math.inf), (running_max, -math.inf), (scale, 0), (zero_point, 0)):
            resize(held, (x.shape[given["ch_axis"]],))
            aten.fill_.Scalar(held, value)
    out, mask, *new = record(aten._fused_moving_avg_obs_fq_helper_functional.default, args, kwargs)
    for held, value in zip((running_min, running_max, scale, zero_point), new, strict=True):
        aten.copy_.default(held, value)
    return out, mask
