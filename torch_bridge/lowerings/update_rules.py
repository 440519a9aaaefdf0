"""What known optimizers do to one parameter in one step, as JAX functions: torch's own operations in torch's order, so numbers and roundings are torch's.

A rule takes the parameter, its gradient, its state (moments), the step's numbers and a set of flags, and gives the new parameter and state. What depends
on Python numbers alone (bias corrections, the learning rate's sign) was computed on the host, in double precision, as torch does. Each operation's result is
rounded as a recorded op's is in the precision mode of the program (`precision_mode.store`).

No rule of optax takes the place of one of these: after 20 steps in bfloat16 between 4 and 73 % of elements are torch's bit for bit, with these all are; in
float32 and float64 only SGD's (`optax.trace`, `optax.add_decayed_weights`) is the same bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from torch_bridge.lowerings import arithmetic
from torch_bridge.lowerings.precision import widen
from torch_bridge.precision import precision_mode


def _rounded(op: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(op)
    def run(*args: Any, **kwargs: Any) -> Any:
        store = precision_mode.store(precision_mode.current())
        return op(*args, **kwargs) if store is None else store(op(*args, **kwargs))

    return run


add, addcdiv, addcmul = _rounded(arithmetic.add), _rounded(arithmetic.addcdiv), _rounded(arithmetic.addcmul)
div, lerp, mul = _rounded(arithmetic.div), _rounded(arithmetic.lerp), _rounded(arithmetic.mul)

Rule = Callable[[Any, Any, Sequence[Any], Sequence[Any], frozenset[str]], list[Any]]


def sgd(p: Any, g: Any, state: Sequence[Any], numbers: Sequence[Any], flags: frozenset[str]) -> list[Any]:
    """numbers: weight decay, momentum, the gradient's weight in the buffer (1 - dampening; 1 in the first step), -lr. flags: decay, nesterov, maximize."""
    decay, momentum, weight, minus_lr = numbers
    g = _gradient(p, g, decay, flags)
    if not state:
        return [add(p, g, alpha=minus_lr)]
    buffer = add(mul(state[0], momentum), g, alpha=weight)
    g = add(g, buffer, alpha=momentum) if "nesterov" in flags else buffer
    return [add(p, g, alpha=minus_lr), buffer]


def adam(p: Any, g: Any, state: Sequence[Any], numbers: Sequence[Any], flags: frozenset[str]) -> list[Any]:
    """numbers: weight decay (decoupled: 1 - lr * decay), 1 - beta1, beta2, 1 - beta2, root of the second bias correction, eps, -step size.

    flags: decay, decoupled, maximize. A third state is amsgrad's.
    """
    decay, near, beta2, rest, root, eps, minus_step = numbers
    if "decoupled" in flags and "decay" in flags:
        p, flags = mul(p, decay), flags - {"decay"}
    g = _gradient(p, g, decay, flags)
    mean, square, *peak = state
    mean = lerp(mean, g, near)
    square = addcmul(mul(square, beta2), g, g, rest)
    peak = [jnp.maximum(x, square) for x in peak]
    denominator = add(div(sqrt(peak[0] if peak else square), root), eps)
    return [addcdiv(p, mean, denominator, minus_step), mean, square, *peak]


def adamw_fp32(p: Any, g: Any, state: Sequence[Any], numbers: Sequence[Any], flags: frozenset[str]) -> list[Any]:
    """NxD's AdamW_FP32OptimParams. numbers: beta1, 1 - beta1, beta2, 1 - beta2, eps, -step size, -lr * decay. flags: decay."""
    beta1, rest1, beta2, rest2, eps, minus_step, minus_decay = numbers
    g = g.astype(state[0].dtype)
    mean = add(mul(state[0], beta1), g, alpha=rest1)
    square = addcmul(mul(state[1], beta2), g, g, rest2)
    p = addcdiv(p, mean, add(sqrt(square), eps), minus_step).astype(p.dtype)
    return [add(p, p, alpha=minus_decay) if "decay" in flags else p, mean, square]


def adagrad(p: Any, g: Any, state: Sequence[Any], numbers: Sequence[Any], flags: frozenset[str]) -> list[Any]:
    """numbers: weight decay, eps, -lr of this step. flags: decay, maximize."""
    decay, eps, minus_lr = numbers
    g = _gradient(p, g, decay, flags)
    total = addcmul(state[0], g, g)
    return [addcdiv(p, g, add(sqrt(total), eps), minus_lr), total]


RULES: dict[str, Rule] = {"sgd": sgd, "adam": adam, "adamw_fp32": adamw_fp32, "adagrad": adagrad}


def _gradient(p: Any, g: Any, decay: Any, flags: frozenset[str]) -> Any:
    """The gradient, turned round to maximise, with weight decay added."""
    g = -g if "maximize" in flags else g
    return add(g, p, alpha=decay) if "decay" in flags else g


@_rounded
def sqrt(x: Any) -> Any:
    """In the dtype that torch computes in, rounded once."""
    return jnp.sqrt(widen(x)).astype(x.dtype)
