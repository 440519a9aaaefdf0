"""`torch_bridge.optimize` and modules that do something else from call to call: played and right, or recorded op by op, with the reason."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torch_bridge
from tests.torch_bridge.replaying import Ruled, batch, compile_fast, descend, parity, player, trained  # noqa: F401
from torch_bridge.guards.conditions import Conditions
from torch_bridge.replay.recordings import Kind, ReplayDiffersError

COUNT = 0
STATE: dict[str, Any] = {"n": 0}
SCALE: Any = None
TENSOR: Any = None


class Small(Ruled):
    """With attributes: tensors become buffers."""

    kind_of_scale = 1.0

    def __init__(self, rule: Callable[..., Any] | None = None, **attributes: Any):
        super().__init__(rule)
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)


def _every_third() -> Callable[..., Any]:
    """A rule with a counter in its closure; like the other counters here, the first two calls do the same."""
    n = 0

    def rule(m: Any, x: Any, y: Any) -> Any:
        nonlocal n
        n += 1
        return y if n % 3 else y * 2

    return rule


def _global_count(m: Any, x: Any, y: Any) -> Any:
    global COUNT
    COUNT += 1
    return y if COUNT % 3 else y * 2


def _global_dict(m: Any, x: Any, y: Any) -> Any:
    STATE["n"] += 1
    return y if STATE["n"] % 3 else y * 2


def _helper(y: Any) -> Any:
    STATE["n"] += 1
    return y if STATE["n"] % 3 else y * 2


def _mutable_default(m: Any, x: Any, y: Any, seen: Any = []) -> Any:  # noqa: B006
    seen.append(1)
    return y if len(seen) % 3 else y * 2


def _attribute(m: Any, x: Any, y: Any) -> Any:
    m.count += 1
    return y if m.count % 3 else y * 2


def _class_attribute(m: Any, x: Any, y: Any) -> Any:
    type(m).kind_of_scale += 1
    return y if type(m).kind_of_scale % 3 else y * 2


def _flag(m: Any, x: Any, y: Any) -> Any:
    if not m.ready:
        m.ready.fill_(True)
        return y * 5
    return y


def _cache(m: Any, x: Any, y: Any) -> Any:
    m.cache.append(y.detach())
    return y + sum(m.cache)


def _sets_attribute(m: Any, x: Any, y: Any) -> Any:
    m.auxiliary = y.square().mean()
    return y


def _noise(m: Any, x: Any, y: Any) -> Any:
    return y + torch.randn(6).to("xla")


def _backward_inside(m: Any, x: Any, y: Any) -> Any:
    y.sum().backward(retain_graph=True)
    return y * 2


class Own:
    """A result that pytree does not know."""

    def __init__(self, value: Any):
        self.value = value


STOPPED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "branch on a value": (lambda: Small(lambda m, x, y: y * 2 if y.sum().item() > 0 else y), "it reads a tensor's value"),
    "branch on an argument's value": (lambda: Small(lambda m, x, y: y * 2 if x[0, 0] > 0 else y), "it reads a tensor's value"),
    "branch on small integers": (lambda: Small(lambda m, x, y: y * 2 if (x > 0).long()[0, 0] == 1 else y), "it reads a tensor's value"),
    "counter in an attribute": (lambda: Small(_attribute, count=0), "count"),
    "counter in a global": (lambda: Small(_global_count), "_global_count assigns a global variable"),
    "counter in a global dict": (lambda: Small(_global_dict), "its forward changes ['n'] of a dict"),
    "counter in a helper's global": (lambda: Small(lambda m, x, y: _helper(y)), "its forward changes ['n'] of a dict"),
    "counter in a default": (lambda: Small(_mutable_default), "it changes a list that was there before"),
    "counter in a class": (lambda: Small(_class_attribute), "kind_of_scale"),
    "counter in a closure": (lambda: Small(_every_third()), "assigns a variable of an enclosing function"),
    "iterator": (lambda: Small(lambda m, x, y: y * next(m.steps), steps=itertools.cycle([1, 1, 2])), "which is an iterator"),
    "iterator in a closure": (lambda: (lambda it: Small(lambda m, x, y: y * next(it)))(itertools.cycle([1, 1, 2])), "is an iterator"),
    "deque": (
        lambda: Small(lambda m, x, y: (m.seen.append(1), y)[1] * len(m.seen), seen=collections.deque(maxlen=3)),
        "it changes a deque that was there before",
    ),
    "python's random layer drop": (lambda: Small(lambda m, x, y: y if random.random() < 0.7 else x), "Random.random"),
    "numpy's random layer drop": (lambda: Small(lambda m, x, y: y if np.random.rand() < 0.7 else x), "numpy.random"),
    "torch's random layer drop": (lambda: Small(lambda m, x, y: y if torch.rand(1) < 0.7 else x), "torch's CPU generator"),
    "own numpy generator": (
        lambda: Small(lambda m, x, y: y if m.rng.random() < 0.7 else x, rng=np.random.default_rng(0)),
        "it reads Generator.random",
    ),
    "own python generator": (
        lambda: Small(lambda m, x, y: y if m.rng.random() < 0.7 else x, rng=random.Random(0)),
        "Random.random",
    ),
    "noise from the host": (lambda: Small(_noise), "torch's CPU generator"),
    "cache on the module": (lambda: Small(_cache, cache=[]), "it changes a list that was there before"),
    "loss on the module": (lambda: Small(_sets_attribute, auxiliary=None), "auxiliary"),
    "buffer rebound": (
        lambda: Small(lambda m, x, y: _set(m, "mean", m.mean * 0.9 + y.detach().mean()) or y * m.mean, mean=torch.zeros(())),
        "mean",
    ),
    "buffer zeroed": (lambda: Small(lambda m, x, y: (y, m.sum.zero_())[0], sum=torch.ones(())), "fills a tensor that it was given"),
    "returns a view of its input": (lambda: Small(lambda m, x, y: (x[1:], y)), "returns a view of a tensor that it was given"),
    "returns its input under another name": (lambda: Small(lambda m, x, y: (x.detach(), y)), "or one with the same memory"),
    "returns overlapping views": (lambda: Small(lambda m, x, y: (y, y.detach()[:, 0])), "views of the same elements"),
    "returns an object": (lambda: Small(lambda m, x, y: Own(y)), "an object of class Own"),
    "sets gradients": (lambda: Small(_backward_inside), "it runs a backward pass inside"),
    "own generator on the device": (lambda: Small(lambda m, x, y: y + torch.rand(6, device="xla", generator=STATE["g"])), "random"),
}


def _loss(out: Any) -> torch.Tensor:
    out = out.value if isinstance(out, Own) else out
    return sum(o.square().sum() for o in out) if isinstance(out, tuple) else out.square().sum()


def _step(m: Any, k: int) -> Any:
    if k == 0:
        global COUNT
        COUNT = 0
        STATE.clear()
        STATE.update(n=0, g=torch.Generator().manual_seed(3))
        Small.kind_of_scale = 1.0
        random.seed(0)
        np.random.seed(0)
    x = batch(k).requires_grad_()
    loss = _loss(m(x * 1))
    m.zero_grad()
    loss.backward()
    descend(m)
    return [loss, x.grad]


@pytest.mark.filterwarnings("ignore:Pickle, copy, and deepcopy support:DeprecationWarning")  # of itertools, Python 3.13
@pytest.mark.parametrize("name", STOPPED)
def test_what_cannot_be_repeated_is_recorded(name: str) -> None:
    make, reason = STOPPED[name]
    if "closure" in name or "default" in name:  # what is outside the module is shared: only the result is checked
        torch.manual_seed(0)
        model = torch_bridge.optimize(make().to("xla"))
        for k in range(5):
            _step(model, k)
        assert reason in player(model).off and not player(model).played
    else:
        parity(make, _step, played=False, off=reason)


def _from_first_batch(m: Any, x: Any, y: Any) -> Any:
    if not m.ready:
        m.scale.copy_(y.detach().std(0))
        m.ready.fill_(True)
    return y / m.scale


@pytest.mark.parametrize("rule", [_flag, _from_first_batch])
def test_a_first_call_that_sets_a_flag(rule: Callable[..., Any]) -> None:
    """What a module initialises in its first call, and remembers in a buffer, is not done again by what is played."""
    parity(lambda: Small(rule, ready=torch.tensor(False), scale=torch.ones(6)), _step, steps=8)


FLIP = [False]


class Flipping(nn.Module):
    """Another op where a list says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) if FLIP[0] else torch.cos(x)


def test_a_warning_names_the_line_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should a read ever escape: recordings are compared before anything is played."""
    monkeypatch.setattr(Conditions, "hold", lambda self: True)
    FLIP[0] = False
    model = torch_bridge.optimize(Flipping())
    model(batch(0))
    FLIP[0] = True
    model(batch(0))
    off = player(model).off
    assert "two recordings differ: op 0 was aten.cos.default, then aten.sin.default" in off and "test_replay_soundness.py" in off


def test_a_check_finds_what_was_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should a read ever escape later: the 4th, 8th, 16th ... played call is recorded once more, and a difference is an error."""
    monkeypatch.setattr(Conditions, "hold", lambda self: True)
    FLIP[0] = False
    model = torch_bridge.optimize(Flipping())
    with torch.no_grad():
        for _ in range(5):
            model(batch(0))
        assert player(model).played == 3
        FLIP[0] = True
        with pytest.raises(
            ReplayDiffersError, match=r"op 0 was aten.cos.default, then aten.sin.default .*test_replay_soundness.py.*NXD_JAX_REPLAY=0"
        ):
            model(batch(0))
        assert torch.equal(model(batch(0)).cpu(), torch.sin(batch(0)).cpu()) and player(model).off


def test_when_calls_are_checked() -> None:
    kind = Kind()
    assert [n for n in range(1, 5000) if kind.check_is_due()] == [4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096]


# -- changed between calls: recorded anew ------------------------------------------------------------


class Config:
    """Settings as a plain object."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.deep = {"list": [1.0, 2.0]}


class Mapping(dict[str, Any]):
    """A dict that is asked in another way, as libraries have them."""

    def get(self, key: Any) -> Any:  # type: ignore[override]
        return self[key]


class Slotted:
    """Settings in slots."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


def _set(m: Any, name: str, value: Any) -> Any:
    setattr(m, name, value)
    return None


CHANGED: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]], Callable[[Any, int], Any]]] = {
    "attribute": (lambda m, x, y: y * m.c, lambda: {"c": 1.0}, lambda m, k: _set(m, "c", 1.0 + k // 5)),
    "negative zero": (
        lambda m, x, y: y + (m.c * x.abs()).reciprocal().sign(),
        lambda: {"c": 0.0},
        lambda m, k: _set(m, "c", -0.0 if k > 4 else 0.0),
    ),
    "config": (lambda m, x, y: y * m.c.scale, lambda: {"c": Config()}, lambda m, k: _set(m.c, "scale", 1.0 + k // 5)),
    "deep config": (
        lambda m, x, y: y * m.c.deep["list"][1],
        lambda: {"c": Config()},
        lambda m, k: m.c.deep["list"].__setitem__(1, 1.0 + k // 5),
    ),
    "dict with its own get": (lambda m, x, y: y * m.c["k"], lambda: {"c": Mapping(k=1.0)}, lambda m, k: m.c.__setitem__("k", 1.0 + k // 5)),
    "slots": (lambda m, x, y: y * m.c.scale, lambda: {"c": Slotted()}, lambda m, k: _set(m.c, "scale", 1.0 + k // 5)),
    "partial": (
        lambda m, x, y: m.c(y),
        lambda: {"c": None},
        lambda m, k: _set(m, "c", m.c if k % 5 else functools.partial(torch.mul, other=1.0 + k)),
    ),
    "lambda": (lambda m, x, y: m.c(y), lambda: {"c": None}, lambda m, k: _set(m, "c", m.c if k % 5 else (lambda y: y * (1.0 + k)))),
    "closure": (lambda m, x, y: m.c(y), lambda: {"c": _scaled()}, lambda m, k: m.c.scale.__setitem__(0, 1.0 + k // 5)),
    "numpy array": (lambda m, x, y: y * float(m.c[1]), lambda: {"c": np.ones(3)}, lambda m, k: m.c.__setitem__(1, 1.0 + k // 5)),
    "host scalar": (lambda m, x, y: y * m.c[0].item(), lambda: {"c": [None]}, lambda m, k: m.c.__setitem__(0, torch.tensor(1.0 + k // 5))),
    "long list": (lambda m, x, y: y * m.c[300], lambda: {"c": [1.0] * 400}, lambda m, k: m.c.__setitem__(300, 1.0 + k // 5)),
    "loose module": (lambda m, x, y: m.c[0](y), lambda: {"c": [nn.Dropout(0.5)]}, lambda m, k: m.c[0].train(k < 5)),
    "a weight's layout": (lambda m, x, y: y, dict, lambda m, k: k == 5 and _set(m.layer.weight, "data", m.layer.weight.data.t())),
    "a buffer's layout": (lambda m, x, y: y @ m.c, lambda: {"c": nn.Buffer(torch.randn(6, 6))}, lambda m, k: k == 5 and m.c.t_() is None),
    "global": (lambda m, x, y: y if SCALE is None else y * SCALE, dict, lambda m, k: globals().update(SCALE=None if k < 5 else 3.0)),
    "inner forward": (lambda m, x, y: y, dict, lambda m, k: k == 5 and _set(m.layer, "forward", lambda x: x * m.layer.weight.sum())),
    "global tensor": (lambda m, x, y: y * TENSOR, dict, lambda m, k: k % 5 or globals().update(TENSOR=batch(k, 6))),
    "global constant": (
        lambda m, x, y: y * TENSOR,
        dict,
        lambda m, k: k % 5 or globals().update(TENSOR=torch.full((6,), 1.0 + k, device="xla")),
    ),
}


def _scaled() -> Any:
    scale = [1.0]

    def times(y: Any) -> Any:
        return y * scale[0]

    times.scale = scale  # type: ignore[attr-defined]
    return times


@pytest.mark.parametrize("name", CHANGED)
def test_what_changes_between_calls_is_recorded_anew(name: str) -> None:
    rule, attributes, change = CHANGED[name]

    def step(m: Any, k: int) -> Any:
        change(m, k)
        return trained()(m, k)

    parity(lambda: Small(rule, **attributes()), step, steps=9)


def test_numbers_that_change_in_every_step_stop_it() -> None:
    def step(m: Any, k: int) -> Any:
        return trained(lambda m, k: m(batch(k), 1.0 + k))(m, k)

    parity(lambda: Small(lambda m, x, y, c: y * c), step, played=False, off="have been of 16 kinds", steps=18)

    def attribute(m: Any, k: int) -> Any:
        m.c = 1.0 + k
        return trained()(m, k)

    parity(lambda: Small(lambda m, x, y: y * m.c, c=0.0), attribute, played=False, off="have been of 16 kinds", steps=18)


def test_a_class_whose_forward_is_replaced() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x)

    model = torch_bridge.optimize(Net())
    x = batch(0)
    with torch.no_grad():
        for _ in range(4):
            model(x)
        assert player(model).played
        Net.forward = lambda self, x: torch.cos(x)  # type: ignore[method-assign]
        assert torch.equal(model(x).cpu(), torch.cos(x).cpu())


# -- what a call does to its arguments ----------------------------------------------------------------


ARGUMENTS: dict[str, tuple[Callable[..., Any], str]] = {
    "in place": (lambda m, x, y, z: y + z.mul_(2), "the history"),
    "requires_grad_": (lambda m, x, y: (x if x.requires_grad else x.requires_grad_()) * y, "requires_grad"),
    "a hook": (lambda m, x, y: (x.register_hook(lambda g: g * 2), y)[1], "it registers a hook on a tensor"),
    "retain_grad": (lambda m, x, y: (x.retain_grad(), y)[1], "it asks for the gradient of a tensor inside"),
    "an attribute": (lambda m, x, y: (_set(x, "seen", True), y)[1], "it sets a tensor.seen"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_effects_on_arguments_stop_it(name: str) -> None:
    rule, reason = ARGUMENTS[name]

    def step(m: Any, k: int) -> Any:
        leaf = batch(k).requires_grad_()
        x = batch(k) if name == "requires_grad_" else leaf * 1
        z = leaf * 2
        out = m(x, z) if name == "in place" else m(x)
        m.zero_grad()
        (out.sum() + (x * z * batch(k + 40)).sum()).backward()
        return [out, leaf.grad, x.grad if x.is_leaf or x.retains_grad else None, hasattr(x, "seen")]

    parity(lambda: Small(rule), step, played=False, off=reason)


def test_a_dict_that_is_changed() -> None:
    def rule(m: Any, x: Any, y: Any, cache: Any) -> Any:
        cache["sum"] = cache["sum"] + y.detach()
        return y + cache["sum"]

    def step(m: Any, k: int) -> Any:
        cache = {"sum": batch(k)}
        return [trained(lambda m, k: m(batch(k), cache))(m, k), cache["sum"]]

    parity(lambda: Small(rule), step, played=False, off="it changes a dict that it was given")


def test_an_argument_written_in_place_without_gradients() -> None:
    def step(m: Any, k: int) -> Any:
        state = batch(k)
        return [trained(lambda m, k: m(batch(k), state))(m, k), state, state._version]

    parity(lambda: Small(lambda m, x, y, state: y + state.lerp_(y.detach(), 0.5)), step)


def test_tensors_with_attributes_are_passed_as_they_are() -> None:
    def step(m: Any, k: int) -> Any:
        x = batch(k)
        x.scale = 2.0  # type: ignore[attr-defined]
        return trained(lambda m, k: m(x))(m, k)

    parity(lambda: Small(lambda m, x, y: y * x.scale), step, played=False)


@pytest.mark.parametrize("write", ["zero_", "add_"])
def test_a_tensor_outside_that_is_written(write: str) -> None:
    """It is read on the way, however deep it lies, and found to be one that the script fills anew in every step."""
    total = torch.zeros(6, device="xla")
    hidden = {"total": [[[[total]]]]}

    def rule(m: Any, x: Any, y: Any) -> Any:
        t = hidden["total"][0][0][0][0]
        t.zero_() if write == "zero_" else t.add_(1)
        return y

    def step(m: Any, k: int) -> Any:
        total.fill_(0) if write == "add_" else total.fill_(7)
        found = trained()(m, k)
        return [found, total]

    parity(lambda: Small(rule), step, played=False, off="it reads a tensor, beside those that the module holds, that is full of one number")


def test_a_cache_filled_by_the_first_call() -> None:
    def rule(m: Any, x: Any, y: Any) -> Any:
        if m.table is None:
            m.table = torch.arange(6.0, device=x.device)
        return y * m.table

    model = parity(lambda: Small(rule, table=None), steps=8)
    assert player(model).played == 3  # of 8: one fills it, one is looked at, two are recorded, one is checked


def test_two_weights_that_share_an_array_for_now() -> None:
    def make() -> nn.Module:
        layer = nn.Linear(6, 6).to("xla")
        return nn.Sequential(layer, nn.Tanh(), copy.deepcopy(layer))

    parity(make)
