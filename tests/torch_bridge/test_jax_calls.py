"""JAX functions on xla tensors: `xla_builder.call_jax`, `assume_pure.j2t_autograd`, Pallas kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.debug.metrics as met
from jax.experimental import pallas
from torch import nn
from torch_xla.experimental.assume_pure import assume_pure, assume_pure_torch, j2t_autograd
from torch_xla.experimental.custom_kernel import make_kernel_from_pallas
from torch_xla.experimental.pure_module import PureModule

from tests.torch_bridge.ranks import eager
from torch_bridge.mesh import world
from torch_bridge.recorder import jax_calls


def _weighted(given: dict[str, Any], index: Any, *, scale: float, name: str) -> Any:
    assert name == "of the layer"
    return {
        "rows": jnp.take(given["x"], index, axis=0) * scale,
        "rest": (None, jnp.argmax(given["x"], axis=0), jnp.zeros(2, given["x"].dtype)),
    }


def test_nests_constants_and_views() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    index = torch.tensor([2, 0])
    found = xb.call_jax(_weighted, ({"x": x.to("xla").t()}, index.to("xla")), {"scale": 2.0, "name": "of the layer"})
    torch.testing.assert_close(found["rows"].cpu(), x.t()[index] * 2)
    assert found["rest"][0] is None and found["rest"][1].tolist() == [2, 2] and found["rest"][2].tolist() == [0.0, 0.0]


def test_a_function_is_traced_once_and_named_by_what_it_does() -> None:
    traced = []

    def made(value: float) -> Any:
        held = np.full(3, value, np.float32)

        def times(x: Any) -> Any:
            traced.append(value)
            return jax.jit(lambda y: y * held)(x)

        return times

    x = torch.ones(3, device="xla")
    double, triple = made(2.0), made(3.0)
    before = set(jax_calls._TRACED)
    results = [xb.call_jax(f, (x,)) for f in (double, double, triple, made(2.0))]
    assert [r.tolist() for r in results] == [[2.0] * 3, [2.0] * 3, [3.0] * 3, [2.0] * 3]
    assert traced == [2.0, 3.0, 2.0] and len(set(jax_calls._TRACED) - before) == 2


def test_gradients_in_a_training_step() -> None:
    torch.manual_seed(0)
    fallbacks = met.executed_fallback_ops()
    theirs = nn.Linear(3, 2)
    ours = nn.Linear(3, 2)
    ours.load_state_dict(theirs.state_dict())
    ours.to("xla")
    layer = j2t_autograd(lambda x, weight, bias, *, power: (jnp.tanh(x @ weight.T + bias) ** power, jnp.argmax(x)))
    x = torch.randn(4, 3)
    given = x.to("xla")

    def step() -> None:
        y, largest = layer(given, ours.weight, ours.bias, power=2)
        assert y.requires_grad and not largest.requires_grad
        y.sum().backward()
        torch_xla.sync()

    step()
    (torch.tanh(theirs(x)) ** 2).sum().backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(p.grad.cpu(), q.grad)
    step()  # gradients are added to others from now on
    before = met.counter_value("UncachedCompile")
    for _ in range(3):
        step()
    assert met.counter_value("UncachedCompile") == before
    assert met.executed_fallback_ops() == fallbacks


def test_a_pallas_kernel() -> None:
    def twice(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * 2

    def called(x: Any) -> Any:
        return pallas.pallas_call(twice, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    kernel = make_kernel_from_pallas(called, lambda x: [(x.shape, x.dtype)])
    assert kernel(torch.ones(2, 2, device="xla")).tolist() == [[2.0, 2.0]] * 2


def test_each_rank_has_its_own() -> None:
    world.configure(world.World(2))
    try:
        values = [torch.ones(2), torch.full((2,), 3.0)]
        eager.same(xb.call_jax(jnp.cumsum, (eager.on_xla(values),)), [v.cumsum(0) for v in values])
    finally:
        world.configure(None)


def test_pure_functions_and_modules() -> None:
    x = torch.ones(2, device="xla", requires_grad=True)
    y = assume_pure(lambda a, b=1: a * a + b)(x, b=2)
    y.sum().backward()
    assert y.tolist() == [3.0, 3.0] and x.grad is not None and x.grad.tolist() == [2.0, 2.0]
    assert not assume_pure_torch(use_cache=True)(lambda a: a * 2)(x).requires_grad
    module = PureModule(nn.Linear(2, 1).to("xla"))
    assert list(module.state_dict()) == ["_module.weight", "_module.bias"] and module(x).shape == (1,)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"called with xla tensors, got one on cpu; move it with \.to\('xla'\)"):
        xb.call_jax(jnp.sin, (torch.ones(2),))
    with pytest.raises(NotImplementedError, match=r"xla_builder\.create_builder.*call_jax\(function, tensors\)"):
        xb.create_builder("b")
