"""`neuronx_distributed.modules.moe`: mixture of experts.

`routing` chooses experts for tokens, `expert_mlps` runs them, `shared_experts` are those that every token takes, `model.MoE` joins them. Names and submodules
are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_SUBMODULES = (
    "blockwise",
    "capacity",
    "dropless",
    "expert_mlps",
    "expert_mlps_v2",
    "experts",
    "load",
    "loss_function",
    "model",
    "model_utils",
    "moe_config_validator",
    "moe_configs",
    "moe_fused_tkg",
    "moe_fused_tkg_mx",
    "moe_parallel_layers",
    "moe_process_group",
    "routing",
    "shared_experts",
    "token_shuffling",
)
_FROM = {
    "ACT2FN": "model_utils",
    "ExpertMLPs": "expert_mlps",
    "ExpertMLPsV2": "expert_mlps_v2",
    "GroupLimitedRouter": "routing",
    "MoE": "model",
    "RouterSinkhorn": "routing",
    "RouterTopK": "routing",
    "SharedExperts": "shared_experts",
    "load_balancing_loss_func": "loss_function",
}
"""Names that are here too, and the modules that define them."""

__all__ = [
    "ACT2FN",
    "ExpertMLPs",
    "ExpertMLPsV2",
    "GroupLimitedRouter",
    "MoE",
    "RouterSinkhorn",
    "RouterTopK",
    "SharedExperts",
    "load_balancing_loss_func",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _FROM:
        return getattr(importlib.import_module(f"{__name__}.{_FROM[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES, *_FROM})
