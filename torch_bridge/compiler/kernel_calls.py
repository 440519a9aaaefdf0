"""Which programs call kernels of torch (`lowerings.torch_kernels`)."""

from __future__ import annotations

import jax
from torch import fx

from torch_bridge import lowerings
from torch_bridge.config.settings import SETTINGS
from torch_bridge.precision import precision_mode
from torch_bridge.precision.precision_mode import Mode


def allowed(labels: object, mode: Mode) -> bool:
    """Whether a program with these labels and of this mode is a plain one of one CPU device, which takes them."""
    return SETTINGS.torch_kernels and labels is None and mode == precision_mode.PLAIN and jax.default_backend() == "cpu"


def possible(graph: fx.Graph, labels: object, mode: Mode) -> bool:
    """Whether its function calls some, as far as its ops say."""
    return allowed(labels, mode) and any(lowerings.may_call_kernels(node.target, node.args) for node in graph.nodes)
