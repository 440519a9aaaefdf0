"""`to_optax`: torch's numbers, step by step, for every optimizer it knows and each of their options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn, optim

import torch_bridge
from torch_bridge import _compat
from torch_bridge.runtime import transfer

torch_bridge.register()

Make = Callable[[Any], optim.Optimizer]
SHAPES = ((2, 3, 4), (4,))
STEPS = 20

CASES: dict[str, Make] = {
    "adam": lambda p: optim.Adam(p, lr=0.1),
    "adam-decay": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-3),
    "adam-decoupled": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True),
    "adam-amsgrad": lambda p: optim.Adam(p, lr=0.1, amsgrad=True, maximize=True),
    "adam-no-momentum": lambda p: optim.Adam(p, lr=0.1, betas=(0.0, 0.999)),
    "adamw": lambda p: optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "adamw-amsgrad": lambda p: optim.AdamW(p, lr=0.1, amsgrad=True),
    "adamw-tensor": lambda p: optim.AdamW(p, lr=torch.tensor(0.1)),
    "adamw-foreach": lambda p: optim.AdamW(p, lr=0.1, foreach=True),
    "adamw-fused": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "sgd": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.1),
    "sgd-momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd-dampening": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, maximize=True),
    "sgd-nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "adagrad-decay": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1, weight_decay=0.1, maximize=True),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, weight_decay=0.1),
    "rmsprop-momentum": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, maximize=True),
    "rmsprop-centered": lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9, alpha=0.9),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.5, weight_decay=0.1),
    "adafactor-eps": lambda p: optim.Adafactor(p, lr=0.01, eps=(1e-3, 1e-2), d=2.0, beta2_decay=-0.5, maximize=True),
}


def weights(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> nn.ParameterList:
    """A model whose parameters are "0", "1", ...; always the same."""
    torch.manual_seed(0)
    return nn.ParameterList([nn.Parameter(torch.randn(size, dtype=dtype)) for size in shapes])


def gradients(k: int, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of step k."""
    return [
        (1 + k % 3) * torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * k + i), dtype=p.dtype) for i, p in enumerate(like)
    ]


def train(model: Any, optimizer: optim.Optimizer, steps: range, scheduler: Any = None) -> None:
    """torch's steps."""
    params = list(model.parameters())
    for k in steps:
        for p, g in zip(params, gradients(k, params), strict=True):
            p.grad = g.to(p.device) if p.requires_grad else None
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    optimizer.zero_grad()


def train_in_jax(txs: dict[str, Any], model: Any, params: dict[str, Any], states: dict[str, Any], steps: range) -> tuple[Any, Any]:
    """The same in JAX, of several transformations at once: one program takes less time to compile than one for each."""

    @jax.jit
    def step(params: Any, states: Any, grads: Any) -> Any:
        stepped = {name: tx.update(grads, states[name], params[name]) for name, tx in txs.items()}
        return {name: optax.apply_updates(params[name], u) for name, (u, _) in stepped.items()}, {
            name: s for name, (_, s) in stepped.items()
        }

    names = [name for name, _ in model.named_parameters()]
    for k in steps:
        grads = [jnp.asarray(transfer.to_numpy(g)) for g in gradients(k, list(model.parameters()))]
        params, states = step(params, states, dict(zip(names, grads, strict=True)))
    return params, states


def assert_same(params: Any, model: Any, tolerance: float = 1e-6) -> None:
    for name, p in model.named_parameters():
        found = transfer.from_numpy(np.array(params[name]))
        assert found.dtype == p.dtype
        torch.testing.assert_close(found, p.detach().cpu(), rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@functools.cache
def after_training(dtype: torch.dtype, *shapes: tuple[int, ...]) -> dict[str, Any]:
    """The parameters of each case after 20 steps in JAX."""
    model = weights(dtype, shapes)
    txs = {name: torch_bridge.to_optax(make(model.parameters()), model=model) for name, make in CASES.items() if not _refuses(name, dtype)}
    params = torch_bridge.to_jax(model).params
    return train_in_jax(txs, model, dict.fromkeys(txs, params), {name: tx.init(params) for name, tx in txs.items()}, range(STEPS))[0]


def _refuses(name: str, dtype: torch.dtype) -> bool:
    """What is not compared: torch computes with the tensor, in its float32."""
    return name == "adamw-tensor" and dtype == torch.float64


def in_torch(name: str, dtype: torch.dtype, *shapes: tuple[int, ...]) -> nn.ParameterList:
    model = weights(dtype, shapes)
    train(model, CASES[name](model.parameters()), range(STEPS))
    return model


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str) -> None:
    assert_same(after_training(torch.float32, *SHAPES)[name], in_torch(name, torch.float32, *SHAPES))


@pytest.mark.parametrize("name", [name for name in CASES if not _refuses(name, torch.float64)])
def test_numbers_in_double_precision(name: str) -> None:
    """So that what is left in float32 is rounding."""
    with _compat.enable_x64():
        found = after_training(torch.float64, *SHAPES)[name]
    assert_same(found, in_torch(name, torch.float64, *SHAPES), tolerance=1e-12)


@pytest.mark.thorough(keep=20)
@pytest.mark.core(keep=6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("adamw-fused", "adamw-foreach")])
def test_numbers_in_half_precision(name: str, dtype: torch.dtype) -> None:
    """torch rounds after each operation, and so do we: nearly all elements are equal bit for bit, the rest are next to each other.

    Where torch's kernels take fewer than 32 elements at once they round products, too. Its fused and foreach kernels round less often.
    """
    shapes = ((8, 8), (64,))
    found, model = after_training(dtype, *shapes)[name], in_torch(name, dtype, *shapes)
    assert_same(found, model, tolerance=2.0**-7 if dtype == torch.bfloat16 else 2.0**-10)
    equal = [np.array(found[n]) == transfer.to_numpy(p) for n, p in model.named_parameters()]
    assert np.mean(equal[0]) > 0.95 and np.mean(equal[1]) > 0.95
