"""Chips by platform target."""

from __future__ import annotations

import os
from enum import Enum


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
