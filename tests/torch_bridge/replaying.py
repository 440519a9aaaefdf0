"""The same script with and without `torch_bridge.optimize`: everything it computes must be equal, bit for bit."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torch_bridge
from tests import quick
from torch_bridge.replay.player import Player
from torch_bridge.runtime import executor

torch_bridge.register()


@pytest.fixture(autouse=True, scope="module")
def compile_fast() -> Iterator[None]:
    """Both runs are compiled alike, and only their equality counts."""
    with quick.compiling():
        yield


class Ruled(nn.Module):
    """One layer, and a rule for its result: rule(module, x, y, *what else it is given)."""

    def __init__(self, rule: Callable[..., Any] | None = None):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        if rule is not None:
            self.rule = rule

    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        return self.rule(self, x, self.layer(x), *others)


STEPS = 6
Step = Callable[[nn.Module, int], Any]


def player(module: nn.Module) -> Player:
    """What `optimize` put in the place of a module's forward."""
    found = module.forward
    assert isinstance(found, Player)
    return found


def played_already(make: Callable[[], nn.Module], loss_of: Callable[[nn.Module, int], torch.Tensor]) -> nn.Module:
    """A module on the device that is played from now on: four steps have gone backward from a loss."""
    torch.manual_seed(0)
    module = torch_bridge.optimize(make().to("xla"))
    for k in range(4):
        loss_of(module, k).backward()
        module.zero_grad()
        executor.sync()
    assert player(module).played
    return module


def batch(k: int, *size: int) -> torch.Tensor:
    """Another tensor for every step k, on the device."""
    return torch.randn(*(size or (4, 6)), generator=torch.Generator().manual_seed(k)).to("xla")


def bits(x: Any) -> Any:
    """A tensor's bytes, or what is in a list."""
    if isinstance(x, torch.Tensor):
        return x.dtype, tuple(x.shape), x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [bits(y) for y in x] if isinstance(x, (list, tuple)) else x


def everything(module: nn.Module) -> list[Any]:
    """Parameters, buffers and gradients, by name."""
    held = [*module.named_parameters(), *module.named_buffers()]
    return [(name, bits(t), bits(t.grad) if t.grad is not None else None) for name, t in held]


def run(module: nn.Module, step: Step, steps: int) -> list[Any]:
    """What `step` returns and leaves behind, for every step."""
    torch.manual_seed(1)
    found = []
    for k in range(steps):
        seen = step(module, k)
        executor.sync()
        found.append((bits(seen), everything(module)))
    return found


def trained(forward: Callable[[nn.Module, int], Any] | None = None) -> Step:
    """A step that takes a loss from the model's result on a batch, goes backward, and moves parameters by hand."""

    def step(module: nn.Module, k: int) -> Any:
        out = module(batch(k)) if forward is None else forward(module, k)
        loss = out.square().mean()
        module.zero_grad()
        loss.backward()
        descend(module)
        return [out, loss]

    return step


def descend(module: nn.Module) -> None:
    """Plain gradient descent."""
    with torch.no_grad():
        for p in module.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)


def parity(
    make: Callable[[], nn.Module],
    step: Step | None = None,
    played: bool = True,
    off: str = "",
    steps: int = STEPS,
    part: Callable[[nn.Module], nn.Module] = lambda m: m,
    close: bool = False,
) -> nn.Module:
    """Run a script with and without `optimize` (of a part of the model) and compare. played: whether calls were played; off: part of the reason if it
    stopped; close: up to rounding instead of bit for bit.
    """
    torch.manual_seed(0)
    plain = torch_bridge.restore(make().to("xla"))
    optimized = copy.deepcopy(plain)
    torch_bridge.optimize(part(optimized))
    expected = run(plain, step or trained(), steps)
    with _Warnings() as warnings:
        found = run(optimized, step or trained(), steps)
    for k, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert a == b or (close and _near(a, b)), (
            f"step {k} differs; played {player(part(optimized)).played}, off: {player(part(optimized)).off!r}"
        )
    doing = player(part(optimized))
    assert off in doing.off and bool(off) == bool(doing.off), f"off: {doing.off!r}"
    assert (doing.played > 0) == played, f"played {doing.played}"
    assert bool(warnings.texts) == bool(off) and all(off in text for text in warnings.texts)
    return optimized


def _near(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.dtype):
        x, y = (torch.frombuffer(bytearray(t[2]), dtype=t[0]) for t in (a, b))
        return torch.allclose(x, y, rtol=1e-4, atol=1e-6)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_near, a, b))
    return bool(a == b)


class _Warnings(logging.Handler):
    """What `optimize` says of modules that are recorded op by op for good."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "torch_bridge.optimize" in record.getMessage() and "from now on" in record.getMessage():
            self.texts.append(record.getMessage())

    def __enter__(self) -> _Warnings:
        logging.getLogger("torch_bridge").addHandler(self)
        return self

    def __exit__(self, *error: Any) -> None:
        logging.getLogger("torch_bridge").removeHandler(self)
