"""Tests of lowerings that are marked `together` find their programs compiled with those of the tests beside them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.torch_bridge.lowerings.batches import Batches


@pytest.fixture(scope="module")
def batches(request: pytest.FixtureRequest) -> Batches:
    """The tests of this file."""
    return Batches([item for item in request.session.items if item.path == request.path])


@pytest.fixture(autouse=True)
def compiled_together(request: pytest.FixtureRequest, batches: Batches) -> Iterator[None]:
    """Compile the programs of the next tests when the first of them runs."""
    with batches.ready(request.node):
        yield
