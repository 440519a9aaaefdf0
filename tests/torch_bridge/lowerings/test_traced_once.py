"""`lowerings/traced_once.py`: one trace for operands that are alike, and another for all that differs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from torch_bridge.ir import dtypes
from torch_bridge.lowerings import registered, traced_once

X = jnp.arange(3.0)


class Pair(NamedTuple):
    a: Any
    b: Any


def counted(fn: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    runs: list[int] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        runs.append(1)
        return fn(*args, **kwargs)

    return run, runs


def test_one_trace_for_operands_of_the_same_shapes() -> None:
    fn, runs = counted(lambda x, y: jnp.sin(x) * y)
    two = jax.jit(lambda x, y: traced_once.call(fn, (traced_once.call(fn, (x, y), {}), x), {}))
    np.testing.assert_allclose(two(X, X + 1), jnp.sin(jnp.sin(X) * (X + 1)) * X, rtol=1e-6)
    assert len(runs) == 1
    jax.jit(lambda x: traced_once.call(fn, (x, x), {}))(X[:2])
    assert len(runs) == 2, "another shape"
    jax.jit(lambda x: traced_once.call(fn, (x, x), {}))(X.astype(jnp.int32))
    assert len(runs) == 3, "another dtype"


def test_no_call_is_left_and_scopes_are_the_callers() -> None:
    @jax.jit
    def program(x: Any) -> Any:
        for name in ("one", "two"):
            with jax.named_scope(name):
                x = traced_once.call(jnp.tanh, (x,), {})
        return x

    text = program.lower(X).compile().as_text()
    assert text is not None
    assert all(re.search(rf"{name}/(jit\(run\)/)?tanh", text) for name in ("one", "two"))  # jax 0.11 keeps the function's name


@pytest.mark.parametrize(
    "pair", [(1, 1.0), (1, True), (0.0, -0.0), (None, 0), ("a", "b"), (torch.float32, torch.float64), ((1,), [1])], ids=str
)
def test_other_arguments_are_part_of_the_trace(pair: tuple[Any, Any]) -> None:
    fn, runs = counted(lambda x, *rest: x + 1)
    for value in (*pair, *pair):
        jax.jit(lambda x, value=value: traced_once.call(fn, (x, value), {}))(X)
    assert len(runs) == 2


def test_arguments_arrive_as_they_are() -> None:
    seen: list[Any] = []

    def fn(x: Any, pair: Pair, *, many: list[Any], number: dtypes.Scalar, p: float) -> Any:
        seen.append((type(pair), type(many), many[1], number.kind, p))
        return x * pair.a + many[0] + many[2][0] + number.value + p

    def program(x: Any, y: Any) -> Any:
        return traced_once.call(fn, (x, Pair(y, None)), {"many": [y, "s", (x,)], "number": dtypes.Scalar(float, y[0]), "p": 0.5})

    np.testing.assert_allclose(jax.jit(program)(X, X + 1), X * (X + 1) + (X + 1) + X + 1.5, rtol=1e-6)
    assert seen == [(Pair, list, "s", float, 0.5)]


def test_gradients() -> None:
    def program(x: Any) -> Any:
        return traced_once.call(lambda x: (jnp.sin(x) ** 2).sum(), (x,), {})

    np.testing.assert_allclose(jax.jit(jax.grad(program))(X), 2 * jnp.sin(X) * jnp.cos(X), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.grad(program)(X), 2 * jnp.sin(X) * jnp.cos(X), rtol=1e-5, atol=1e-6)


def test_values_that_are_there_and_arguments_without_a_hash_are_computed_at_once() -> None:
    fn, runs = counted(lambda x, table: x + len(table))
    for _ in range(2):
        assert traced_once.call(fn, (X, "ab"), {}).tolist() == [2, 3, 4]
    for _ in range(2):
        jax.jit(lambda x: traced_once.call(fn, (x, {1, 2}), {}))(X)
    assert len(runs) == 4


def test_what_takes_long_to_trace_says_so() -> None:
    """Not an op that writes in place or that ranks take part in: these depend on more than their arguments."""
    once = {str(op) for op, found in registered().items() if found.once}
    assert {"aten.native_layer_norm.default", "aten.convolution_backward.default"} <= once
    assert not any(found.once and (found.writes or found.collective) for found in registered().values())
