"""Every test starts without precision variables and with the first stochastic numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import torch_bridge.device.startup  # noqa: F401
from torch_bridge.mesh import world
from torch_bridge.precision import device_formats, precision_mode, stochastic_rounding
from torch_bridge.runtime import executor


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, clean_step: None) -> None:
    for name in precision_mode.VARIABLE_NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device_formats, "_warned", set())
    executor.sync()
    stochastic_rounding.restart()


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """This process hosts two ranks."""
    world.configure(world.World(2))
    yield
    world.configure(None)
