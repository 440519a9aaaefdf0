"""`neuronx_distributed_training.lightning_modules.data.megatron`."""

from __future__ import annotations

from typing import Any

__all__ = ["MegatronDataModule"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from nxd_jax.training.lightning_modules.data.megatron.data_module import MegatronDataModule

        return MegatronDataModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
