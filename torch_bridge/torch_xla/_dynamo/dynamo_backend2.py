"""`torch_xla._dynamo.dynamo_backend2`: a backend of `torch.compile`, given as a function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_bridge.replay.player import optimize


def dynamo_backend(fx: torch.fx.GraphModule, args: Sequence[Any]) -> torch.nn.Module:
    """`dynamo_backend2.dynamo_backend`: the graph, played from recordings (`torch_bridge.optimize`).

    `torch.compile(m, backend=dynamo_backend)` plays `m` itself.

    args: example inputs, which are not needed. TypeError for what is no module.
    """
    return optimize(fx)


dynamo_backend.plays = True  # type: ignore[attr-defined]  # for `device.torch_compile`
