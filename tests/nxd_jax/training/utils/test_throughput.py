"""Sequences per second."""

from __future__ import annotations

import pytest

from nxd_jax.training.utils import Throughput


def make(*times: float) -> Throughput:
    moments = iter(times)
    found = Throughput(2, clock=lambda: next(moments))
    found.set_seqs_per_iteration(1, 4, 2)
    return found


def test_the_first_step_counts_only_until_the_second() -> None:
    found = make(0, 100, 102, 104, 105)
    found.start()
    assert [found.get_throughput() for _ in range(4)] == pytest.approx([8 / 100, 8 / 2, 16 / 4, 16 / 3])
    assert found.throughput_peak == pytest.approx(16 / 3)


def test_a_validation_does_not_count() -> None:
    found = make(0, 10, 12, 52, 54)
    found.start()
    found.get_throughput()
    found.pause()
    found.go_on()
    assert found.get_throughput() == pytest.approx(8 / 4)


def test_how_many_sequences_must_be_known() -> None:
    with pytest.raises(RuntimeError, match="call set_seqs_per_iteration"):
        Throughput().get_throughput()
