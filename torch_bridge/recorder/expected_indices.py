"""For layers that mask indices which are not theirs: say which ones are allowed at all, for `NXD_JAX_CHECK_INDICES` (`index_checks`)."""

from __future__ import annotations

from collections.abc import Callable

import torch

Expect = Callable[[str, torch.Tensor, int, str, int | None], None]

_expect: Expect | None = None


def check_with(expect: Expect) -> None:
    """Have indices checked from now on."""
    global _expect
    _expect = expect


def expect(layer: str, index: torch.Tensor, end: int, of: str, ignored: int | None = None) -> None:
    """`index` must be in 0 to `end - 1`, or be `ignored`. of: what they index, in words. Does nothing where indices are not checked."""
    if _expect is not None:
        _expect(layer, index, end, of, ignored)
