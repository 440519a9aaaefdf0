"""Every test starts without precision variables and with the first stochastic numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import torch_bridge.recorder  # noqa: F401
from torch_bridge import downcast, executor, numerics, rounding, world


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, clean_step: None) -> None:
    for name in numerics.VARIABLE_NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(downcast, "_warned", set())
    executor.sync()
    rounding.restart()


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """This process hosts two ranks."""
    world.configure(world.World(2))
    yield
    world.configure(None)
