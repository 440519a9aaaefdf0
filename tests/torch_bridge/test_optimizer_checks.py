"""Groups of an optimizer that are not looked at in full again: the numbers are those of looking every time, whatever scripts do in between."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import torch_bridge
from torch_bridge.optimizers import group_cache, step_plans
from torch_bridge.runtime import executor

torch_bridge.register()

STEPS = 6
SIZES = ((3, 2), (4,), (2, 2), (1,))


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size).to("xla")) for size in SIZES]


def set_grads(params: list[Any], k: int) -> None:
    for i, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * k + i)).to("xla")


def _state(optimizer: optim.Optimizer, p: Any) -> dict[str, Any]:
    return optimizer.state[p]


def _load(optimizer: optim.Optimizer, params: list[Any], k: int) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _save_and_load(optimizer: optim.Optimizer, params: list[Any], k: int) -> None:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file))


def _replace_a_state(optimizer: optim.Optimizer, params: list[Any], k: int) -> None:
    _state(optimizer, params[1])["exp_avg"] = torch.full_like(params[1], 0.5)


def _change_a_state(optimizer: optim.Optimizer, params: list[Any], k: int) -> None:
    _state(optimizer, params[1])["exp_avg"].mul_(0.5)


def _forget_a_state(optimizer: optim.Optimizer, params: list[Any], k: int) -> None:
    del optimizer.state[params[2]]


def _swap_memory(optimizer: optim.Optimizer, params: list[Any], k: int) -> None:
    params[0].data = params[0].data * 2


def _no_gradient(optimizer: optim.Optimizer, params: list[Any], k: int) -> None:
    params[3].grad = None


def _a_gradient_that_is_the_weight(optimizer: optim.Optimizer, params: list[Any], k: int) -> None:
    params[2].grad = params[2].detach()


def _a_transposed_gradient(optimizer: optim.Optimizer, params: list[Any], k: int) -> None:
    params[2].grad = params[2].grad.t()


def _count(optimizer: optim.Optimizer, params: list[Any], k: int) -> None:
    _state(optimizer, params[0])["step"] += 3


def _another_counter(optimizer: optim.Optimizer, params: list[Any], k: int) -> None:
    _state(optimizer, params[0])["step"] = torch.tensor(7.0)


def _other_memory_for_a_counter(optimizer: optim.Optimizer, params: list[Any], k: int) -> None:
    _state(optimizer, params[0])["step"].set_(torch.tensor(5.0).untyped_storage(), 0, (), ())


def _a_counter_on_xla(optimizer: optim.Optimizer, params: list[Any], k: int) -> None:
    _state(optimizer, params[0])["step"] = _state(optimizer, params[0])["step"].to("xla")


def _options(optimizer: optim.Optimizer, params: list[Any], k: int) -> None:
    optimizer.param_groups[0].update(lr=0.3, betas=(0.8, 0.9), weight_decay=0.0)


def _amsgrad(optimizer: optim.Optimizer, params: list[Any], k: int) -> None:
    optimizer.param_groups[0]["amsgrad"] = False


def _another_group(optimizer: optim.Optimizer, params: list[Any], k: int) -> None:
    torch.manual_seed(k)
    params.append(nn.Parameter(torch.randn(2).to("xla")))
    optimizer.add_param_group({"params": params[-1:], "lr": 0.2})
    set_grads(params, k)


def _another_order(optimizer: optim.Optimizer, params: list[Any], k: int) -> None:
    optimizer.param_groups[0]["params"].reverse()


def _one_less(optimizer: optim.Optimizer, params: list[Any], k: int) -> None:
    optimizer.param_groups[0]["params"].pop()


def _not_fused(optimizer: optim.Optimizer, params: list[Any], k: int) -> None:
    optimizer.param_groups[0]["foreach"] = False


def _nothing(optimizer: optim.Optimizer, params: list[Any], k: int) -> None:
    pass


CHANGES: dict[str, Callable[[optim.Optimizer, list[Any], int], None]] = {
    "load": _load,
    "save and load": _save_and_load,
    "replace a state": _replace_a_state,
    "change a state": _change_a_state,
    "forget a state": _forget_a_state,
    "swap memory": _swap_memory,
    "no gradient": _no_gradient,
    "a gradient that is the weight": _a_gradient_that_is_the_weight,
    "a transposed gradient": _a_transposed_gradient,
    "count": _count,
    "another counter": _another_counter,
    "other memory for a counter": _other_memory_for_a_counter,
    "a counter on xla": _a_counter_on_xla,
    "options": _options,
    "amsgrad": _amsgrad,
    "another group": _another_group,
    "another order": _another_order,
    "one less": _one_less,
    "not fused": _not_fused,
    "nothing": _nothing,
}
MAKE: dict[str, Callable[[Any], optim.Optimizer]] = {
    "adamw": lambda p: optim.AdamW(p, lr=0.1, amsgrad=True),
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
}


def train(make: Callable[[Any], optim.Optimizer], change: Callable[[Any, Any, int], None], again: bool) -> Any:
    """Parameters after each step, and all states at the end; the change comes before the third step, and again before the fourth if `again`."""
    params: list[Any] = parameters()
    optimizer = make(params)
    found = []
    for k in range(STEPS):
        set_grads(params, k)
        if k == 2 or (again and k == 3):
            change(optimizer, params, k)
        optimizer.step()
        executor.sync()
        found.append([p.detach().cpu().clone() for p in params])
    states = [{name: t.detach().cpu().clone() for name, t in _state(optimizer, p).items()} for p in params]
    return found, states


@pytest.mark.thorough(keep=9)
@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("name", CHANGES)
def test_numbers_of_looking_every_time(name: str, again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = train(MAKE["adamw"], CHANGES[name], again)
    monkeypatch.setattr(step_plans, "_NOTES", 0)
    expected = train(MAKE["adamw"], CHANGES[name], again)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_of_sgd(monkeypatch: pytest.MonkeyPatch) -> None:
    found = train(MAKE["sgd"], _swap_memory, True)
    monkeypatch.setattr(step_plans, "_NOTES", 0)
    torch.testing.assert_close(found, train(MAKE["sgd"], _swap_memory, True), rtol=0, atol=0)


@pytest.mark.switched_on("NXD_JAX_FUSED_OPTIMIZERS")
def test_a_group_is_looked_at_in_full_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    gather = step_plans._gather
    monkeypatch.setattr(step_plans, "_gather", lambda *args: (looks.append(1), gather(*args))[1])
    train(MAKE["adamw"], _nothing, False)
    assert len(looks) == 1
    looks.clear()
    train(MAKE["sgd"], _nothing, False)
    assert len(looks) <= 2, "the momentum is made in the first step"


@pytest.mark.switched_on("NXD_JAX_FUSED_OPTIMIZERS")
def test_one_that_is_never_the_same_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = group_cache.Known.__init__
    monkeypatch.setattr(group_cache.Known, "__init__", lambda *args: (made.append(1), original(*args))[1])
    params: list[Any] = parameters()
    optimizer = MAKE["adamw"](params)
    for k in range(40):
        set_grads(params, 0)
        _swap_memory(optimizer, params, k)
        optimizer.step()
    assert 1 < len(made) <= step_plans._NOTES


def test_counters_stay_the_tensors_that_they_are() -> None:
    params: list[Any] = parameters()
    optimizer = MAKE["adamw"](params)
    seen: list[torch.Tensor] = []
    for k in range(3):
        set_grads(params, k)
        optimizer.step()
        seen = seen or [_state(optimizer, p)["step"] for p in params]
    assert all(_state(optimizer, p)["step"] is t and float(t) == 3 and t.shape == () for p, t in zip(params, seen, strict=True))


def test_memory_is_let_go() -> None:
    """Neither weights nor states are kept by the notes when the script lets go of them."""
    params: list[Any] = parameters()
    optimizer = MAKE["adamw"](params)
    for k in range(3):
        set_grads(params, k)
        optimizer.step()
        executor.sync()
    held = [weakref.ref(t) for p in params for t in (p._storage, _state(optimizer, p)["exp_avg"]._storage)]
    optimizer.state.clear()
    for p in params:
        p.grad = None
        p.data = torch.zeros((), device="xla")
    executor.sync()
    gc.collect()
    assert not any(ref() for ref in held)
