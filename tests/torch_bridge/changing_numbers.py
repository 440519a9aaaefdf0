"""For tests of numbers that change between steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torch_bridge.ir import number_families
from torch_bridge.runtime import executor


@pytest.fixture(autouse=True)
def static_families() -> Iterator[None]:
    """No numbers that another test made inputs, and none that this one makes for others."""
    before = {family: family.dynamic for family in number_families._FAMILIES.values()}
    for family in before:
        family.dynamic = False
    executor.clear_cache()
    yield
    for family in number_families._FAMILIES.values():
        family.dynamic = before.get(family, False)
    executor.clear_cache()
