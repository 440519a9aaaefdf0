"""Hyperparameters as Python's own dicts and lists, so that a checkpoint can be read where OmegaConf is not installed."""

from __future__ import annotations

import sys
from typing import Any

from torch_bridge import nested


def plain(data: Any) -> Any:
    """Nested data with dicts and lists in place of OmegaConf's, interpolations resolved where they can be."""
    omegaconf: Any = sys.modules.get("omegaconf")
    if omegaconf is None:
        return data

    def is_config(x: object) -> bool:
        return isinstance(x, omegaconf.Container) or (isinstance(x, type) and issubclass(x, omegaconf.Container))

    return nested.replace(data, is_config, [_converted(x, omegaconf) for x in nested.collect(data, is_config)])


def _converted(config: object, omegaconf: Any) -> Any:
    if isinstance(config, type):  # what Lightning notes about `hparams`
        return list if issubclass(config, omegaconf.ListConfig) else dict
    try:
        return omegaconf.OmegaConf.to_container(config, resolve=True)
    except omegaconf.errors.OmegaConfBaseException:
        return omegaconf.OmegaConf.to_container(config, resolve=False)
