"""`to_optax` in the middle of training: the torch optimizer's state goes over and comes back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch import nn, optim
from torch.optim import lr_scheduler

import torch_bridge
from torch_bridge.export.optax_transform import TorchTransformation
from torch_bridge.runtime import transfer

torch_bridge.register()

HALF = 10

CASES: dict[str, Callable[[Any], optim.Optimizer]] = {
    "adam-amsgrad": lambda p: optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd-dampening": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.5, weight_decay=0.1),
}


class Net(nn.Module):
    """A matrix, a vector, and a weight that is tied to another name."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 3, dtype=dtype)
        self.down = nn.Linear(3, 4, bias=False, dtype=dtype)
        self.again = nn.Linear(3, 4, bias=False, dtype=dtype)
        self.again.weight = self.down.weight

    def forward(self, x: Any) -> Any:
        return self.again(self.down(torch.tanh(self.up(x))) @ self.up.weight.T)


def schedule(optimizer: optim.Optimizer) -> Any:
    return lr_scheduler.ExponentialLR(optimizer, 0.9)


def gradients(k: int, model: Any) -> dict[str, torch.Tensor]:
    return {
        name: torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * k + i)).to(p.dtype)
        for i, (name, p) in enumerate(model.named_parameters())
    }


def in_torch(model: Any, optimizer: Any, scheduler: Any, steps: range) -> None:
    for k in steps:
        for name, g in gradients(k, model).items():
            p = model.get_parameter(name)
            p.grad = g.to(p.device) if p.requires_grad else None
        optimizer.step()
        scheduler.step()
    optimizer.zero_grad()


def in_jax(tx: Any, model: Any, params: Any, state: Any, steps: range) -> Any:
    for k in steps:
        grads = {name: jnp.asarray(transfer.to_numpy(g)) for name, g in gradients(k, model).items()}
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def load(params: Any, model: Any) -> None:
    """Parameters back into the torch model."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(transfer.from_numpy(np.array(params[name])).to(p.device))


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def go_on(tx: Any, model: Any) -> tuple[Any, Any]:
    """From where torch stands, in JAX, for the second half."""
    params = torch_bridge.to_jax(model).params
    return in_jax(tx, model, params, tx.init(params), range(HALF, 2 * HALF))


def close(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_over_and_back(name: str) -> None:
    """Half the steps in torch, half in JAX; then a quarter more in torch again: as if all had been torch's."""
    model, always = Net(), Net()
    optimizer, reference = CASES[name](model.parameters()), CASES[name](always.parameters())
    scheduler, its = schedule(optimizer), schedule(reference)
    in_torch(model, optimizer, scheduler, range(HALF))
    in_torch(always, reference, its, range(2 * HALF))

    tx = torch_bridge.to_optax(optimizer, scheduler, model=model)
    params, state = go_on(tx, model)
    load(params, model)
    close(values(model), values(always))

    optimizer.load_state_dict(tx.state_dict(state))
    scheduler.load_state_dict(tx.scheduler_state_dict(state))
    close(optimizer.state_dict()["state"], reference.state_dict()["state"])
    assert_same_options(optimizer, reference)
    assert scheduler.last_epoch == its.last_epoch and scheduler.get_last_lr() == its.get_last_lr()
    in_torch(model, optimizer, scheduler, range(2 * HALF, 3 * HALF))
    in_torch(always, reference, its, range(2 * HALF, 3 * HALF))
    close(values(model), values(always))


def assert_same_options(optimizer: Any, other: Any) -> None:
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == [
        {k: v for k, v in g.items() if k != "params"} for g in other.param_groups
    ]


@pytest.mark.parametrize("name", CASES)
def test_into_an_optimizer_without_state(name: str) -> None:
    """All steps in JAX; the state into an optimizer that has made none, as after a restart."""
    model, always = Net(), Net()
    optimizer, reference = CASES[name](model.parameters()), CASES[name](always.parameters())
    scheduler, its = schedule(optimizer), schedule(reference)
    tx = torch_bridge.to_optax(optimizer, scheduler, model=model)
    params = torch_bridge.to_jax(model).params
    assert tx.state_dict(tx.init(params))["state"] == optimizer.state_dict()["state"], "no step, no state"
    _, state = in_jax(tx, model, params, tx.init(params), range(HALF))
    optimizer.load_state_dict(tx.state_dict(state))
    in_torch(always, reference, its, range(HALF))
    close(optimizer.state_dict()["state"], reference.state_dict()["state"])
    assert_same_options(optimizer, reference)


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "adafactor"])
def test_on_xla(name: str) -> None:
    """The same from parameters and a state on device xla, and onto it."""
    model, always = Net().to("xla"), Net()
    optimizer, reference = CASES[name](model.parameters()), CASES[name](always.parameters())
    scheduler, its = schedule(optimizer), schedule(reference)
    in_torch(model, optimizer, scheduler, range(HALF))
    in_torch(always, reference, its, range(2 * HALF))
    tx = torch_bridge.to_optax(optimizer, scheduler, model=model)
    params, state = go_on(tx, model)
    load(params, model)
    close(values(model), values(always))
    optimizer.load_state_dict(tx.state_dict(state))
    held = optimizer.state[model.up.weight]
    assert all(t.device.type == "xla" for key, t in held.items() if key != "step")
    close({k: v.cpu() for k, v in held.items()}, reference.state[always.up.weight])
    scheduler.load_state_dict(tx.scheduler_state_dict(state))
    in_torch(model, optimizer, scheduler, range(2 * HALF, 2 * HALF + 1))
    in_torch(always, reference, its, range(2 * HALF, 2 * HALF + 1))
    close(values(model), values(always))


def test_bfloat16() -> None:
    """Moments stay in bfloat16, as torch keeps them."""
    model, always = Net(torch.bfloat16), Net(torch.bfloat16)
    optimizer, reference = CASES["adamw"](model.parameters()), CASES["adamw"](always.parameters())
    scheduler, its = schedule(optimizer), schedule(reference)
    in_torch(model, optimizer, scheduler, range(HALF))
    in_torch(always, reference, its, range(2 * HALF))
    tx = torch_bridge.to_optax(optimizer, scheduler, model=model)
    params, state = go_on(tx, model)
    load(params, model)
    close(values(model), values(always), 2.0**-7)
    assert {str(x.dtype) for x in jax.tree.leaves(state)} == {"int32", "bfloat16"}
    optimizer.load_state_dict(tx.state_dict(state))
    assert {t.dtype for key, t in optimizer.state[model.up.weight].items() if key != "step"} == {torch.bfloat16}


def groups(model: Any) -> list[dict[str, Any]]:
    """Two groups and a frozen parameter; the third Linear is in no group."""
    return [{"params": [model[0].weight, model[1].weight], "lr": 0.2}, {"params": [model[0].bias, model[1].bias], "weight_decay": 0.0}]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4))
    model[0].bias.requires_grad_(False)
    return model


def test_groups_frozen_parameters_and_dtypes() -> None:
    """Each group has its own numbers, each dtype its own precision; what torch does not train stays as it is."""
    model, always = layers(), layers()
    optimizer, reference = optim.AdamW(groups(model), lr=0.1, weight_decay=0.1), optim.AdamW(groups(always), lr=0.1, weight_decay=0.1)
    scheduler, its = (lr_scheduler.LambdaLR(o, [lambda k: 0.9**k, lambda k: 0.8**k]) for o in (optimizer, reference))
    in_torch(model, optimizer, scheduler, range(HALF))
    in_torch(always, reference, its, range(2 * HALF))
    before = values(model)
    tx = torch_bridge.to_optax(optimizer, scheduler, model=model, steps=HALF)
    params, state = go_on(tx, model)
    load(params, model)
    found, expected = values(model), values(always)
    for name, x in found.items():
        close(x, expected[name], 2.0**-7 if name.startswith("1.") else 1e-6)
        frozen = name in ("0.bias", "2.weight", "2.bias")
        assert torch.equal(x, before[name]) == frozen, name
    optimizer.load_state_dict(tx.state_dict(state))
    assert_same_options(optimizer, reference)
    assert optimizer.state.keys() == {model[0].weight, model[1].weight, model[1].bias}


def test_parameters_with_steps_of_their_own() -> None:
    """One that was frozen for the first steps: torch counts each parameter's steps, and so do we."""
    model, always = Net(), Net()
    found = []
    for net in (model, always):
        optimizer = CASES["adamw"](net.parameters())
        net.up.weight.requires_grad_(False)
        in_torch(net, optimizer, schedule(optimizer), range(HALF))
        net.up.weight.requires_grad_(True)
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()
        found.append(optimizer)
    tx = torch_bridge.to_optax(found[0], model=model)
    params, state = go_on(tx, model)
    in_torch(always, found[1], lr_scheduler.ConstantLR(found[1], 1.0), range(HALF, 2 * HALF))
    load(params, model)
    close(values(model), values(always))
    assert sorted(state.groups[0].steps.tolist()) == [HALF + 1, 2 * HALF + 1, 2 * HALF + 1]
    assert {int(s["step"]) for s in tx.state_dict(state)["state"].values()} == {HALF + 1, 2 * HALF + 1}


def test_names_from_the_optimizer() -> None:
    """torch keeps them if it is given them; no model is needed then."""
    model = Net()
    optimizer = optim.AdamW(model.named_parameters(), lr=0.1)
    scheduler = schedule(optimizer)
    in_torch(model, optimizer, scheduler, range(2))
    by_names = torch_bridge.to_optax(optimizer, scheduler)
    by_model = torch_bridge.to_optax(optimizer, scheduler, model=model)
    close(
        *[
            [torch.from_numpy(np.array(x)) for x in jax.tree.leaves(tx.init(torch_bridge.to_jax(model).params))]
            for tx in (by_names, by_model)
        ]
    )


def test_without_names() -> None:
    """Enough for a new optimizer that treats all parameters alike."""
    model = Net()
    tx = torch_bridge.to_optax(optim.AdamW(model.parameters(), lr=0.1))
    params = torch_bridge.to_jax(model).params
    found, state = in_jax(tx, model, params, tx.init(params), range(HALF))
    in_torch(model, reference := optim.AdamW(model.parameters(), lr=0.1), lr_scheduler.ConstantLR(reference, 1.0), range(HALF))
    close({name: torch.from_numpy(np.array(x)) for name, x in found.items()}, values(model))
    with pytest.raises(ValueError, match="no names.*pass the torch model to to_optax as `model`"):
        tx.state_dict(state)


def test_steps_after_to_optax() -> None:
    """`init` reads the optimizer as it is then, and the scheduler's place."""
    model, always = Net(), Net()
    optimizer, reference = CASES["adamw"](model.parameters()), CASES["adamw"](always.parameters())
    scheduler, its = schedule(optimizer), schedule(reference)
    tx = torch_bridge.to_optax(optimizer, scheduler, model=model)
    in_torch(model, optimizer, scheduler, range(HALF))
    in_torch(always, reference, its, range(2 * HALF))
    params, state = go_on(tx, model)
    load(params, model)
    close(values(model), values(always))
    assert int(state.count) == 2 * HALF


def test_accumulated_gradients() -> None:
    """`optax.MultiSteps` around it: a step in two, also in bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        model = Net(dtype)
        tx = torch_bridge.to_optax(CASES["adamw"](model.parameters()), model=model)
        params = torch_bridge.to_jax(model).params
        twice = optax.MultiSteps(tx, 2)
        state = twice.init(params)
        for _ in range(2):
            updates, state = twice.update(params, state, params)
        expected, _ = tx.update(params, tx.init(params), params)
        for name, x in updates.items():
            np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(expected[name], np.float32), rtol=2.0**-7)
        assert state.inner_opt_state.groups[0].steps.tolist() == [1, 1, 1]


# -- states inside of others --------------------------------------------------------------------------------


def test_state_of_an_nnx_optimizer() -> None:
    """`nnx.Optimizer` wraps each array."""
    model = Net()
    optimizer = CASES["adamw"](model.parameters())
    in_torch(model, optimizer, schedule(optimizer), range(HALF))
    tx = torch_bridge.to_optax(optimizer, model=model)
    trained = nnx.Optimizer(torch_bridge.to_nnx(model), tx, wrt=nnx.Param)
    close(tx.state_dict(trained.opt_state)["state"], optimizer.state_dict()["state"])


def test_it_is_an_optax_transformation() -> None:
    """It chains, it passes through `jax.eval_shape`, and it copies."""
    model = Net()
    tx = torch_bridge.to_optax(CASES["adamw"](model.parameters()), model=model)
    assert isinstance(tx, TorchTransformation) and isinstance(tx, optax.GradientTransformationExtraArgs)
    params = torch_bridge.to_jax(model).params
    chained = optax.chain(optax.clip_by_global_norm(1.0), tx)
    state = chained.init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    updates, state = jax.jit(chained.update)(grads, state, params)
    alone, _ = tx.update(grads, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(alone)
    assert {int(s["step"]) for s in tx.state_dict(state[1])["state"].values()} == {1}
    shapes = jax.eval_shape(chained.init, params)
    assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda x: x.shape, state)
    assert copy.copy(tx).init is not None and type(copy.copy(tx)) is TorchTransformation


# -- what is refused -----------------------------------------------------------------------------------------


def test_a_state_without_what_an_option_needs() -> None:
    model = Net()
    optimizer = CASES["adamw"](model.parameters())
    in_torch(model, optimizer, schedule(optimizer), range(1))
    optimizer.param_groups[0]["amsgrad"] = True
    tx = torch_bridge.to_optax(optimizer, model=model)
    with pytest.raises(
        ValueError, match=r"state of \S+ has \['exp_avg', 'exp_avg_sq', 'step'\] and lacks max_exp_avg_sq: was an option changed"
    ):
        tx.init(torch_bridge.to_jax(model).params)


def test_no_scheduler_to_give_back() -> None:
    model = Net()
    tx = torch_bridge.to_optax(CASES["adamw"](model.parameters()), model=model)
    with pytest.raises(ValueError, match="there is no scheduler: to_optax was given none"):
        tx.scheduler_state_dict(tx.init(torch_bridge.to_jax(model).params))


def test_a_state_from_before() -> None:
    model = Net()
    optimizer = CASES["adamw"](model.parameters())
    scheduler = schedule(optimizer)
    params = torch_bridge.to_jax(model).params
    early = torch_bridge.to_optax(optimizer, scheduler, model=model).init(params)
    in_torch(model, optimizer, scheduler, range(2))
    tx = torch_bridge.to_optax(optimizer, scheduler, model=model)
    with pytest.raises(ValueError, match="the state has seen 0 steps of the scheduler, which had made 2 when to_optax was called"):
        tx.scheduler_state_dict(early)
