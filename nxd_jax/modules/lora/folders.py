"""What every kind of folder with adapters has in common: where adapters were found, and the file with their configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from torch_bridge.mesh import world

CONFIG_FILE = "adapter_config.json"


class Source(NamedTuple):
    """A checkpoint with adapters that was found.

    path: the file or folder. config: the configuration it was made with; None if it is not there. read: its state dict for a `LoraModel`, tensors full or
    each rank's part; or it fills the model itself, and returns an empty one.
    """

    path: str
    config: dict[str, Any] | None
    read: Callable[[Any], dict[str, Any]]


def write_config(directory: str, config: dict[str, Any]) -> str:
    """Write a configuration as `<directory>/adapter_config.json`; the file's path. The process of rank 0 does it."""
    path = os.path.join(directory, CONFIG_FILE)
    if world.first() == 0:
        os.makedirs(directory, exist_ok=True)
        with open(f"{path}.unfinished", "w") as file:
            json.dump(config, file, indent=2, sort_keys=True)
        os.replace(f"{path}.unfinished", path)
    return path


def read_json(path: str) -> dict[str, Any]:
    """A JSON file with one object. Raises ValueError naming it."""
    try:
        with open(path) as file:
            found = json.load(file)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold the fields of a LoRA configuration, got {type(found).__name__}")
    return found
