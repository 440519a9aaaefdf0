"""Trainings from a YAML file lay out ranks and set variables; each test begins without."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.nxd_jax.lightning.conftest import ranks  # noqa: F401


@pytest.fixture(autouse=True)
def variables() -> Iterator[None]:
    """Undo afterwards what configurations set in the environment."""
    from nxd_jax.training import environment

    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    environment._set_here.clear()
