"""`neuronx_distributed.utils.utils`: names of chips, how much a compiled graph says about its source, and JSON files."""

from __future__ import annotations

import json
import os
from enum import Enum
from typing import Any


class hardware(Enum):
    """`utils.utils.hardware`: chips by platform target; "trn1n" and "inf2" count as TRN1, one that `NEURON_PLATFORM_TARGET_OVERRIDE` names as CUSTOM."""

    TRN1 = "trn1"
    TRN2 = "trn2"
    TRN3 = "trn3"
    CUSTOM = "custom"

    @classmethod
    def _missing_(cls, value: object) -> hardware | None:
        if value in ("trn1n", "inf2"):
            return cls.TRN1
        if value and value == os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE"):
            return cls.CUSTOM
        return None


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
    """`utils.utils.get_dict_from_json`: what a JSON file holds. Raises ValueError, naming the file, if it is no JSON."""
    with open(json_file) as f:
        try:
            return json.load(f)
        except json.JSONDecodeError as error:
            raise ValueError(f"{os.fspath(json_file)} is not valid JSON: {error}") from error
