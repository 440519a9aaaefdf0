"""A whole torch training step in JAX: `to_jax` or `to_nnx`, and `to_optax`; and what `to_optax` refuses."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
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
from torch_bridge.runtime import transfer

torch_bridge.register()

STEPS = 20
PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "optax.md"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 1)

    def forward(self, x: Any) -> Any:
        return self.down(torch.tanh(self.norm(self.up(x))))


def batch(k: int) -> torch.Tensor:
    return torch.randn(16, 3, generator=torch.Generator().manual_seed(k))


def setting() -> tuple[Any, Any, Any]:
    """A model whose norm and biases are not decayed, as usual."""
    model = Net()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.01, weight_decay=0.1)
    return model, optimizer, lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS)


def in_torch() -> tuple[dict[str, torch.Tensor], list[float]]:
    model, optimizer, scheduler = setting()
    losses = []
    for k in range(STEPS):
        optimizer.zero_grad()
        x = batch(k)
        loss = nn.functional.mse_loss(model(x), x.sum(-1, keepdim=True))
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return {name: p.detach() for name, p in model.named_parameters()}, losses


def assert_same(found: dict[str, Any], losses: Any) -> None:
    expected, its = in_torch()
    found = {name: torch.from_numpy(np.array(x)) for name, x in found.items()}
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert [float(x) for x in losses] == pytest.approx(its, rel=1e-5)


def test_a_step_with_to_jax() -> None:
    model, optimizer, scheduler = setting()
    f = torch_bridge.to_jax(model)
    tx = torch_bridge.to_optax(optimizer, scheduler, model=model)

    def loss_of(params: Any, x: Any) -> Any:
        out, _ = f(params, f.buffers, None, x)
        return ((out - x.sum(-1, keepdims=True)) ** 2).mean()

    @jax.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params, state, losses = f.params, tx.init(f.params), []
    for k in range(STEPS):
        params, state, loss = step(params, state, transfer.to_numpy(batch(k)))
        losses.append(loss)
    assert_same(params, losses)
    optimizer.load_state_dict(tx.state_dict(state))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(scheduler.optimizer.param_groups[1]["lr"])


def test_a_step_with_to_nnx() -> None:
    model, optimizer, scheduler = setting()
    module = torch_bridge.to_nnx(model)
    trained = nnx.Optimizer(module, torch_bridge.to_optax(optimizer, scheduler, model=model), wrt=nnx.Param)

    def loss_of(module: Any, x: Any) -> Any:
        return ((module(x) - x.sum(-1, keepdims=True)) ** 2).mean()

    @nnx.jit
    def step(module: Any, trained: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(loss_of)(module, x)
        trained.update(module, grads)
        return loss

    losses = [step(module, trained, jnp.asarray(transfer.to_numpy(batch(k)))) for k in range(STEPS)]
    names = [name for name, _ in model.named_parameters()]
    assert_same({name: getattr(getattr(module, name.split(".")[0]), name.split(".")[1])[...] for name in names}, losses)
    steps = {int(s["step"]) for s in trained.tx.state_dict(trained.opt_state)["state"].values()}
    assert steps == {STEPS}


def test_the_code_of_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks of docs/how-to/optax.md, one after the other."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    torch.testing.assert_close(torch.from_numpy(np.array(names["params"]["0.weight"])), names["model"][0].weight.detach())


# -- what is refused -----------------------------------------------------------------------------------------


class OwnStep(optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Unknown(optim.Optimizer):
    pass


class Inherits(optim.AdamW):
    """Its step is AdamW's."""


def test_optimizers_that_are_not_known() -> None:
    model = nn.Linear(2, 1)
    known = "knows torch.optim's AdamW, Adam, SGD, Adagrad, RMSprop, Adafactor, "
    with pytest.raises(
        TypeError, match=known + r"got torch.optim.nadam.NAdam: use optax.nadam, whose numbers are optax's own, or write its rule"
    ):
        torch_bridge.to_optax(optim.NAdam(model.parameters()), model=model)
    with pytest.raises(
        TypeError, match=r"got \S+\.OwnStep: it steps in its own way. If the numbers are AdamW's, make a torch.optim.AdamW and load"
    ):
        torch_bridge.to_optax(OwnStep(model.parameters()), model=model)
    with pytest.raises(TypeError, match=r"got \S+\.Unknown: write its rule as an optax.GradientTransformation"):
        torch_bridge.to_optax(Unknown(model.parameters(), {}), model=model)
    torch_bridge.to_optax(Inherits(model.parameters()), model=model)


def test_every_optimizer_that_torch_has() -> None:
    """One that comes new (such as Lion, which torch 2.13 lacks) is refused, not guessed at."""
    known = {"AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "Adafactor"}
    for name, cls in vars(optim).items():
        if isinstance(cls, type) and issubclass(cls, optim.Optimizer) and cls is not optim.Optimizer and name not in known:
            model = nn.Linear(2, 1, bias=False)
            with pytest.raises(TypeError, match=rf"got \S+\.{name}: "):
                torch_bridge.to_optax(cls(model.parameters(), lr=0.1), model=model)
    assert not hasattr(optim, "Lion"), "torch has Lion now: optax.scale_by_lion may be what it does"


def test_arguments_of_other_kinds() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(TypeError, match=r"takes a torch.optim.Optimizer, got Linear"):
        torch_bridge.to_optax(model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be the torch.nn.Module that is trained, got JaxFunction"):
        torch_bridge.to_optax(optim.SGD(model.parameters()), model=torch_bridge.to_jax(model))  # type: ignore[arg-type]
    betas = (torch.tensor(0.9), torch.tensor(0.99))
    with pytest.raises(TypeError, match="betas are tensors, which torch rounds.*as floats"):
        torch_bridge.to_optax(optim.AdamW(model.parameters(), betas=betas), model=model)  # type: ignore[arg-type]
    complex_weight = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    with pytest.raises(TypeError, match=r"knows real parameters, and 0 of shape \[2\] is torch.complex64"):
        torch_bridge.to_optax(optim.AdamW(complex_weight.parameters()), model=complex_weight)


def test_parameters_that_cannot_be_told_apart() -> None:
    model = nn.Linear(2, 1)
    two = optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.1}], lr=0.2)
    with pytest.raises(ValueError, match="several param_groups, and parameters cannot be told apart without names: pass the torch model"):
        torch_bridge.to_optax(two)
    stepped = optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    stepped.step()
    with pytest.raises(ValueError, match="made steps, and its state cannot be told apart without names"):
        torch_bridge.to_optax(stepped)


def test_params_of_something_else() -> None:
    """Not silently trained otherwise than in torch."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    params = torch_bridge.to_jax(model).params
    head = optim.AdamW(model[1].parameters())
    with pytest.raises(ValueError, match="trains 2 parameters, and these params have 4 leaves, or other shapes: pass the torch model"):
        torch_bridge.to_optax(head).init(params)
    tx = torch_bridge.to_optax(head, model=model)
    tx.init(params)
    with pytest.raises(ValueError, match=r"missing \['1.weight'\], unknown \['2.weight'\]"):
        tx.init({**{k: v for k, v in params.items() if k != "1.weight"}, "2.weight": params["1.weight"]})
    with pytest.raises(ValueError, match=r"other shapes than those of the optimizer: 1.weight is \[2\], in torch \[1, 2\]"):
        tx.init({**params, "1.weight": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"a parameter of shape \[1, 2\] \(in param_groups\[0\]\) that `model` does not have.*ModuleDict"):
        torch_bridge.to_optax(head, model=model[0])
    state = tx.init(params)
    with pytest.raises(
        ValueError, match=r"updates have the parameters \['1.bias'\], params \['1.bias', '1.weight'\], and the state was made for 2"
    ):
        tx.update({"1.bias": params["1.bias"]}, state, params)
    with pytest.raises(ValueError, match=r"needs the params: tx.update\(grads, state, params\)"):
        tx.update(params, tx.init(params))


def test_nested_params() -> None:
    """Any pytree whose paths are the names, a parameter named `value` too."""
    model = nn.Module()
    model.inner = nn.ParameterDict({"value": torch.ones(2), "other": torch.ones(3)})
    optimizer = optim.SGD([{"params": [model.inner["value"]]}, {"params": [model.inner["other"]], "lr": 0.5}], lr=1.0)
    tx = torch_bridge.to_optax(optimizer, model=model)
    params = {"inner": {"value": jnp.ones(2), "other": jnp.ones(3)}}
    updates, _ = tx.update(params, tx.init(params), params)
    assert jax.tree.map(lambda x: x.tolist(), updates) == {"inner": {"value": [-1.0, -1.0], "other": [-0.5] * 3}}


def test_parameters_without_gradients() -> None:
    """torch leaves them alone; with zeros for gradients they would decay."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = optim.AdamW(model.parameters(), weight_decay=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_bridge.to_optax(optimizer, model=model)  # nothing is known yet
    model[0](torch.ones(1, 2)).sum().backward()
    text = r"^1.weight, 1.bias had no gradient so far: torch leaves such parameters alone.*call requires_grad_\(False\) before to_optax"
    with pytest.warns(UserWarning, match=text):
        torch_bridge.to_optax(optimizer, model=model)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match=text) as seen:
        torch_bridge.to_optax(optimizer, model=model)
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model[1].requires_grad_(False)
        torch_bridge.to_optax(optimizer, model=model)
        optimizer.param_groups[0]["weight_decay"] = 0.0
        model[1].requires_grad_(True)
        torch_bridge.to_optax(optimizer, model=model)
