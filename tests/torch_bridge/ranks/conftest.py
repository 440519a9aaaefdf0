"""Worlds of several ranks in this process, on virtual CPU devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import torch_bridge.device.startup  # noqa: F401
from torch_bridge.mesh import world

Hosted = Callable[..., None]


@pytest.fixture
def hosted() -> Iterator[Hosted]:
    """`hosted(8, dp=2, tp=4)`: this process hosts a world of 8 ranks on these mesh axes; undone after the test."""

    def start(size: int, **axes: int) -> None:
        world.configure(world.World(size))
        if axes:
            world.set_axes(axes)

    yield start
    world.configure(None)
