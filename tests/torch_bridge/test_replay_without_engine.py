"""`torch_bridge.optimize`: backward passes of a loss that the module itself returns do without autograd's engine where it would do nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.torch_bridge.replaying import batch, compile_fast, descend, parity, played_already, player  # noqa: F401
from torch_bridge.recorder import autograd_engine
from torch_bridge.runtime import executor


class WithLoss(nn.Module):
    """Returns its loss and what it is the loss of."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.net(x)
        return y.square().mean(), y


Step = Callable[[nn.Module, int], Any]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each backward pass of autograd's engine that the script asked for (a call that is being recorded has one inside)."""
    found: list[Any] = []
    original = autograd_engine._original

    def watched(*args: Any, **kwargs: Any) -> Any:
        if autograd_engine._STATE.depth == 1:
            found.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(autograd_engine, "_original", watched)
    return found


@pytest.fixture
def played() -> nn.Module:
    """A module that is played from now on."""
    return played_already(WithLoss, lambda module, k: module(batch(k))[0])


def _weight(module: nn.Module) -> Any:
    return module.net[0].weight  # type: ignore[index, union-attr]


def plain(module: nn.Module, k: int) -> Any:
    """What training scripts do."""
    loss, y = module(batch(k))
    module.zero_grad()
    loss.backward()
    descend(module)
    return [loss, y]


@pytest.mark.switched_on("NXD_JAX_REPLAY")
def test_plain_steps_skip_it(engine: list[Any]) -> None:
    module = parity(WithLoss, plain, steps=8)
    assert len(engine) == 8 + 8 - player(module).played, "op by op all go through it, played ones do not"
    for p in module.parameters():
        assert p.grad is not None and p.grad.is_leaf and not p.grad.requires_grad and p.grad.grad_fn is None


def _accumulated(module: nn.Module, k: int) -> Any:
    module.zero_grad()
    for part in (0, 1):
        module(batch(2 * k + part))[0].backward()
    return [p.grad for p in module.parameters()]


def _into_zeros(module: nn.Module, k: int) -> Any:
    module.zero_grad(set_to_none=False)
    module(batch(k))[0].backward()
    return [p.grad for p in module.parameters()]


def _some_frozen(module: nn.Module, k: int) -> Any:
    _weight(module).requires_grad_(k % 8 < 4)
    module.zero_grad()
    module(batch(k))[0].backward()
    return [p.grad for p in module.parameters()]


def _another_starting_gradient(module: nn.Module, k: int) -> Any:
    module.zero_grad()
    module(batch(k))[0].backward(torch.tensor(0.5 + k, device="xla"))
    return [p.grad for p in module.parameters()]


def _of_the_other_result(module: nn.Module, k: int) -> Any:
    module.zero_grad()
    loss, y = module(batch(k))
    (y if k % 2 else loss).backward(torch.ones_like(y) if k % 2 else None)
    return [p.grad for p in module.parameters()]


def _of_both(module: nn.Module, k: int) -> Any:
    module.zero_grad()
    loss, y = module(batch(k))
    torch.autograd.backward([loss, y], [torch.ones_like(loss), torch.ones_like(y)])
    return [p.grad for p in module.parameters()]


def _kept(module: nn.Module, k: int) -> Any:
    module.zero_grad()
    loss, _ = module(batch(k))
    loss.backward(retain_graph=True)
    loss.backward()
    return [p.grad for p in module.parameters()]


def _two_losses(module: nn.Module, k: int) -> Any:
    module.zero_grad()
    first, second = module(batch(k))[0], module(batch(k + 50))[0]
    first.backward()
    second.backward()
    return [p.grad for p in module.parameters()]


def _to_the_input(module: nn.Module, k: int) -> Any:
    module.zero_grad()
    x = batch(k).requires_grad_()
    module(x)[0].backward()
    return [x.grad, [p.grad for p in module.parameters()]]


def _through_the_input(module: nn.Module, k: int) -> Any:
    module.zero_grad()
    x = batch(k).requires_grad_()
    module(x * 2)[0].backward()
    return [x.grad, [p.grad for p in module.parameters()]]


def _asked(module: nn.Module, k: int) -> Any:
    module.zero_grad()
    (found,) = torch.autograd.grad(module(batch(k))[0], [_weight(module)])
    module(batch(k))[0].backward(inputs=[_weight(module)])
    return [found, [p.grad for p in module.parameters()]]


def _the_step_ended_before(module: nn.Module, k: int) -> Any:
    module.zero_grad()
    loss, _ = module(batch(k))
    executor.sync()
    loss.backward()
    return [p.grad for p in module.parameters()]


def _hook_on_the_loss(module: nn.Module, k: int) -> Any:
    module.zero_grad()
    loss, _ = module(batch(k))
    if k % 2:
        loss.register_hook(lambda g: g * 3)
    loss.backward()
    return [p.grad for p in module.parameters()]


def _gradient_of_the_loss(module: nn.Module, k: int) -> Any:
    module.zero_grad()
    loss, _ = module(batch(k))
    if k % 2:
        loss.retain_grad()
    loss.backward()
    return [loss.grad if k % 2 else None, [p.grad for p in module.parameters()]]


def _hook_on_a_weight(module: nn.Module, k: int) -> Any:
    module.zero_grad()
    handle = _weight(module).register_hook(lambda g: g * 3) if k in (5, 7) else None
    module(batch(k))[0].backward()
    if handle is not None:
        handle.remove()
    return [p.grad for p in module.parameters()]


def _hook_on_a_node(module: nn.Module, k: int) -> Any:
    module.zero_grad()
    loss, _ = module(batch(k))
    handle = loss.grad_fn.register_prehook(lambda grads: (grads[0] * 3, *grads[1:])) if k % 2 else None
    loss.backward()
    if handle is not None:
        handle.remove()
    return [p.grad for p in module.parameters()]


def _written_afterwards(module: nn.Module, k: int) -> Any:
    """The loss is changed in place before its backward pass: it is another node's result then."""
    module.zero_grad()
    loss, _ = module(batch(k))
    loss.mul_(0.5)
    loss.backward()
    return [loss, [p.grad for p in module.parameters()]]


STEPS: dict[str, tuple[Step, bool]] = {
    "accumulated": (_accumulated, False),
    "into zeros": (_into_zeros, True),
    "some frozen": (_some_frozen, False),
    "another starting gradient": (_another_starting_gradient, False),
    "of the other result": (_of_the_other_result, False),
    "of both results": (_of_both, True),
    "kept": (_kept, True),
    "two losses": (_two_losses, True),
    "to the input": (_to_the_input, True),
    "through the input": (_through_the_input, True),
    "autograd.grad and inputs": (_asked, True),
    "the step ended before": (_the_step_ended_before, False),
    "hook on the loss": (_hook_on_the_loss, False),
    "gradient of the loss": (_gradient_of_the_loss, False),
    "hook on a weight": (_hook_on_a_weight, False),
    "hook on a node": (_hook_on_a_node, False),
    "loss changed in place": (_written_afterwards, True),
}
"""Steps, and whether each backward pass of theirs needs the engine."""


@pytest.mark.thorough(keep=8)
@pytest.mark.parametrize("name", STEPS)
def test_gradients_are_what_they_were(name: str, engine: list[Any]) -> None:
    step, always = STEPS[name]
    passes = 12 * (2 if name in ("accumulated", "kept", "two losses", "autograd.grad and inputs") else 1)
    parity(WithLoss, step, steps=12)
    assert (len(engine) == 2 * passes) == always, f"{len(engine)} of {2 * passes}"


def test_anomaly_detection_and_profilers_get_the_engine(engine: list[Any], played: nn.Module) -> None:
    engine.clear()
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        played(batch(0))[0].backward()
    assert len(engine) == 1
    played.zero_grad()
    with torch.autograd.profiler.profile() as profile:
        played(batch(0))[0].backward()
    assert len(engine) == 2 and any("backward" in str(event.name).lower() for event in profile.function_events)


def _a_float64_gradient(module: nn.Module, k: int) -> Any:
    module.zero_grad()
    module(batch(k))[0].backward(torch.tensor(0.5, device="xla", dtype=torch.float64))
    return [p.grad for p in module.parameters()]


def test_a_gradient_of_another_kind_is_converted_or_refused(engine: list[Any], played: nn.Module) -> None:
    parity(WithLoss, _a_float64_gradient, steps=8)
    engine.clear()
    with pytest.raises(RuntimeError, match=r"a gradient on cpu for a tensor on xla:0: move it with \.to\('xla'\)"):
        played(batch(0))[1].backward(torch.ones(4, 6))
    played(batch(0))[0].backward(torch.tensor(1.0))
    assert len(engine) == 2 and _weight(played).grad is not None


def test_a_second_backward_pass_raises(engine: list[Any], played: nn.Module) -> None:
    engine.clear()
    loss, _ = played(batch(0))
    loss.backward()
    assert not engine
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("create", [True, False], ids=["differentiable", "plain"])
@pytest.mark.parametrize("straight", [True, False])
def test_what_was_changed_in_between_raises(straight: bool, create: bool, played: nn.Module) -> None:
    loss, _ = played(batch(0))
    with torch.no_grad():
        played.net[2].weight.mul_(2)  # type: ignore[index, union-attr]
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation: \[torch.float32 \[6, 8\]\] is at version \d+; expected version \d+"
    ):
        torch.autograd.backward([loss if straight else loss * 2], create_graph=create)


@pytest.mark.parametrize("create", [True, False], ids=["differentiable", "plain"])
def test_memory_that_was_swapped_in_between_raises(create: bool, played: nn.Module) -> None:
    loss, _ = played(batch(0))
    weight = played.net[2].weight  # type: ignore[index, union-attr]
    weight.data = torch.zeros_like(weight)
    with pytest.raises(RuntimeError, match="memory of a parameter was swapped"):
        loss.backward(create_graph=create)


def test_an_argument_that_was_swapped_in_between_raises(played: nn.Module) -> None:
    """Which a backward pass that computes the forward again would not notice."""
    x = batch(0)
    loss, _ = played(x)
    x.data = torch.zeros_like(x)
    with pytest.raises(RuntimeError, match="was swapped"):
        torch.autograd.grad(loss, [_weight(played)], create_graph=True)


def test_nothing_is_left_of_what_was_kept(played: nn.Module) -> None:
    loss, _ = played(batch(0))
    node: Any = loss.grad_fn
    loss.backward()
    assert node.doing.over and not hasattr(node.doing, "call")
