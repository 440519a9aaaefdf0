"""Kernels of torch inside of compiled programs: what they are called with, which programs call them, and that numbers and errors come through."""

from __future__ import annotations

import copy
import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_xla.core.xla_model as xm
from torch import nn
from torch._subclasses import FakeTensorMode

import torch_bridge
from tests import quick
from torch_bridge.config.settings import SETTINGS
from torch_bridge.lowerings import torch_kernels
from torch_bridge.lowerings.torch_kernels import registry
from torch_bridge.mesh import world
from torch_bridge.runtime.session import STATE

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="kernels of torch compute on the CPU")


@pytest.fixture
def kernels() -> Any:
    """Two kernels for the test."""
    seen: list[Any] = []

    @torch_kernels.kernel("times")
    def times(arguments: list[torch.Tensor], results: list[torch.Tensor], by: float) -> None:
        seen.append(arguments)
        for x, out in zip(arguments, results, strict=True):
            out.copy_(torch.mul(x, by))

    @torch_kernels.kernel("fails")
    def fails(arguments: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        raise ValueError("this kernel does not compute")

    yield seen
    for name in ("times", "fails"):
        del registry._KERNELS[name]


def like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def doubled(*arrays: Any) -> Any:
    return torch_kernels.call("times", [like(x) for x in arrays], *arrays, by=2.0)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int32", "int64", "uint8", "complex64"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 3), (2, 3, 4)], ids=str)
def test_arguments_and_results_are_tensors(kernels: Any, shape: tuple[int, ...], dtype: str) -> None:
    with torch_kernels.using(True), jax.enable_x64(True):
        x = jnp.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
        one, other = jax.jit(doubled)(x, x + 1)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(x * 2))
        np.testing.assert_array_equal(np.asarray(other), np.asarray((x + 1) * 2))
    for arguments in kernels:  # XLA leaves out what has no elements
        assert [(str(a.dtype), tuple(a.shape)) for a in arguments] == [(f"torch.{dtype}", shape)] * 2
    assert len(kernels) == (0 not in shape)


def test_errors_come_through(kernels: Any) -> None:
    run = jax.jit(lambda x: torch_kernels.call("fails", [like(x)], x)[0])
    with torch_kernels.using(True), pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: this kernel does not compute"):
        jax.block_until_ready(run(jnp.ones(3)))
    assert float(doubled_of_one()) == 2  # and the process goes on


def doubled_of_one() -> Any:
    with torch_kernels.using(True):
        return jax.jit(doubled)(jnp.ones(()))[0]


MODES: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "another default device": lambda run: _inside(torch.device("meta"), run),
    "fake tensors": lambda run: _inside(FakeTensorMode(), run),
    "autocast": lambda run: _inside(torch.autocast("cpu", torch.bfloat16), run),
    "inference": lambda run: _inside(torch.inference_mode(), run),
    "torch.func.vmap": lambda run: torch.func.vmap(lambda x: (run(), x)[1])(torch.ones(2)),
    "torch.func.grad": lambda run: torch.func.grad(lambda x: (run(), x)[1])(torch.ones(())),
}


def _inside(mode: Any, run: Callable[[], Any]) -> None:
    with mode:
        run()


@pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
def test_modes_of_the_calling_thread_do_not_count(mode: Callable[[Callable[[], Any]], Any]) -> None:
    product = torch.zeros(4, 4)

    @torch_kernels.kernel("product")
    def multiply(arguments: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        made = torch.empty(4, 4)
        torch.mm(*arguments, out=made)
        results[0].copy_(made)
        product.copy_(arguments[0] @ arguments[1])

    found: list[Any] = []
    try:
        with torch_kernels.using(True):
            made = jax.jit(lambda x, y: torch_kernels.call("product", [like(x)], x, y)[0])
            x = jnp.linspace(0, 1, 16, dtype=jnp.float32).reshape(4, 4)
            mode(lambda: found.append(np.asarray(made(x, x))))
    finally:
        del registry._KERNELS["product"]
    wanted = torch.linspace(0, 1, 16).reshape(4, 4)
    np.testing.assert_allclose(found[0], (wanted @ wanted).numpy(), rtol=1e-6)
    np.testing.assert_allclose(product.numpy(), (wanted @ wanted).numpy(), rtol=1e-6)
    assert not product.requires_grad


def test_a_batch_calls_for_each_row(kernels: Any) -> None:
    with torch_kernels.using(True):
        found = jax.jit(jax.vmap(lambda x: doubled(x)[0]))(jnp.ones((3, 2)))
    np.testing.assert_array_equal(np.asarray(found), 2 * np.ones((3, 2)))
    assert [tuple(arguments[0].shape) for arguments in kernels] == [(2,)] * 3


def test_names_are_taken_once(kernels: Any) -> None:
    with pytest.raises(ValueError, match="there is a kernel 'times' already"):
        torch_kernels.kernel("times")(lambda arguments, results: None)


def test_when_they_are_wanted() -> None:
    x, ends = jnp.ones(3), jnp.ones(3, jnp.int32)
    assert not torch_kernels.wanted(x)
    with torch_kernels.using(True):
        assert torch_kernels.wanted(x, ends)
        assert not torch_kernels.wanted(x.astype(jnp.bfloat16)) and not torch_kernels.wanted(x, x.astype(jnp.bfloat16))
        assert not torch_kernels.wanted(x.astype(jnp.complex64)) and not torch_kernels.wanted(ends)
        with torch_kernels.using(False):
            assert not torch_kernels.wanted(x)


def test_what_was_traced_without_is_traced_again() -> None:
    @jax.jit
    def run(x: Any) -> Any:
        return x * 2 if torch_kernels.wanted(x) else x

    assert float(run(jnp.ones(()))) == 1
    with torch_kernels.using(True):
        assert float(run(jnp.ones(()))) == 2
    assert float(run(jnp.ones(()))) == 1


# -- programs --------------------------------------------------------------------------------------


GEOMETRIES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6), (2, 6, 8, 8)),
    "two results for each channel": (lambda: nn.Conv2d(4, 8, 3, groups=4), (2, 4, 8, 7)),
    "large kernel": (lambda: nn.Conv2d(4, 4, 7, padding=3, groups=4), (2, 4, 9, 9)),
    "strided and dilated": (lambda: nn.Conv2d(6, 9, (3, 2), stride=(2, 1), padding=(2, 0), dilation=(1, 3), groups=3), (2, 6, 9, 8)),
    "one dim": (lambda: nn.Conv1d(8, 8, 5, padding=4, dilation=2, groups=4), (3, 8, 17)),
    "three dims": (lambda: nn.Conv3d(4, 6, 2, stride=2, groups=2), (1, 4, 5, 6, 7)),
    "transposed": (lambda: nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1, groups=2), (2, 6, 5, 6)),
    "transposed, one dim": (lambda: nn.ConvTranspose1d(4, 4, 4, stride=3, dilation=2, groups=4, bias=False), (2, 4, 6)),
    "channels last": (lambda: nn.Conv2d(6, 6, 3, groups=6).to(memory_format=torch.channels_last), (2, 6, 8, 8)),
}


@pytest.fixture(autouse=True)
def none_ran() -> None:
    if STATE.session is not None:
        STATE.session.recent.clear()


def texts() -> str:
    """The programs of this test, as they are lowered for XLA."""
    return "".join(program.lowered().as_text() for program in STATE.session.recent)


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Result and gradients, on the CPU."""
    x = x.requires_grad_()
    out = model(x)
    out.square().sum().backward()
    return [out.detach().cpu(), x.grad.cpu(), *(p.grad.cpu() for p in model.parameters())]


@pytest.mark.parametrize("make, shape", GEOMETRIES.values(), ids=list(GEOMETRIES))
def test_grouped_convolutions(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    wanted = step(model, x.clone())
    model.zero_grad()
    found = step(model.to("xla"), x.to("xla"))
    assert "torch_bridge_kernel" in texts()
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_gradients_that_are_not_wanted() -> None:
    torch.manual_seed(0)
    model, x = nn.Conv2d(4, 4, 3, groups=4), torch.randn(2, 4, 6, 6)
    wanted = torch.autograd.grad(model(x).square().sum(), model.weight)[0]
    model.to("xla")
    found = torch.autograd.grad(model(x.to("xla")).square().sum(), model.weight)[0]
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=1e-5)


def test_gradients_of_gradients() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 4, 6, 6), torch.randn(4, 1, 3, 3)

    def penalty(device: str) -> list[torch.Tensor]:
        a, b = (t.to(device).detach().requires_grad_() for t in (x, w))
        (slope,) = torch.autograd.grad(nn.functional.conv2d(a, b, groups=4).pow(3).sum(), a, create_graph=True)
        return [g.cpu() for g in torch.autograd.grad(slope.square().sum(), (a, b))]

    for a, b in zip(penalty("xla"), penalty("cpu"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def run_depthwise(dtype: torch.dtype = torch.float32) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(5, 5, 3, groups=5).to(dtype)
    x = torch.randn(2, 5, 7, 7, dtype=dtype)
    wanted = model(x)
    torch.testing.assert_close(copy.deepcopy(model).to("xla")(x.to("xla")).cpu(), wanted, rtol=2e-2, atol=2e-2)


def test_one_variable_turns_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SETTINGS, "torch_kernels", False)  # NXD_JAX_TORCH_KERNELS=0
    run_depthwise()
    assert "torch_bridge_kernel" not in texts()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_are_xlas(dtype: torch.dtype) -> None:
    run_depthwise(dtype)
    assert "torch_bridge_kernel" not in texts()


def test_other_precisions_are_xlas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_CC_FLAGS", "--auto-cast=matmult")
    run_depthwise()
    assert "torch_bridge_kernel" not in texts()


@pytest.mark.filterwarnings("ignore:JAX ran before to_jax")  # tests before this one may have run it
def test_exported_functions_are_xlas() -> None:
    model = nn.Conv2d(5, 5, 3, groups=5)
    function = torch_bridge.to_jax(model)
    lowered = jax.jit(function).lower(function.params, {}, None, jnp.ones((2, 5, 7, 7)))
    assert "stablehlo" in lowered.as_text() and "torch_bridge_kernel" not in lowered.as_text()


SCRIPT = """
    import threading
    import torch
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met
    from torch import nn

    def busy():
        while True:
            sum(range(1000))

    threading.Thread(target=busy, daemon=True).start()
    torch.manual_seed(0)
    model, x = nn.Conv2d(8, 8, 5, padding=2, groups=8), torch.randn(4, 8, 64, 64)
    model, x = model.to("xla"), x.to("xla")
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        xm.mark_step()
    print(f"{loss.item():.6f}", met.counter_value("PersistentCacheMiss"), met.counter_value("PersistentCacheHit"))
    model(x).square().mean().backward()
    xm.mark_step()
"""


def test_a_second_process_finds_the_program_and_ends_while_it_runs(tmp_path: pathlib.Path) -> None:
    """What was kept on disk calls the kernels of the process that loads it."""
    surroundings = {**os.environ, **quick.environment(), "NEURON_COMPILE_CACHE_URL": str(tmp_path), "NXD_JAX_EXECUTABLES": "1"}
    surroundings["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    told = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(SCRIPT)], env=surroundings, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0 and "terminate" not in done.stderr and "cannot be used" not in done.stderr, done.stderr
        told.append(done.stdout.split())
    (loss, missed, _), (again, missed_then, hit) = told
    assert again == loss and missed != "None" and missed_then in ("None", "0") and int(hit) > 0, told


def test_emulated_ranks_are_xlas() -> None:
    before = world.current()
    world.configure(world.World(2))
    try:
        run_depthwise()
    finally:
        world.configure(before)
    assert "torch_bridge_kernel" not in texts()


def test_programs_after_each_other() -> None:
    """None is read before the last, while the script goes on."""
    x = torch.randn(2, 4, 16, 16, device="xla")
    w = torch.randn(4, 1, 3, 3, device="xla")
    for _ in range(3):
        x = nn.functional.conv2d(x, w, padding=1, groups=4)
        xm.mark_step()
    assert sum(i for i in range(200_000)) and torch.isfinite(x).all()
