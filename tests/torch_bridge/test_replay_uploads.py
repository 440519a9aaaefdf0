"""`torch_bridge.optimize` and modules that take values from the host in their forward or backward: constants of what is played, where they are the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torch_bridge
from tests.torch_bridge.replaying import STEPS, Ruled, Step, batch, compile_fast, descend, parity, player  # noqa: F401
from torch_bridge import metrics
from torch_bridge.replay import host_constants
from torch_bridge.runtime import executor

TABLE: list[float] = []
HOST: dict[str, Any] = {}


class Small(Ruled):
    """With attributes that `.to` leaves where they are."""

    def __init__(self, rule: Callable[..., Any], **attributes: Any):
        super().__init__(rule)
        self.__dict__.update(attributes)


def _step(m: nn.Module, k: int) -> Any:
    x = batch(k).requires_grad_()
    out = m(x * 1)
    m.zero_grad()
    sum((o.float() if o.is_floating_point() else o.detach().float()).square().sum() for o in _tensors(out)).backward()
    descend(m)
    return [[o.detach().cpu() for o in _tensors(out)], x.grad]


def _backward_later(later: bool) -> Step:
    """Steps whose backward pass comes in the step of its forward pass, or after it."""

    def step(m: nn.Module, k: int) -> Any:
        x = batch(k).requires_grad_()
        loss = sum(o.square().sum() for o in _tensors(m(x * 1)))
        if later:
            executor.sync()
        m.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        descend(m)
        return [loss, x.grad]

    return step


def _tensors(out: Any) -> list[torch.Tensor]:
    return [o for o in out if o.device.type == "xla"] if isinstance(out, tuple) else [out]


class Scaled(torch.autograd.Function):
    """Scales gradients by numbers that its backward pass makes on the host."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        return y * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.arange(6.0).to(grad.device)


class Constant(torch.autograd.Function):
    """Its gradient is nothing but numbers from the host."""

    @staticmethod
    def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
        return w * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.arange(6.0).to(grad.device)


def _host_mask(x: torch.Tensor) -> torch.Tensor:
    mask = torch.full((6, 6), float("-inf")).triu(1)
    mask[0, 0] = 0.5
    return mask.to(x.device)


def _written_after(m: Any, x: Any, y: Any) -> Any:
    c = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], device=x.device)
    before = y + c
    c.mul_(2).add_(1)
    return before * c, c


def _a_row(m: Any, x: Any, y: Any) -> Any:
    z = torch.zeros(4, 6, device=x.device)
    z[1] = torch.arange(6.0)
    z[2, 3:] = torch.tensor([7.0, 8.0, 9.0])
    return y * z


def _views(m: Any, x: Any, y: Any) -> Any:
    c = torch.arange(12.0).reshape(2, 6).to(x.device)
    return y * c[0] * c[1, None] + (y * c.t()[:, :1].t()).exp() * 1e-3


RULES: dict[str, Callable[..., Any]] = {
    "a list": lambda m, x, y: y * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], device=x.device),
    "a number": lambda m, x, y: y * torch.tensor(0.5, device=x.device) + torch.tensor(2.0).to(x.device),
    "a number on the CPU beside xla tensors": lambda m, x, y: y * torch.tensor(0.5) + torch.tensor(2.0, dtype=torch.float64),
    "an index on the CPU": lambda m, x, y: y[torch.tensor([0, 2])] * y[:, torch.tensor([1, 5, 5])].sum(),
    "integers": lambda m, x, y: y.gather(1, torch.tensor([[0, 1], [2, 3], [4, 5], [1, 1]]).to(x.device)),
    "booleans": lambda m, x, y: y.masked_fill(torch.tensor([True, False] * 3, device=x.device), 0.25),
    "bfloat16": lambda m, x, y: y.bfloat16() * torch.tensor([1.5] * 6, dtype=torch.bfloat16).to(x.device),
    "complex numbers": lambda m, x, y: (y * torch.tensor([1j, 2, 3, 4, 5, 6 - 1j]).to(x.device)).abs(),
    "float64": lambda m, x, y: y.double() * torch.linspace(0, 1, 6, dtype=torch.float64).to(x.device),
    "a mask from the CPU": lambda m, x, y: (y @ y.t() @ y @ y.t() @ x + _host_mask(x)[:4]).softmax(-1),
    "not contiguous": lambda m, x, y: y[:3] @ torch.arange(18.0).reshape(3, 6).t().to(x.device),
    "expanded": lambda m, x, y: y * torch.tensor([2.0]).expand(6).to(x.device),
    "numpy": lambda m, x, y: y * torch.from_numpy(np.linspace(0, 1, 6, dtype=np.float32)).to(x.device),
    "from attributes": lambda m, x, y: y * torch.tensor([len(m._parameters), m.layer.in_features, 1, 2, 3, 4], device=x.device),
    "rows of another tensor": _a_row,
    "views": _views,
    "written to after it was read": _written_after,
    "the same values twice": lambda m, x, y: y * torch.ones(6).to(x.device) + torch.ones(6).to(x.device) * 2,
    "returned": lambda m, x, y: (y, torch.tensor([1, 2, 3], device=x.device)),
    "returned, and views of it": lambda m, x, y: (y, c := torch.arange(6.0).to(x.device), c[2:4].detach() * 2),
    "used and returned": lambda m, x, y: (y * (c := torch.arange(6.0).to(x.device)), c),
    "in the backward pass": lambda m, x, y: Scaled.apply(y),
    "a whole gradient": lambda m, x, y: y * Constant.apply(m.layer.bias),
    "without elements too": lambda m, x, y: torch.cat(
        [y * torch.arange(6.0).to(x.device), torch.tensor([], device=x.device).reshape(0, 6)]
    ),
}


@pytest.mark.thorough(keep=8)
@pytest.mark.parametrize("name", RULES)
def test_the_same_values_in_every_call(name: str) -> None:
    parity(lambda: Small(RULES[name]), _step)


@pytest.mark.parametrize("name", ["a list", "views", "written to after it was read", "in the backward pass", "used and returned"])
def test_a_backward_pass_after_the_step(name: str) -> None:
    """What the backward pass reads of the host's values outlives the program of the forward pass."""
    parity(lambda: Small(RULES[name]), _backward_later(True), steps=STEPS + 2)


def test_without_gradients() -> None:
    def step(m: nn.Module, k: int) -> Any:
        with torch.no_grad():
            return list(m.eval()(batch(k)))

    parity(lambda: Small(RULES["returned, and views of it"]), step)


def test_gradients_of_gradients() -> None:
    def step(m: nn.Module, k: int) -> Any:
        x = batch(k).requires_grad_()
        (g,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
        m.zero_grad()
        g.square().sum().backward()
        descend(m)
        return [g, x.grad]

    parity(lambda: Small(RULES["views"]), step)


def test_what_is_returned_is_the_scripts_own() -> None:
    """Each call gives tensors of its own: whoever writes to one changes no later result, on the device or on the host."""

    def rule(m: Any, x: Any, y: Any) -> Any:
        return y, torch.tensor([1.0, 2.0], device=x.device), torch.tensor([3, 4])

    def step(m: nn.Module, k: int) -> Any:
        y, a, b = m(batch(k))
        seen = [y.detach(), a.clone(), b.clone()]
        y.sum().backward()
        a.mul_(k)
        b.add_(k)
        executor.sync()
        return [*seen, a, b]

    parity(lambda: Small(rule), step)


def test_one_program_for_every_step() -> None:
    """Neither values from the host nor what is played on them needs another program, and no program overwrites the constants."""
    torch.manual_seed(0)
    m = torch_bridge.optimize(Small(RULES["used and returned"]).to("xla"))
    for k in range(8):
        if k == 3:
            metrics.clear_counters()
        out = _step(m, k)
        executor.sync()
        assert torch.equal(out[0][1], torch.arange(6.0))
    assert player(m).played >= 4
    assert metrics.COUNTERS.get("UncachedCompile", 0) == 0


def _of_table(m: Any, x: Any, y: Any) -> Any:
    return y * torch.tensor(TABLE, device=x.device)


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, int], None]]] = {
    "a list attribute": (
        lambda: Small(lambda m, x, y: y * torch.tensor(m.scales).to(x.device), scales=[1.0] * 6),
        lambda m, k: m.scales.__setitem__(2, float(k)),
    ),
    "an array attribute": (
        lambda: Small(lambda m, x, y: y * torch.from_numpy(m.scales).to(x.device), scales=np.ones(6, dtype=np.float32)),
        lambda m, k: m.scales.__setitem__(2, float(k)),
    ),
    "a CPU tensor attribute": (
        lambda: Small(lambda m, x, y: y * m.scales.to(x.device), scales=torch.ones(6)),
        lambda m, k: m.scales.__setitem__(2, float(k)),
    ),
    "a CPU tensor in a dict": (
        lambda: Small(lambda m, x, y: y * m.held["scales"].to(x.device), held={"scales": torch.ones(6)}),
        lambda m, k: m.held["scales"].mul_(1.5),
    ),
    "a global list": (lambda: Small(_of_table), lambda m, k: TABLE.__setitem__(3, float(k))),
    "a global CPU tensor": (
        lambda: Small(lambda m, x, y: y * HOST["scales"].to(x.device)),
        lambda m, k: HOST.update(scales=HOST["scales"] * 1.5),
    ),
    "a global CPU tensor in place": (lambda: Small(lambda m, x, y: y * HOST["scales"].to(x.device)), lambda m, k: HOST["scales"].mul_(1.5)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_values_that_change_now_and_then(name: str) -> None:
    """Played while they stay, and right when they have changed."""
    make, change = CHANGES[name]

    def step(m: Any, k: int) -> Any:
        if k == 0:
            TABLE[:] = [1.0] * 6
            HOST["scales"] = torch.ones(6)
        if k in (5, 10):
            change(m, k)
        return _step(m, k)

    parity(make, step, steps=14)


def test_a_large_tensor_attribute_on_the_host() -> None:
    """Too much to compare before every call."""

    def step(m: Any, k: int) -> Any:
        if k == 4:
            m.scales.mul_(2)
        return _step(m, k)

    parity(
        lambda: Small(lambda m, x, y: y * m.scales[:6].to(x.device), scales=torch.ones(1 << 15)),
        step,
        played=False,
        off="it reads a CPU tensor of 131072 bytes",
    )


def test_values_that_are_others_in_every_call() -> None:
    begin = time.monotonic()
    module = parity(
        lambda: Small(lambda m, x, y: y + 0 * torch.tensor([time.monotonic() - begin] * 6, device=x.device)),
        _step,
        played=False,
        off="it calls time.monotonic",
    )
    assert "test_replay_uploads.py:" in player(module).off


def test_more_than_a_constant_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_constants, "MOST", 16)
    module = parity(lambda: Small(RULES["a list"]), _step, played=False, off="it uses a tensor of shape [6] that is neither an argument")
    assert "test_replay_uploads.py:" in player(module).off and "make it a buffer" in player(module).off


def test_noise_from_the_host_is_no_constant() -> None:
    parity(lambda: Small(lambda m, x, y: y + torch.randn(6).to(x.device)), _step, played=False, off="torch's CPU generator")


def test_values_read_from_the_device_are_no_constants() -> None:
    """A tensor that goes to the host and back depends on what it held."""
    rule = lambda m, x, y: y * x.detach().cpu().abs().to(x.device)  # noqa: E731
    parity(lambda: Small(rule), _step, played=False, off="it reads a tensor's value")


RETURNED: dict[str, Callable[..., Any]] = {
    "an argument": lambda m, x, y: (y, x),
    "only an argument": lambda m, x, y: x,
    "a parameter": lambda m, x, y: (y, m.layer.bias),
    "a buffer": lambda m, x, y: (y + m.mean, m.mean),
    "an argument twice": lambda m, x, y: (x, y, [x]),
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_was_given_comes_back_as_it_is(name: str) -> None:
    """The same object, through which gradients flow as without `optimize`."""

    def step(m: Any, k: int) -> Any:
        leaf = batch(k).requires_grad_()
        x = leaf * 1
        out = m(x)
        flat = [o for o in (out if isinstance(out, tuple) else (out,)) if isinstance(o, torch.Tensor)]
        assert any(o is x or o is m.layer.bias or o is m.mean for o in flat)
        m.zero_grad()
        sum(o.square().sum() for o in flat).backward()  # type: ignore[union-attr]
        descend(m)
        return [flat, leaf.grad]

    def make() -> nn.Module:
        module = Small(RETURNED[name])
        module.register_buffer("mean", torch.ones(6))
        return module

    parity(make, step)


def _two_layouts(m: Any, x: Any, y: Any) -> Any:
    y = y.reshape(1, 2, 2, 6) * 1
    z = y.clone(memory_format=torch.channels_last)
    return (y * z.exp()).sum() + (z.permute(0, 2, 3, 1).reshape(-1) * z.permute(0, 2, 3, 1).reshape(-1).sin()).sum()


COPIES: dict[str, Callable[..., Any]] = {
    "of an argument": lambda m, x, y: x.clone() * y,
    "of a parameter": lambda m, x, y: y * m.layer.bias.clone() * m.layer.bias,
    "of an argument, returned": lambda m, x, y: (y * x, x.clone()),
    "of a result": lambda m, x, y: y * (z := y.clone()) * z.exp() * 0.1,
    "of a result, and views of both": lambda m, x, y: y[:, 1:] * (z := y.clone())[:, :5] * z[1:, :1].exp().sum() * y[1:, :1].sin().sum(),
    "in another layout": _two_layouts,
    "written to": lambda m, x, y: y * x.clone().mul_(2) * x,
}


@pytest.mark.thorough(keep=8)
@pytest.mark.parametrize("later", [False, True], ids=["in the step", "after it"])
@pytest.mark.parametrize("name", COPIES)
def test_copies_that_the_backward_pass_reads(name: str, later: bool) -> None:
    parity(lambda: Small(COPIES[name]), _backward_later(later), steps=STEPS + 2)


def test_an_argument_may_change_when_only_its_copy_is_read() -> None:
    """As without `optimize`: the backward pass reads what the copy held."""

    def step(m: nn.Module, k: int) -> Any:
        x = batch(k)
        loss = m(x).square().sum()
        x.zero_()
        m.zero_grad()
        loss.backward()
        descend(m)
        return loss

    class Copying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.clone() * self.scale

    parity(Copying, step)


def test_what_results_depend_on_where_they_are_copies() -> None:
    """A tape knows which of the given storages matter: for a returned copy of one that it overwrites, its contents before."""

    class Swapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.register_buffer("last", torch.zeros(4, 6))

        def forward(self, x: torch.Tensor) -> Any:
            before = self.last.clone()
            y = self.layer(x)
            self.last.copy_(y.detach() + self.last)
            return before, y * before, torch.arange(3).to(x.device)

    def step(m: nn.Module, k: int) -> Any:
        x = batch(k).requires_grad_()
        before, y, three = m(x)
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=k % 2 == 1)  # every other one has to compute the pass again
        return [before, y, three, g, m.last]

    module = parity(Swapping, step, steps=10)
    (kind, *_) = [k for kinds in player(module)._kinds.values() for k in kinds if k.forwards]
    given = player(module)._holding().places
    assert kind.forwards[0].overwritten == [given[id(module.last._storage)]]  # type: ignore[union-attr]
