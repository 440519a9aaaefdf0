"""Words on losses that jump or are no numbers."""

from __future__ import annotations

import logging
import math

import pytest

from nxd_jax.training.lightning_modules.model.spikes import SpikeWatch


def test_a_spike_is_said_and_a_slow_rise_is_not(caplog: pytest.LogCaptureFixture) -> None:
    watch = SpikeWatch()
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        for step in range(40):
            watch.see(step, 4.0 - 0.02 * step + 0.05 * math.sin(step))
        assert caplog.text == ""
        watch.see(40, 7.5)
    assert "loss spike: 7.5000 at step 40" in caplog.text


def test_no_number_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = SpikeWatch()
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        watch.see(3, math.nan)
        watch.see(4, math.inf)
    assert caplog.text.count("the loss of step 3 is nan") == 1
    assert "step 4" not in caplog.text and "lower model.optim.lr" in caplog.text
