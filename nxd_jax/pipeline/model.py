"""`neuronx_distributed.pipeline.model`: the class of pipeline models, which cannot be made yet."""

from __future__ import annotations

from typing import Any

import torch

from nxd_jax import _later


class NxDPPModel(torch.nn.Module):
    """`pipeline.NxDPPModel`: raises NotImplementedError when constructed."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise NotImplementedError(f"neuronx_distributed.pipeline.{type(self).__name__}: {_later.PIPELINE}")
