"""`neuronx_distributed_training.utils.model_utils`: groups of parameters by weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def get_param_groups_by_weight_decay(module: Any, no_decay: Sequence[str] = ("bias",), weight_decay: float = 0.01) -> list[dict[str, Any]]:
    """Two groups: parameters with weight decay, and those in whose name one of `no_decay` occurs, without.

    weight_decay: that of the first group. (The original takes 0.01 whatever the file says.)
    """
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": weight_decay}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            groups[any(part in name for part in no_decay)]["params"].append(parameter)
    return [group for group in groups if group["params"]]
