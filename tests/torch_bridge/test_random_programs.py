"""Hypothesis looks for a program of views, in-place ops and arithmetic that the xla device and eager torch disagree on.

Each run draws other programs; `RANDOM_PROGRAMS=5000` looks for longer than a test suite can.
"""

from __future__ import annotations

import os

import hypothesis
import hypothesis.strategies as st
import torch

import torch_bridge  # noqa: F401  (registers the device)
from tests.torch_bridge import programs

EXAMPLES = int(os.environ.get("RANDOM_PROGRAMS", "120"))

instruction = st.tuples(st.integers(0, 104), st.integers(0, 255), st.integers(0, 63), st.integers(0, 63))


def _strides(t: torch.Tensor) -> list[int]:
    """The strides that mean something."""
    return [s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1] if t.numel() else []


def _check(program: list[programs.Instruction]) -> None:
    from torch_bridge.runtime import executor

    expected, got = programs.start("cpu"), programs.start("xla")
    expected_errors = programs.run(program, expected, lambda: None)
    got_errors = programs.run(program, got, executor.sync)
    assert got_errors == expected_errors
    executor.sync()
    for i, (e, g) in enumerate(zip(expected, got, strict=True)):
        assert g.shape == e.shape, f"tensor {i}"
        assert g.dtype == e.dtype, f"tensor {i}"
        assert _strides(g) == _strides(e), f"tensor {i}: shape {tuple(e.shape)}"
        torch.testing.assert_close(g.cpu(), e, equal_nan=True, msg=lambda m, i=i: f"tensor {i}: {m}")


@hypothesis.settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.example(
    [(0, 0, 0, 0)] * 4 + [(35, 0, 0, 0), (0, 0, 0, 0), (20, 142, 20, 0), (32, 20, 0, 0)]
)  # add_ to an expanded view of a view that overlaps
@hypothesis.given(st.lists(instruction, min_size=5, max_size=14))
def test_random_programs(program):
    _check(program)
