"""What stands for names of NeMo where it is not installed, besides those of this package (`nxd_jax_nemo` lets them be imported)."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("nxd_jax")
"""`nemo.utils.logging`."""


def hydra_runner(config_path: str | None = ".", config_name: str | None = None, schema: object = None) -> Any:
    """`nemo.core.config.hydra_runner`: `hydra.main` with Hydra 1.2's behaviour. schema is not supported (TypeError)."""
    if schema is not None:
        raise TypeError("hydra_runner(schema=...) is not supported without NeMo: leave schema out, or install NeMo")
    import hydra

    return hydra.main(config_path=config_path, config_name=config_name, version_base="1.2")
