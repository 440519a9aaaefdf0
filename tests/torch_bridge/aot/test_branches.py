"""Programs that were exported for several platforms lose the branches of others before they are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import export, lax

from torch_bridge.aot import branches, exporting

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def lowered(fn: Callable[..., Any], *args: Any, wide: bool = False) -> tuple[Any, Callable[[], Any]]:
    """A function as a traced model's file has it, lowered for this machine, and what runs it."""
    with jax.enable_x64(wide):
        exported = export.export(jax.jit(fn), platforms=exporting.PLATFORMS)(*args)
        made = jax.jit(exported.call).lower(*args)
    return made, lambda: np.asarray(made.compile()(*args))


def cases(made: Any) -> int:
    return str(made.compiler_ir()).count("stablehlo.case")


def by_platform(x: jax.Array) -> jax.Array:
    return lax.platform_dependent(x, cpu=lambda x: x + 1, cuda=lambda x: x + 2, tpu=lambda x: x + 3)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("fn", "left"),
    [
        (by_platform, 0),
        (lambda x: jax.jit(by_platform)(x) + jax.jit(by_platform)(x), 0),
        (lambda x: lax.fori_loop(0, 3, lambda _, y: by_platform(y), x), 0),
        (lambda x: lax.cond(x[0, 0] < 1, by_platform, lambda x: x, x), 1),
    ],
    ids=["once", "in a function", "in a loop", "in a branch of the function's own"],
)
def test_this_platforms_branches(fn: Callable[[Any], Any], left: int, wide: bool) -> None:
    made, run = lowered(fn, X, wide=wide)
    before = cases(made)
    assert branches.choose(made.compiler_ir()) == before - left and cases(made) == left < before
    made.compiler_ir().operation.verify()
    np.testing.assert_allclose(run(), fn(X))


def test_branches_that_an_input_chooses_stay() -> None:
    made, run = lowered(lambda x, i: lax.switch(i, [lambda x: x, lambda x: x * 2, lambda x: x * 3], x), X, np.int32(2))
    branches.choose(made.compiler_ir())
    assert cases(made) == 1
    np.testing.assert_allclose(run(), X * 3)
