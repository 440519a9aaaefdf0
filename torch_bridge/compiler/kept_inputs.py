"""Which programs take over no buffers, so that they may start before their step is recorded (`runtime.speculation`): small training steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from torch import fx

from torch_bridge.compiler import kernel_calls
from torch_bridge.config.settings import SETTINGS
from torch_bridge.precision import precision_mode

STEPS: set[Any] = set()
"""Ops that are an optimizer's step (`optimizers.step_ops`)."""
EFFECTS: dict[Any, Callable[[Sequence[Any]], bool]] = {}
"""Ops that may do more than give results, with what says so of their arguments (`recorder.jax_calls`): a program that runs in vain would print twice."""


def keeps_inputs(graph: fx.Graph, replaced: Sequence[jax.ShapeDtypeStruct]) -> bool:
    """Whether a plain program of one device is a training step that keeps the buffers which it could take over: they are small (NXD_JAX_SPECULATE).

    replaced: inputs whose storages get new values, whoever else holds them now: it is to be the same program when nobody does.

    One that calls kernels of torch takes turns with the script at running Python, so it gains nothing.
    """
    if not SETTINGS.speculate or not any(node.target in STEPS for node in graph.nodes):
        return False
    if any(node.target in EFFECTS and EFFECTS[node.target](node.args) for node in graph.nodes):
        return False
    size = sum(math.prod(a.shape) * a.dtype.itemsize for a in replaced)
    return size <= SETTINGS.speculate << 20 and not kernel_calls.possible(graph, None, precision_mode.PLAIN)
