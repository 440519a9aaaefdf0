"""`torch_bridge.optimize`: gradients that go straight into `.grad`, values that only a backward pass reads, and numbers that Python asks for on the way."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_bridge
from tests.torch_bridge.replaying import batch, compile_fast, parity, played_already, trained  # noqa: F401
from torch_bridge.recorder import dispatch, op_rules
from torch_bridge.replay import accumulate_grad, module_calls


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def loss_of(module: nn.Module, k: int = 0) -> torch.Tensor:
    return module(batch(k).to(next(module.parameters()).device)).square().mean()


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each gradient that could go straight did."""
    found: list[bool] = []
    hand_over = accumulate_grad.hand_over

    def watched(leaves: Any, grads: Any) -> Any:
        rest = hand_over(leaves, grads)
        found.extend(g is None for g in rest)
        return rest

    monkeypatch.setattr(accumulate_grad, "hand_over", watched)
    return found


@pytest.fixture
def played() -> nn.Module:
    """A module that is played from now on."""
    return played_already(net, loss_of)


def test_they_go_straight_and_no_op_is_dispatched(given: list[bool], played: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    given.clear()
    loss = loss_of(played)
    ops: list[str] = []
    record = dispatch.record
    monkeypatch.setattr(dispatch, "record", lambda func, *args: (ops.append(str(func)), record(func, *args))[1])
    loss.backward()
    assert given == [True] * 4 and "aten.detach.default" not in ops
    for p in played.parameters():
        assert p.grad is not None and p.grad.is_leaf and not p.grad.requires_grad and p.grad.shape == p.shape


def test_later_ones_are_added_without_dispatch(given: list[bool], played: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time with the entries of the first; to zeros as to gradients."""
    for k in range(2):
        expected = copy.deepcopy(played).cpu()
        torch_bridge.restore(expected)
        for m in (expected, played):
            m.zero_grad()
            loss_of(m, k).backward()
        given.clear()
        added: list[Any] = []
        record = op_rules.record
        monkeypatch.setattr(op_rules, "record", lambda *args, added=added, record=record: (added.append(args), record(*args))[1])
        before = [(p.grad, p.grad._version) for p in played.parameters() if p.grad is not None]
        loss = loss_of(played, k + 5)
        loss.backward()
        loss_of(expected, k + 5).backward()
        monkeypatch.undo()
        assert len(added) in ((0,) if k else (0, 4))
        for p, own, (old, version) in zip(played.parameters(), expected.parameters(), before, strict=True):
            assert p.grad is old and old._version == version + 1
            torch.testing.assert_close(p.grad.cpu(), own.grad)


def test_calls_with_backward_passes_of_their_own(given: list[bool], played: nn.Module) -> None:
    """As micro-batches of a pipeline have them; others wait for one pass, in which autograd adds up."""

    def twice(block: Callable[[], Any]) -> list[torch.Tensor]:
        losses = []
        for k in (1, 2):
            with block():
                losses.append(loss_of(played, k))
        return losses

    for block, straight in ((module_calls.with_its_own_backward, [True] * 8), (contextlib.nullcontext, [])):
        given.clear()
        for loss in twice(block):
            loss.backward()
        assert given == straight
        found = [p.grad.cpu() for p in played.parameters() if p.grad is not None]
        played.zero_grad()
        plain = copy.deepcopy(played).cpu()
        torch_bridge.restore(plain)
        (loss_of(plain, 1) + loss_of(plain, 2)).backward()
        torch.testing.assert_close(found, [p.grad for p in plain.parameters()])


def _hooked(register: Callable[[nn.Module, Callable[..., None]], Any]) -> Callable[[nn.Module, int], Any]:
    """A step in which the first weight sometimes gets a hook after the forward pass; its calls are part of what is compared."""

    def step(module: nn.Module, k: int) -> Any:
        calls: list[Any] = []
        loss = loss_of(module, k)
        module.zero_grad()
        handle = register(module, lambda *given: calls.append(len(given))) if k in (5, 6) else None
        loss.backward()
        if handle is not None:
            handle.remove()
        return [calls, [p.grad for p in module.parameters()]]

    return step


HOOKS: dict[str, Callable[[nn.Module, Callable[..., None]], Any]] = {
    "on the gradient": lambda m, hook: m[0].weight.register_hook(hook),  # type: ignore[index, union-attr]
    "after accumulation": lambda m, hook: m[0].weight.register_post_accumulate_grad_hook(hook),  # type: ignore[index, union-attr]
    "on autograd's node": lambda m, hook: torch.autograd.graph.get_gradient_edge(m[0].weight).node.register_hook(hook),  # type: ignore[index, union-attr]
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_are_called_as_ever(name: str) -> None:
    """Those on nodes get the gradients themselves; a node lives as long as somebody holds it."""
    nodes: list[Any] = []

    def register(module: nn.Module, hook: Callable[..., None]) -> Any:
        nodes.append(torch.autograd.graph.get_gradient_edge(module[0].weight).node)  # type: ignore[index, union-attr]
        return HOOKS[name](module, hook)

    parity(net, _hooked(register), steps=8)


def test_a_hook_on_a_node_sees_the_gradient(given: list[bool], played: nn.Module) -> None:
    weight = played[0].weight  # type: ignore[index, union-attr]
    node = torch.autograd.graph.get_gradient_edge(weight).node
    seen: list[Any] = []
    handle = node.register_prehook(lambda grads: seen.append(grads[0]))
    given.clear()
    loss_of(played).backward()
    assert not given and seen[0] is not None
    handle.remove()
    played.zero_grad()
    loss_of(played).backward()
    assert given == [True] * 4 and len(seen) == 1


def _accumulated(module: nn.Module, k: int) -> Any:
    """Two passes into one gradient; every other time into zeros."""
    module.zero_grad(set_to_none=bool(k % 2))
    for part in (0, 1):
        loss_of(module, 2 * k + part).backward()
    return [p.grad for p in module.parameters()]


def _with_others(module: nn.Module, k: int) -> Any:
    """A weight that is used outside too."""
    module.zero_grad()
    (loss_of(module, k) + module[0].weight.square().sum()).backward()  # type: ignore[index, union-attr]
    return [p.grad for p in module.parameters()]


def _asked(module: nn.Module, k: int) -> Any:
    """`autograd.grad`, `inputs=` and a graph of gradients set no other `.grad`."""
    module.zero_grad()
    weight = module[0].weight  # type: ignore[index, union-attr]
    (found,) = torch.autograd.grad(loss_of(module, k), [weight])
    assert weight.grad is None
    loss_of(module, k).backward(inputs=[weight])
    assert module[0].bias.grad is None  # type: ignore[index, union-attr]
    return [found, weight.grad]


def _transposed(module: nn.Module, k: int) -> Any:
    """Gradients lie as their weights do, whatever the module makes."""
    seen = trained()(module, k)
    return [seen, [p.grad.stride() for p in module.parameters()]]


class Turned(nn.Module):
    """A weight whose gradient comes out transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight) * self.weight.t().sum(1)


def _frozen_since(module: nn.Module, k: int) -> Any:
    """Weights that are frozen between the forward and the backward pass get no gradient."""
    module.zero_grad()
    loss = loss_of(module, k)
    module[0].requires_grad_(k % 3 != 2)  # type: ignore[index]
    (loss if k % 2 else loss * 2).backward()
    module.requires_grad_(True)
    return [loss, [p.grad for p in module.parameters()]]


STEPS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Any]]] = {
    "accumulated": (net, _accumulated),
    "used outside": (net, _with_others),
    "autograd.grad and inputs": (net, _asked),
    "strides": (Turned, _transposed),
    "frozen since": (net, _frozen_since),
}


@pytest.mark.parametrize("name", STEPS)
def test_gradients_are_what_they_were(name: str) -> None:
    make, step = STEPS[name]
    parity(make, step, steps=8)


def test_anomaly_detection_sees_them(given: list[bool], played: nn.Module) -> None:
    given.clear()
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        loss_of(played).backward()
    assert not given and played[0].weight.grad is not None  # type: ignore[index, union-attr]


# -- what only the backward pass reads -------------------------------------------------------------------


def test_values_are_kept_only_if_the_step_may_end_before_the_backward_pass(played: nn.Module) -> None:
    loss = loss_of(played)
    segment = dispatch.STATE.session.current
    held = len(segment.results())
    loss.backward()
    assert held <= 3, f"{held} results wait: the module's result, the loss, the batch"


def _sometimes_read(module: nn.Module, k: int) -> Any:
    """The loss is read before the backward pass in some steps, which ends the step."""
    loss = loss_of(module, k)
    seen = loss.item() if k in (1, 5, 6, 7, 8, 11) else None
    module.zero_grad()
    loss.backward()
    return [seen, loss, [p.grad for p in module.parameters()]]


def test_a_step_that_sometimes_ends_before_the_backward_pass() -> None:
    parity(net, _sometimes_read, steps=13)


# -- numbers that Python asks for -----------------------------------------------------------------------


class Asks(nn.Module):
    """Branches on integers; whose depends on `on_argument`."""

    def __init__(self, on_argument: bool):
        super().__init__()
        self.net = net()
        self.on_argument = on_argument

    def forward(self, x: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        own = torch.arange(x.shape[1], device=x.device)
        asked = places if self.on_argument and places is not None else own
        if (asked.diff() == 1).all():
            x = x + own
        return self.net(x)  # type: ignore[no-any-return]


def test_a_branch_on_numbers_of_its_own() -> None:
    """As transformers does it with the positions that it makes."""
    parity(lambda: Asks(False))


def test_a_branch_on_an_argument_is_decided_before_each_call() -> None:
    def step(module: nn.Module, k: int) -> Any:
        places = torch.arange(6, device="xla") * (1 if k % 2 else 2)
        return trained(lambda m, j: m(batch(j), places))(module, k)

    parity(lambda: Asks(True), step, steps=10)


class _Fragile(torch.autograd.Function):
    fails = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if _Fragile.fails:
            raise ValueError("in its backward pass")
        return grad * 2


class _Interrupted(nn.Module):
    def __init__(self, reentrant: bool):
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(6, 6), nn.Linear(6, 6), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.reentrant:
            return self.last(_Fragile.apply(torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=True)))
        return self.last(_Fragile.apply(x))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("later", [False, True], ids=["before the forward", "after the forward"])
def test_a_backward_pass_that_raises_leaves_what_was_complete(reentrant: bool, later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As eager torch does: those of the layers after the function, added to what is there, with the hooks of those parameters."""
    module = played_already(lambda: _Interrupted(reentrant), loss_of)
    expected = torch_bridge.restore(copy.deepcopy(module).cpu())
    seen: dict[str, list[str]] = {}
    for kind, m in (("eager", expected), ("played", module)):
        told = seen[kind] = []
        for name, p in m.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, told=told, name=name: told.append(name))
        loss_of(m, 7).backward()  # what is there already
        told.clear()
        monkeypatch.setattr(_Fragile, "fails", not later)
        loss = loss_of(m, 8)
        monkeypatch.setattr(_Fragile, "fails", True)
        with pytest.raises(ValueError, match="in its backward pass"):
            loss.backward()
        with pytest.raises(ValueError, match="in its backward pass"):
            torch.autograd.grad(loss_of(m, 9), list(m.parameters()))
        monkeypatch.setattr(_Fragile, "fails", False)
    assert sorted(seen["eager"]) == sorted(seen["played"]) == ["last.bias", "last.weight"]
    for p, own in zip(module.parameters(), expected.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad.cpu(), own.grad)


class Gaps(nn.Module):
    """A layer that is not used, one that only the second result depends on, and one of which the forward only reads the bias, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused, self.read = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.a(x) + self.read.bias.detach()
        return x, self.b(x)


def leads_to(loss: torch.Tensor, module: nn.Module) -> set[str]:
    """Names of the parameters in autograd's graph."""
    names = {id(p): name for name, p in module.named_parameters()}
    nodes, found = {loss.grad_fn}, set()
    while nodes:
        node = nodes.pop()
        assert node is not None
        found.add(names.get(id(getattr(node, "variable", None)), ""))
        nodes |= {n for n, _ in node.next_functions if n is not None}
    return found - {""}


def test_the_graph_leads_to_what_results_depend_on() -> None:
    """As DistributedDataParallel(find_unused_parameters=True) asks it, in calls that are looked at, recorded and played."""
    alone = Gaps()
    ours = torch_bridge.optimize(copy.deepcopy(alone).to("xla"))
    for k in range(6):
        ours.zero_grad()
        alone.zero_grad()
        out, expected = ours(batch(k)), alone(batch(k).cpu())
        assert leads_to(out[1].sum(), ours) == leads_to(expected[1].sum(), alone)
        (out[0].sum() + out[1].square().sum()).backward()
        (expected[0].sum() + expected[1].square().sum()).backward()
        for p, q in zip(ours.parameters(), alone.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(p.grad.cpu(), q.grad)
    assert ours.forward.played > 2
