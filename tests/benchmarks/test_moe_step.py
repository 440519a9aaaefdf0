"""The benchmark of mixtures of experts, at small sizes: all variants compute the same losses, and the table has them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.nxd_jax.conftest import nxd  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import moe_step

SIZES = dict(EXPERTS=4, BATCH=2, SEQ=8, HIDDEN=16, INTERMEDIATE=24)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in SIZES.items():
        monkeypatch.setattr(moe_step, name, size)
    numbers = moe_step.Numbers(SIZES["EXPERTS"], SIZES["HIDDEN"], SIZES["INTERMEDIATE"])
    monkeypatch.setattr(moe_step, "Numbers", lambda: numbers)
    monkeypatch.setenv("NXD_JAX_WORLD_SIZE", "1")


def test_variants_agree(small: None, nxd: object) -> None:  # noqa: F811
    from torch_bridge.mesh import world

    world.configure(world.World(1))
    found = {name: [moe_step.child(name, 1)] for name in moe_step.VARIANTS}
    assert moe_step.difference(found) < 1e-4
    assert found["ours"][0]["later"] == 0, "other routings compiled again"
    text = moe_step.table(found, {})
    assert all(title in text for title in moe_step.VARIANTS.values())
