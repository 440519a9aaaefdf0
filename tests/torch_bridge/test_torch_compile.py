"""`torch.compile` on xla: `backend="openxla"` plays modules, other backends leave xla tensors to the recorder."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torch_bridge
from tests.torch_bridge.devices import python
from tests.torch_bridge.replaying import Ruled, batch, bits, compile_fast, player, run, trained  # noqa: F401
from torch_bridge.replay.player import Player
from torch_bridge.runtime import executor

torch_bridge.register()


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What torch's tracer compiled is forgotten after each test."""
    yield
    torch._dynamo.reset()


def _played(module: nn.Module) -> bool:
    found = module.forward
    return isinstance(found, Player) and found.played > 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 6))

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return self.layers(x) * scale


def test_a_compiled_module_is_played() -> None:
    """Training gives the bits of the module that is not compiled; torch's wrapper is around it, names and all."""
    torch.manual_seed(0)
    plain = Net().to("xla")
    inner = copy.deepcopy(plain)
    compiled: Any = torch.compile(inner, backend="openxla")
    assert type(compiled).__name__ == "OptimizedModule" and compiled._orig_mod is inner
    assert next(iter(compiled.state_dict())) == "_orig_mod.layers.0.weight"
    expected, found = run(plain, trained(), 6), run(compiled, trained(), 6)
    assert [seen for seen, _ in expected] == [seen for seen, _ in found] and _played(inner)
    assert [rest for _, _, rest in expected[-1][1]] == [rest for _, _, rest in found[-1][1]]
    compiled.eval()
    assert not inner.training
    with torch.no_grad():
        assert bits(compiled(batch(0), scale=3.0)) == bits(plain.eval()(batch(0), scale=3.0))


@pytest.mark.switched_on("NXD_JAX_REPLAY")
def test_in_place_and_disabled() -> None:
    """`module.compile(backend="openxla")` plays the module itself; `disable=True` gives it back as it is."""
    module = Net().to("xla")
    assert torch.compile(module, backend="openxla", disable=True)(batch(0)).shape == (4, 6) and not player(module).asked
    module.compile(backend="openxla")
    run(module, trained(), 5)
    assert _played(module)
    assert copy.deepcopy(module)(batch(0)).shape == (4, 6)


NAMED = Net()


def _by_argument(model: nn.Module) -> Callable[[int], torch.Tensor]:
    def step(model: nn.Module, k: int) -> torch.Tensor:
        return model(batch(k)).sum()

    return functools.partial(torch.compile(backend="openxla", fullgraph=True)(step), model)


def _by_closure(model: nn.Module) -> Callable[[int], torch.Tensor]:
    @torch.compile(backend="openxla", dynamic=False)
    @torch.enable_grad()
    def step(k: int) -> torch.Tensor:
        return model(batch(k)).sum()

    return step


def _by_global(model: nn.Module) -> Callable[[int], torch.Tensor]:
    global NAMED
    NAMED = model  # type: ignore[assignment]

    @torch.compile(backend="openxla")
    def step(k: int) -> torch.Tensor:
        return NAMED(batch(k)).sum()

    return step


class _Trainer:
    def __init__(self, model: nn.Module):
        self.model = model

    def step(self, k: int) -> torch.Tensor:
        return self.model(batch(k)).sum()


def _by_owner(model: nn.Module) -> Callable[[int], torch.Tensor]:
    return torch.compile(_Trainer(model).step, backend="openxla")


def _by_partial(model: nn.Module) -> Callable[[int], torch.Tensor]:
    def step(k: int, model: nn.Module) -> torch.Tensor:
        return model(batch(k)).sum()

    return torch.compile(functools.partial(step, model=model), backend="openxla")


@pytest.mark.parametrize("make", [_by_argument, _by_closure, _by_global, _by_owner, _by_partial])
def test_a_compiled_function_plays_the_modules_it_finds(make: Callable[[nn.Module], Callable[[int], torch.Tensor]]) -> None:
    torch.manual_seed(0)
    plain = Net().to("xla")
    module = copy.deepcopy(plain)
    step = make(module)

    def seen(loss: torch.Tensor, of: nn.Module) -> Any:
        loss.backward()
        gradients = [bits(p.grad) for p in of.parameters() if p.grad is not None]
        of.zero_grad()
        executor.sync()
        return bits(loss), gradients

    torch.manual_seed(1)
    found = [seen(step(k), module) for k in range(5)]
    torch.manual_seed(1)
    assert found == [seen(plain(batch(k)).sum(), plain) for k in range(5)] and _played(module)


def test_a_compiled_method_keeps_being_one() -> None:
    class Rules:
        @torch.compile(backend="openxla")
        def double(self, x: torch.Tensor) -> torch.Tensor:
            """Two of it."""
            return x * 2

    assert isinstance(Rules().double, types.MethodType) and Rules.double.__doc__ == "Two of it."
    assert bits(Rules().double(batch(1))) == bits(batch(1) * 2)


def test_a_module_on_the_cpu_stays_as_it_is() -> None:
    """A function's modules on the CPU are not touched; a compiled module there runs eagerly, and is played once it is moved."""
    module = Net()
    torch.compile(lambda: module(torch.randn(2, 6)), backend="openxla")()
    assert not isinstance(module.forward, Player)
    compiled = torch.compile(module, backend="openxla")
    assert compiled(torch.randn(2, 6)).device.type == "cpu"
    module.to("xla")
    run(compiled, trained(), 5)
    assert _played(module)


def test_what_cannot_be_compiled() -> None:
    with pytest.raises(TypeError, match=r'torch.compile\(backend="openxla"\) takes a module or a function, got int'):
        torch.compile(3, backend="openxla")  # type: ignore[call-overload]
    with pytest.raises(Exception, match="nosuch"):
        torch.compile(Net(), backend="nosuch")(torch.randn(2, 6))


@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")  # Python 3.13.0
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_other_backends_leave_xla_tensors_to_the_recorder(backend: str) -> None:
    """The step is the one that nobody compiled, `mark_step` in the middle of it too; tensors on the CPU are traced as always."""
    torch.manual_seed(0)
    plain = Ruled(lambda _, x, y: torch.nn.functional.gelu(x + y)).to("xla")
    module = copy.deepcopy(plain)
    batches = [batch(k) for k in range(3)]

    def step(module: nn.Module, k: int) -> Any:
        loss = module(batches[k]).square().sum()
        loss.backward()
        executor.sync()
        assert loss.item() > 0
        return loss

    graphs = []

    def traced(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    assert run(module, torch.compile(step, backend=backend), 3) == run(plain, step, 3)
    torch.compile(lambda x: x + 1, backend=traced)(torch.ones(2))
    assert len(graphs) == 1
    moved = torch.compile(Net().to, backend=backend)("xla")
    assert next(moved.parameters()).device.type == "xla"


def test_a_played_module_inside_what_another_backend_traces() -> None:
    module = torch_bridge.optimize(Net().eval().to("xla"))
    step = torch.compile(lambda x: module(x) + 1, backend="eager")
    with torch.no_grad():
        for k in range(5):
            assert bits(step(batch(k))) == bits(player(module).plain(batch(k)) + 1)
    assert _played(module)


def test_tracing_cpu_code_starts_no_jax() -> None:
    """And a module that was compiled before it came to xla works."""
    python(
        "import sys, torch, torch_xla\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "assert torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2)).tolist() == [2, 2]\n"
        "model = torch.compile(torch.nn.Linear(2, 2), backend='eager')\n"
        "assert 'jax' not in sys.modules\n"
        "x = torch.ones(1, 2)\n"
        "expected = model(x)\n"
        "assert torch.allclose(model.to('xla')(x.to('xla')).cpu(), expected, rtol=1e-5)\n",
        timeout=200.0,
    )
