"""The parity helper of user-level tests: run one function on the CPU and on device xla and compare everything it returns."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

import torch_bridge

torch_bridge.register()
ROOT = Path(__file__).resolve().parents[2]


def to_cpu(x: Any) -> Any:
    """A result with its xla tensors downloaded."""
    return tree_map(lambda t: t.detach().cpu() if isinstance(t, torch.Tensor) else t, x)


def same(fn: Callable[[str], Any], rtol: float = 2e-5, atol: float = 1e-6, check_stride: bool = False) -> Any:
    """`fn("xla")` returns what `fn("cpu")` does: values, dtypes, shapes and anything that is not a tensor. Gives the xla result."""
    torch.manual_seed(0)
    expected = fn("cpu")
    torch.manual_seed(0)
    got = fn("xla")
    if check_stride:
        tree_map(lambda a, b: _same_stride(a, b), got, expected)
    _compare(to_cpu(got), to_cpu(expected), rtol, atol)
    return got


def _same_stride(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert a.stride() == b.stride(), (a.stride(), b.stride())


def _compare(got: Any, expected: Any, rtol: float, atol: float) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor)
        torch.testing.assert_close(
            got, expected, rtol=rtol if expected.is_floating_point() or expected.is_complex() else 0, atol=atol, equal_nan=True
        )
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            _compare(got[key], expected[key], rtol, atol)
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            _compare(a, b, rtol, atol)
    elif isinstance(expected, float):
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
    else:
        assert got == expected


def python(code: str, *paths: str | Path, timeout: float = 120.0, **environment: str) -> str:
    """The output of a fresh Python process that runs `code` with the checkout (and `paths`) importable; its failure is ours."""
    found = os.pathsep.join([*map(str, paths), str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment, "PYTHONPATH": found},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
