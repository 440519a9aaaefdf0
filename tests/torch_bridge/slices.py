"""For tests of slices that start elsewhere in every step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torch_bridge.ir import slice_families
from torch_bridge.runtime import executor


@pytest.fixture(autouse=True)
def static_families() -> Iterator[None]:
    """No slices that another test made dynamic, and none that this one makes for others."""
    before = {family: family.dynamic for family in slice_families._FAMILIES.values()}
    for family in before:
        family.dynamic = False
    executor.clear_cache()
    yield
    for family in slice_families._FAMILIES.values():
        family.dynamic = before.get(family, False)
    executor.clear_cache()
