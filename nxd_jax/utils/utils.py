"""`neuronx_distributed.utils.utils`: names of chips, how much a compiled graph says about its source, and JSON files."""

from __future__ import annotations

import json
import os
from enum import Enum
from typing import Any

from nxd_jax.topology.hardware import hardware

__all__ = ["HloMetadataLevel", "get_dict_from_json", "hardware"]


class HloMetadataLevel(Enum):
    """`utils.utils.HloMetadataLevel`: what a compiled graph says about its source. True counts as DEBUG, False as INFO."""

    DEBUG = "debug"
    INFO = "info"
    NONE = "none"

    @classmethod
    def _missing_(cls, value: object) -> HloMetadataLevel | None:
        if isinstance(value, bool):
            return cls.DEBUG if value else cls.INFO
        return None


def get_dict_from_json(json_file: str | os.PathLike[str]) -> dict[Any, Any]:
    """`utils.utils.get_dict_from_json`: what a JSON file (in UTF-8) holds. Raises ValueError, naming the file, if it is missing or no JSON."""
    path = os.fspath(json_file)
    try:
        with open(path, encoding="utf-8") as f:
            return json.load(f)
    except FileNotFoundError as error:
        raise ValueError(f"JSON file not found: {path}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"Failed to parse JSON file {path}: {error}") from error
