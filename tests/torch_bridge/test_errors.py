"""What a beginner's mistakes say, and that the process stays usable after each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest
import torch
from torch import nn

import torch_bridge
from tests.torch_bridge.devices import python
from torch_bridge import metrics
from torch_bridge.compiler import program
from torch_bridge.errors import DeadTensorError, UnsupportedOpError, XlaOutOfMemoryError
from torch_bridge.runtime import executor

torch_bridge.register()


@pytest.fixture(autouse=True)
def _still_usable() -> Iterator[None]:
    """Every test here ends with a process that trains."""
    executor.sync()
    older = torch.arange(3.0, device="xla")
    yield
    assert older.tolist() == [0, 1, 2]
    x = torch.ones(3, device="xla", requires_grad=True)
    (x * 2).square().sum().backward()
    assert x.grad.tolist() == [8, 8, 8]


# -- mixing devices --------------------------------------------------------------------------------

MIXED = {
    "add": lambda x, c: x + c,
    "add reversed": lambda x, c: c + x,
    "matmul": lambda x, c: x @ c,
    "in place": lambda x, c: x.add_(c),
    "cat": lambda x, c: torch.cat([x, c]),
    "linear": lambda x, c: nn.functional.linear(x, c),
    "where": lambda x, c: torch.where(x > 0, x, c),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixing_cpu_and_xla_tensors(name: str) -> None:
    x, on_cpu = torch.ones(2, 2, device="xla"), torch.ones(2, 2)
    with pytest.raises(RuntimeError, match=r"xla:0 and cpu!.*shape \[2, 2\].*\.to\('xla'\).*test_errors\.py:\d+"):
        MIXED[name](x, on_cpu)
    assert x.tolist() == [[1, 1], [1, 1]]


def test_a_model_on_xla_given_a_batch_on_the_cpu() -> None:
    with pytest.raises(RuntimeError, match=r"shape \[1, 2\] is on cpu: move it with \.to\('xla'\)"):
        nn.Linear(2, 2).to("xla")(torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="same device"):
        nn.functional.cross_entropy(torch.ones(2, 3, device="xla"), torch.tensor([0, 1]))


def test_bad_shapes_raise_torchs_own_errors_at_the_call() -> None:
    with pytest.raises(RuntimeError, match="broadcast"):
        torch.ones(3, device="xla") + torch.ones(4, device="xla")
    with pytest.raises(RuntimeError, match="reduction dim|mat1 and mat2"):
        torch.ones(2, 3, device="xla") @ torch.ones(2, 3, device="xla")
    with pytest.raises(IndexError):
        torch.ones(2, device="xla")[5]


# -- ops without a lowering ------------------------------------------------------------------------

_library = torch.library.Library("nxd_jax_test", "DEF")
_library.define("twice(Tensor x) -> Tensor")
_library.define("twice_(Tensor(a!) x) -> Tensor(a!)")
_library.impl("twice", lambda x: x * 2, "CPU")
_library.impl("twice_", lambda x: x.mul_(2), "CPU")


def test_an_op_without_lowering_runs_on_the_cpu_with_one_warning_and_a_counter() -> None:
    metrics.clear_counters()
    x = torch.arange(3.0, device="xla") + 1
    with pytest.warns(UserWarning, match="no JAX lowering") as caught:
        y = torch.ops.nxd_jax_test.twice(x)
    text = str(caught[0].message)
    for fragment in (
        "nxd_jax_test.twice.default",
        "runs on the CPU",
        "torch.float32[3]",
        "test_errors.py:",
        "torch_xla.debug.metrics",
        "@torch_bridge.lowerings.lowering(torch.ops.nxd_jax_test.twice.default)",
    ):
        assert fragment in text
    assert y.device.type == "xla"
    assert y.tolist() == [2, 4, 6]
    assert torch.ops.nxd_jax_test.twice(y).tolist() == [4, 8, 12]
    counters = {k: v for k, v in metrics.COUNTERS.items() if k.startswith("aten::")}
    assert counters == {"aten::nxd_jax_test::twice": 2}


def test_a_fallback_writes_its_mutations_back() -> None:
    base = torch.arange(4.0, device="xla")
    with pytest.warns(UserWarning, match="twice_"):
        torch.ops.nxd_jax_test.twice_(base[1:3])
    assert base.tolist() == [0, 2, 4, 3]


class Unsupported(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.nxd_jax_test.twice(x + 1)


def test_an_op_without_lowering_cannot_be_captured() -> None:
    with pytest.raises(UnsupportedOpError, match=r"nxd_jax_test\.twice.*capture.*test_errors\.py:\d+.*lowerings\.lowering"):
        torch_bridge.capture(Unsupported(), torch.ones(2))


# -- values for the host ---------------------------------------------------------------------------


def test_numpy() -> None:
    x = torch.ones(2, device="xla")
    for convert in (lambda: x.numpy(), lambda: x.__array__()):
        with pytest.raises(TypeError, match=r"xla:0 tensor to numpy.*tensor\.cpu\(\)\.numpy\(\)"):
            convert()
    with pytest.raises(TypeError, match=r"\.cpu\(\)\.numpy\(\)"):
        import numpy

        numpy.asarray(x)


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x * 2
        return x


class Keeps(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = x * 2
        return x


@pytest.mark.parametrize(
    ("look", "device"),
    [
        (lambda x: x.item(), "cpu"),
        (lambda x: x.cpu(), "xla"),
        (lambda x: x.cpu().item(), "cpu"),  # .cpu() moves nothing there
        (lambda x: x.numpy(), "cpu"),
        (lambda x: repr(x), "cpu"),
        (lambda x: float(x), "cpu"),
        (lambda x: x.tolist(), "cpu"),
    ],
)
def test_looking_at_values_in_a_captured_module(look: Any, device: str) -> None:
    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            look(x.sum())
            return x

    with pytest.raises(RuntimeError, match=r"torch_bridge\.capture.*torch\.where"):
        torch_bridge.capture(Looks(), torch.ones(2, device=device))


def test_branching_on_values_in_a_captured_module() -> None:
    with pytest.raises(RuntimeError, match=r"a Python branch on.*torch\.where"):
        torch_bridge.capture(Branches(), torch.ones(2))


def test_a_tensor_that_outlives_its_capture_has_no_value() -> None:
    module = Keeps()
    torch_bridge.capture(module, torch.ones(2))
    with pytest.raises(RuntimeError, match="attributes or in globals"):
        module.kept.tolist()
    with pytest.raises(RuntimeError, match="attributes or in globals"):
        module.kept + 1


# -- out of memory ---------------------------------------------------------------------------------


def exhausted(self: Any, args: Any) -> Any:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123456 bytes.\nmore")


@pytest.mark.parametrize("where", ["run", "compile"])
def test_out_of_memory(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3).to("xla")
    momentum = torch.zeros(3, device="xla")
    torch.xla.synchronize()
    before = model.weight.detach().cpu()
    with monkeypatch.context() as patch:
        patch.setattr(program.Program, where, exhausted)
        with torch.no_grad():
            model.weight.mul_(2 + (where == "run"))
            momentum[1:].add_(1)
        lost = model.weight.detach() + 1
        with pytest.raises(
            XlaOutOfMemoryError, match=r"ran out of memory.*123456 bytes.*smaller batch.*checkpoint.*torch_xla\.sync\(\)"
        ) as caught:
            lost.sum().item()
        assert isinstance(caught.value, torch.OutOfMemoryError)
        assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
    assert torch.equal(model.weight.cpu(), before)
    assert momentum.tolist() == [0, 0, 0]
    with pytest.raises(DeadTensorError, match=r"never computed.*RESOURCE_EXHAUSTED.*last value"):
        lost.tolist()
    with pytest.raises(DeadTensorError):
        lost * 2
    with torch.no_grad():
        model.weight.mul_(2 + (where == "run"))
    assert torch.equal(model.weight.cpu(), before * (2 + (where == "run")))


def test_really_out_of_memory() -> None:
    code = """
import torch, torch_bridge
kept = torch.arange(3.0, device="xla") + 1
torch.xla.synchronize()
try:
    huge = torch.arange(1 << 45, device="xla") * 2
    torch.xla.synchronize()
except torch.OutOfMemoryError as error:
    print(type(error).__name__, "smaller batch" in str(error))
print((kept * 2).tolist())
"""
    assert python(code) == "XlaOutOfMemoryError True\n[2.0, 4.0, 6.0]\n"


# -- errors inside a backward pass -----------------------------------------------------------------


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad @ torch.ones(7, 7, device="xla")


def _raise(grad: torch.Tensor) -> None:
    raise ValueError("from a hook")


@pytest.mark.parametrize("loss_on", ["xla", "cpu"])
def test_errors_in_a_backward_pass_reach_the_script(loss_on: str) -> None:
    """torch's engine would end the process while it unwinds from an exception of a Python backend."""
    x = torch.ones(2, device="xla", requires_grad=True)
    with pytest.raises(RuntimeError, match="size mismatch|same reduction dim|must match"):
        BadBackward.apply(x).sum().to(loss_on).backward()
    y = x * 2
    y.register_hook(_raise)
    with pytest.raises(ValueError, match="from a hook"):
        y.sum().to(loss_on).backward()
    x.register_hook(_raise)
    with pytest.raises(ValueError, match="from a hook"):
        torch.autograd.grad((x * 3).sum().to(loss_on), x)
    z = x * 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        w = z.exp()
        w.add_(1)
        w.sum().to(loss_on).backward()


class _Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(9, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def test_shapes_that_do_not_fit_in_a_module() -> None:
    """torch's words, then the module, the user's line and the shapes; and of our frames one."""
    model = torch.nn.Sequential(torch.nn.Identity(), _Inner()).to("xla")
    with pytest.raises(RuntimeError) as found:
        model(torch.ones(2, 4, device="xla"))
    first, second = str(found.value).splitlines()
    assert first == "a and b must have same reduction dim, but got [2, 8] X [9, 4]."
    line = _Inner.forward.__code__.co_firstlineno + 1
    assert second == (
        f"  in 1.down (Linear), called at {__file__}:{line} in forward: aten.addmm.default(float32[4], float32[2, 8], float32[9, 4])"
    )
    frames = [entry.path.name for entry in found.traceback]
    assert frames[-2:] == ["functional.py", "tensor.py"] or frames[-2:] == ["linear.py", "tensor.py"]
    assert found.value.__suppress_context__


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        (lambda a, b: a + b, r"aten\.add\.Tensor\(float32\[3, 4\], float32\[3, 5\]\)$"),
        (lambda a, b: a.add_(b), r"aten\.add_\.Tensor\(float32\[3, 4\], float32\[3, 5\]\)$"),
        (lambda a, b: torch.cat([a, b]), r"aten\.cat\.default\(\[float32\[3, 4\], float32\[3, 5\]\]\)$"),
        (
            lambda a, b: a.view(5, 5),
            r"shape '\[5, 5\]' is invalid for input of size 12\n  called at .*aten\.view\.default\(float32\[3, 4\], \[5, 5\]\)$",
        ),
        (lambda a, b: torch.cat([a] * 9 + [b]), r"float32\[3, 4\], \.\.\.\]\)$"),
    ],
    ids=["add", "add_", "cat", "view", "many"],
)
def test_shapes_that_do_not_fit(what: Any, shown: str) -> None:
    a, b = torch.ones(3, 4, device="xla"), torch.ones(3, 5, device="xla")
    with pytest.raises(RuntimeError, match=shown):
        what(a, b)
    assert (a + 1).sum().item() == 24


def test_shapes_that_do_not_fit_in_a_backward_pass() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad @ torch.ones(7, 7, device="xla")

    x = torch.ones(3, 4, device="xla", requires_grad=True)
    with pytest.raises(RuntimeError, match=r"got \[3, 4\] X \[7, 7\]\.\n  called at .*test_errors.py:\d+ in backward: aten\.mm\.default"):
        Wrong.apply(x).sum().backward()
