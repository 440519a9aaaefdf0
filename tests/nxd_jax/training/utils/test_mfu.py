"""The share of the peak."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from nxd_jax.training.utils import mfu


@pytest.fixture(autouse=True)
def fresh() -> None:
    mfu.peak_flops.cache_clear()


def test_the_cpu_has_no_peak() -> None:
    assert mfu.peak_flops() is None and mfu.mfu(1000.0, 6e9) is None


@pytest.mark.parametrize(("kind", "peak"), [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA Unknown", None)])
def test_of_a_gpu(kind: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert mfu.peak_flops() == peak
    mfu.peak_flops.cache_clear()
    assert mfu.mfu(1000.0, 6e9) == (None if peak is None else pytest.approx(6e12 / peak))
    assert mfu.mfu(1000.0, None) is None
    mfu.peak_flops.cache_clear()


def test_arithmetic() -> None:
    assert mfu.flops_per_token(7e9, 32, 4096, 4096) == 6 * 7e9 + 6 * 32 * 4096 * 4096
