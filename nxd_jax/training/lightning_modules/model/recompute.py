"""What the backward pass computes again: `model.activations_checkpoint_granularity` and `model.activations_checkpoint_recompute`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

GRANULARITIES = (None, "selective", "full")
"""Of `model.activations_checkpoint_granularity`."""


def recomputed(
    section: Mapping[str, Any],
    classes: Sequence[type[nn.Module]],
    layer: type[nn.Module],
    selective: tuple[type[nn.Module], ...],
    default: Any,
) -> Any:
    """What `activation_checkpoint_config` is to be: classes of modules, or None.

    section: `model`. classes: what the list may name. layer: what "full" means. selective: what "selective" means without a list. default: what null means.
    Raises ValueError for other words than those that are known.
    """
    known = {kind.__name__: kind for kind in classes}
    granularity, said = section.get("activations_checkpoint_granularity"), section.get("activations_checkpoint_recompute")
    if granularity not in GRANULARITIES:
        raise ValueError(f"model.activations_checkpoint_granularity: {granularity!r} must be null, selective or full")
    if granularity == "full":
        return layer
    names = [said] if isinstance(said, str) else list(said or ())
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"model.activations_checkpoint_recompute: unknown {', '.join(unknown)}; it takes {', '.join(known)}")
    if granularity is None:
        return default
    return tuple(known[name] for name in names) or selective
