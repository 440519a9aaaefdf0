"""`torch_xla._dynamo.dynamo_bridge`: compiled forms of fx graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_bridge.replay.player import optimize


def extract_compiled_graph(xla_model: torch.fx.GraphModule, xla_args: Sequence[Any]) -> torch.nn.Module:
    """`dynamo_bridge.extract_compiled_graph`: the graph, played from recordings (`torch_bridge.optimize`). Its programs are compiled when they are first run.

    xla_args: example inputs, which are not needed. TypeError for what is no module.
    """
    return optimize(xla_model)
