"""`neuronx_distributed_training.lightning_modules.model.megatron`."""

from __future__ import annotations

from typing import Any

__all__ = ["MegatronGPTModel"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from nxd_jax.training.lightning_modules.model.megatron.megatron_gpt_model import MegatronGPTModel

        return MegatronGPTModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
