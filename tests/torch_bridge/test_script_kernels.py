"""Ops of scripts: kernels that `torch.library` registers for "XLA", for device "xla" and for all devices get the xla tensors themselves."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor
from torch_xla.core import xla_builder, xla_model
from torch_xla.experimental import custom_kernel

import torch_bridge
from torch_bridge.errors import UnsupportedOpError

torch_bridge.register()

_library = torch.library.Library("nxd_jax_kernels", "DEF")
ops: Any = torch.ops.nxd_jax_kernels


def _define(schema: str, **kernels: Any) -> None:
    _library.define(schema)
    for key, function in kernels.items():
        _library.impl(schema.partition("(")[0], function, key)


def test_the_kernel_for_xla_comes_before_the_one_for_other_devices() -> None:
    _define("scaled(Tensor x) -> Tensor", XLA=lambda x: x * 2, CompositeExplicitAutograd=torch.empty_like, CPU=lambda x: x * 5)
    assert ops.scaled(torch.ones(2, device="xla")).tolist() == [2, 2]
    assert ops.scaled(torch.ones(2)).tolist() == [5, 5]


def test_a_kernel_for_xla_alone_is_recorded_and_compiled() -> None:
    _define("plus(Tensor x, Tensor y) -> (Tensor, Tensor)", XLA=lambda x, y: (x + y, x - y), Meta=lambda x, y: (x + y, x - y))
    x = torch.arange(3.0, device="xla")
    assert [t.tolist() for t in ops.plus(x, x)] == [[0, 2, 4], [0, 0, 0]]
    compiled = torch.compile(lambda x, y: ops.plus(x, y)[0] + 1, backend="openxla", fullgraph=True)
    assert compiled(x, x).tolist() == [1, 3, 5]
    assert "aten.add" in str(torch_bridge.capture(_Plus(), x))


class _Plus(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.plus(x, x)[0]


def test_a_kernel_writes_into_its_arguments_and_takes_cpu_tensors_as_they_are() -> None:
    def update(cache: Tensor, value: Tensor, at: Tensor) -> None:
        assert at.device.type == "cpu"
        cache[at.tolist()] = value

    _define("update_(Tensor(a!) cache, Tensor value, Tensor at) -> ()", XLA=update)
    cache = torch.zeros(4, device="xla")
    ops.update_(cache, torch.ones(2, device="xla"), torch.tensor([1, 3]))
    assert cache.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("devices", ["xla", None, ("cpu", "xla")])
def test_custom_ops_and_their_gradients(devices: Any) -> None:
    seen: list[tuple[str, bool]] = []

    def sine(x: Tensor, n: int) -> Tensor:
        seen.append((x.device.type, (x * 2).requires_grad))
        return torch.from_numpy(np.sin(x.detach().cpu().numpy())).to(x.device) * n

    name = f"nxd_jax_kernels::sine_{'' if devices is None else '_'.join(devices)}"
    op = torch.library.custom_op(name, sine, mutates_args=(), device_types=devices, schema="(Tensor x, int n) -> Tensor")
    op.register_autograd(lambda ctx, g: (g * 7, None))
    x = torch.ones(2, device="xla", requires_grad=True)
    y = op(x, 3)
    torch.testing.assert_close(y.cpu(), torch.ones(2).sin() * 3)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [7, 7]
    assert seen == [("xla", False)]


def test_ops_that_are_defined_in_the_librarys_own_namespace() -> None:
    """As vLLM defines its own: a JAX function for xla tensors, a stand-in for fake ones."""

    def outer(x: Tensor, y: Tensor) -> Tensor:
        return xla_builder.call_jax(jnp.outer, (x, y))

    xla_model.XLA_LIB.define("outer_of_a_script(Tensor x, Tensor y) -> Tensor")
    xla_model.XLA_LIB.impl("outer_of_a_script", outer, "XLA")
    xla_model.XLA_LIB.impl("outer_of_a_script", lambda x, y: x.new_empty(len(x), len(y)), "CompositeExplicitAutograd")
    x = torch.arange(2.0, device="xla") + 1
    assert torch.ops.xla.outer_of_a_script(x, x).tolist() == [[1, 2], [2, 4]]
    assert torch.compile(lambda t: torch.ops.xla.outer_of_a_script(t, t) * 2, backend="openxla")(x).tolist() == [[2, 4], [4, 8]]
    assert custom_kernel.XLA_LIB is xla_model.XLA_LIB


def test_a_kernel_that_is_registered_after_a_first_call_on_the_cpu() -> None:
    _define("late(Tensor x) -> Tensor", CPU=lambda x: x * 3)
    x = torch.ones(2, device="xla")
    with pytest.warns(UserWarning, match="no JAX lowering"):
        assert ops.late(x).tolist() == [3, 3]
    _library.impl("late", lambda x: x * 4, "XLA")
    assert ops.late(x).tolist() == [4, 4]


def test_errors_of_a_kernel_are_its_own() -> None:
    def fails(x: Tensor) -> Tensor:
        raise ValueError("a script's own")

    _define("fails(Tensor x) -> Tensor", XLA=fails)
    with pytest.raises(ValueError, match="a script's own"):
        ops.fails(torch.ones(2, device="xla"))


def test_an_op_without_a_kernel_for_xla_or_the_cpu_says_how_to_give_it_one() -> None:
    _define("elsewhere(Tensor x) -> Tensor", CUDA=lambda x: x)
    with pytest.raises(UnsupportedOpError) as caught:
        ops.elsewhere(torch.ones(2, device="xla"))
    for fragment in (
        "nxd_jax_kernels.elsewhere.default has no kernel that takes xla tensors, and none for the CPU",
        "test_script_kernels.py:",
        'torch.library.impl("nxd_jax_kernels::elsewhere", "XLA", function)',
        "@torch_bridge.lowerings.lowering(torch.ops.nxd_jax_kernels.elsewhere.default)",
    ):
        assert fragment in str(caught.value)
