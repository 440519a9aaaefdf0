"""Tensors of one stage that another one reads by a way that the pipeline does not see: an attribute, a global or a closure of a layer's code."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from nxd_jax.pipeline.stages import Stage
from torch_bridge.mesh import places
from torch_bridge.mesh.places import Place
from torch_bridge.replay import nested_grad
from torch_bridge.runtime import session

logger = logging.getLogger("nxd_jax")

_ADVICE = (
    "Let the layer return the tensor, and give it to the other layer as an argument; a weight is shared if both layers have it as a parameter, "
    "a table if each has a buffer of its own"
)


def arrays_of_buffers(stage: Stage) -> list[Any]:
    """What the buffers of a stage hold now."""
    return [b._storage.held for b in stage.module.buffers() if b.device.type == "xla"]  # type: ignore[attr-defined]


def check(stage: Stage, home: Place, buffers: Iterable[Any], given: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]) -> None:
    """Look at what a stage has recorded, once for each stage: its forward pass, before it runs.

    buffers: `arrays_of_buffers` before that; given: what the stage gives; inputs: what it got that takes gradients. Raises RuntimeError if gradients would go
    to another stage past the pipeline. Warns of other values that lie with another stage: which micro-batch's they are depends on the schedule.
    """
    segment = session.current().current
    leaves = [
        segment.leaves[k] for k in sorted({-v - 1 for node in segment.nodes for v in node[1:] if v < 0})
    ]  # others may be listed, unread
    known = {id(array) for array in buffers}
    found = [(leaf, at) for leaf, at in zip(leaves, places.of_all(leaves), strict=True) if at not in (None, home) and id(leaf) not in known]
    if not found:
        return
    leaf, at = found[0]
    assert at is not None
    what = f"{leaf.dtype}{list(leaf.shape)}, on the cores of {at.name}"
    said = f"stage {stage.index} of the pipeline reads a tensor of another stage ({what}) that is not handed to it"
    own = {id(t) for t in (*stage.module.parameters(), *inputs)}
    if any(id(leaf) not in own for leaf in _learning(given)):
        raise RuntimeError(f"{said}, and gradients would go back to it past the pipeline. {_ADVICE}")
    logger.warning("%s: it may be another micro-batch's. %s", said, _ADVICE)


def _learning(given: Iterable[torch.Tensor]) -> list[Any]:
    """The leaves of autograd's graph below some tensors."""
    found = [getattr(node, "variable", None) for node in nested_grad.nodes_below(t.grad_fn for t in given)]
    return [variable for variable in found if variable is not None]
