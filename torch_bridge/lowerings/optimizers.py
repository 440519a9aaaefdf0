"""Fused optimizer steps and the gradient scaler's checks, as functions from the old state to the new one.

Each step follows torch's CPU kernels, which compute in the dtype of the parameters (float32 for half precision). The
scalars of a step (bias corrections, step size) are computed in float64 from `state_steps`. Where `found_inf` is 1 the
whole step is skipped. The schema's floats that schedulers change (learning rate, weight decay, betas, momentum) are inputs of
the program: they arrive as `Scalar`s from the recorder, and may be plain floats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch

from torch_bridge.ir import dtypes
from torch_bridge.lowerings.precision import opmath
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array, Operand, Scalar

aten = torch.ops.aten
Lists = tuple[list[Any], ...]


def _double(x: Operand) -> Array:
    """A number or one-element array as a 0-d float64 array."""
    return jnp.reshape(dtypes.cast(x, jnp.float64), ())


def _is_zero(x: Scalar) -> bool:
    """True for a constant 0, whose term torch leaves out (0 * inf would be NaN)."""
    return not isinstance(x, dtypes.Scalar) and x == 0


def _step_each(
    update: Callable[..., list[Any]],
    states: tuple[Sequence[Array], ...],
    steps: Sequence[Array] | None,
    grad_scale: Array | None,
    found_inf: Array | None,
    maximize: bool,
) -> Lists:
    """Run `update(step, param, grad, *rest)` on each parameter and its state; states = (params, grads, ...), maybe with empty lists.

    The returned gradients are the given ones, divided by `grad_scale` if there is one.
    """
    results: Lists = tuple([] for _ in states)
    for i, param in enumerate(states[0]):
        old = [s[i] if s else None for s in states]
        wide = opmath(param.dtype)
        state: list[Any] = [None if x is None else x.astype(wide) for x in old]
        if grad_scale is not None:
            state[1] = state[1] / jnp.reshape(grad_scale, ()).astype(wide)
        unscaled = state[1]
        if maximize:
            state[1] = -state[1]
        new = update(None if steps is None else steps[i], *state)
        new.insert(1, unscaled)
        for out, x, before in zip(results, new, old, strict=True):
            if before is not None:
                out.append(_unless(found_inf, before, x.astype(before.dtype)))
    return results


def _lerp(start: Array, end: Array, weight: Array) -> Array:
    """torch's two forms, chosen by the weight (a 0-d float64 array)."""
    near, far = weight.astype(start.dtype), (1 - weight).astype(start.dtype)
    return jnp.where(weight < 0.5, start + near * (end - start), end - (end - start) * far)


def _unless(found_inf: Array | None, before: Array, after: Array) -> Array:
    return after if found_inf is None else jnp.where(jnp.reshape(found_inf, ()) == 1, before, after)


def _adam(decoupled: bool) -> Callable[..., Lists]:
    def adam(
        self: Sequence[Array],
        grads: Sequence[Array],
        exp_avgs: Sequence[Array],
        exp_avg_sqs: Sequence[Array],
        max_exp_avg_sqs: Sequence[Array],
        state_steps: Sequence[Array],
        *,
        lr: Operand,
        beta1: Scalar,
        beta2: Scalar,
        weight_decay: Scalar,
        eps: float,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Array | None = None,
        found_inf: Array | None = None,
    ) -> Lists:
        rate, b1, b2 = _double(lr), _double(beta1), _double(beta2)

        def update(step: Array, param: Array, grad: Array, mean: Array, square: Array, peak: Any) -> list[Any]:
            def number(x: Operand) -> Array:
                return dtypes.cast(x, param.dtype)

            if not _is_zero(weight_decay) and decoupled:
                param = param - number(rate * _double(weight_decay)) * param
            elif not _is_zero(weight_decay):
                grad = grad + param * number(weight_decay)
            mean = _lerp(mean, grad, 1 - b1)
            square = square * number(b2) + number(1 - b2) * grad * grad
            peak = jnp.maximum(peak, square) if amsgrad else None
            count = _double(step)
            root = jnp.sqrt(1 - b2**count)
            step_size = rate / (1 - b1**count)
            denominator = jnp.sqrt(peak if amsgrad else square) / number(root) + number(eps)
            return [param - number(step_size) * mean / denominator, mean, square, peak]

        states = (self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs if amsgrad else [])
        out = _step_each(update, states, state_steps, grad_scale, found_inf, maximize)
        return out if amsgrad else (*out[:4], list(max_exp_avg_sqs))

    return adam


_ADAM_FLOATS = ("lr", "beta1", "beta2", "weight_decay")
lowering(aten._fused_adam.default, aten._fused_adam.tensor_lr, floats=_ADAM_FLOATS, entrywise=True)(_adam(decoupled=False))
lowering(aten._fused_adamw.default, aten._fused_adamw.tensor_lr, floats=_ADAM_FLOATS, entrywise=True)(_adam(decoupled=True))


@lowering(aten._fused_sgd.default, aten._fused_sgd.tensor_lr, floats=("lr", "momentum", "weight_decay"), entrywise=True)
def fused_sgd(
    self: Sequence[Array],
    grads: Sequence[Array],
    momentum_buffer_list: Sequence[Array],
    *,
    weight_decay: Scalar,
    momentum: Scalar,
    lr: Operand,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Array | None = None,
    found_inf: Array | None = None,
) -> Lists:
    def update(_: None, param: Array, grad: Array, buffer: Array | None) -> list[Any]:
        def number(x: Operand) -> Array:
            return dtypes.cast(x, param.dtype)

        if not _is_zero(weight_decay):
            grad = grad + param * number(weight_decay)
        if buffer is not None and not _is_zero(momentum):
            buffer = grad if is_first_step else buffer * number(momentum) + grad * number(1 - dampening)
            grad = grad + buffer * number(momentum) if nesterov else buffer
        return [param - number(_double(lr)) * grad, buffer]

    return _step_each(update, (self, grads, momentum_buffer_list), None, grad_scale, found_inf, maximize)


def _fused_adagrad(
    self: Sequence[Array],
    grads: Sequence[Array],
    state_sums: Sequence[Array],
    state_steps: Sequence[Array],
    *,
    lr: Operand,
    lr_decay: Scalar,
    weight_decay: Scalar,
    eps: float,
    maximize: bool,
    grad_scale: Array | None = None,
    found_inf: Array | None = None,
) -> Lists:
    def update(step: Array, param: Array, grad: Array, total: Array) -> list[Any]:
        def number(x: Operand) -> Array:
            return dtypes.cast(x, param.dtype)

        if not _is_zero(weight_decay):
            grad = grad + param * number(weight_decay)
        total = total + grad * grad
        rate = _double(lr) / (1 + (_double(step) - 1) * _double(lr_decay))
        return [param - number(rate) * grad / (jnp.sqrt(total) + number(eps)), total]

    return _step_each(update, (self, grads, state_sums), state_steps, grad_scale, found_inf, maximize)


@lowering(aten._fused_adagrad.tensor_lr, floats=("weight_decay",), entrywise=True)
def fused_adagrad_tensor_lr(
    self: Sequence[Array], grads: Sequence[Array], state_sums: Sequence[Array], state_steps: Sequence[Array], **options: Any
) -> Lists:
    return _fused_adagrad(self, grads, state_sums, state_steps, **options)


@lowering(aten._fused_adagrad.default, floats=("lr", "weight_decay"), entrywise=True)
def fused_adagrad(
    self: Sequence[Array], grads: Sequence[Array], state_sums: Sequence[Array], state_steps: Sequence[Array], **options: Any
) -> Lists:
    return (*_fused_adagrad(self, grads, state_sums, state_steps, **options), list(state_steps))


@lowering(aten._amp_foreach_non_finite_check_and_unscale.default, entrywise=True)  # found_inf, no list, depends on all
def amp_unscale(self: Sequence[Array], found_inf: Array, inv_scale: Array) -> tuple[list[Array], Array]:
    """Gradients times `inv_scale`, and found_inf set to 1 where any of them was not finite."""
    bad = jnp.zeros((), jnp.bool_)
    for grad in self:
        bad = bad | ~jnp.all(jnp.isfinite(grad))
    scale = jnp.reshape(inv_scale, ())
    unscaled = [(g.astype(opmath(g.dtype)) * scale.astype(opmath(g.dtype))).astype(g.dtype) for g in self]
    return unscaled, jnp.where(bad, jnp.ones_like(found_inf), found_inf)


@lowering(aten._amp_update_scale.default)
def amp_update_scale(
    self: Array, growth_tracker: Array, found_inf: Array, scale_growth_factor: float, scale_backoff_factor: float, growth_interval: int
) -> tuple[Array, Array]:
    """Back off after an overflow; grow after `growth_interval` good steps in a row, unless that would overflow."""
    overflow = jnp.reshape(found_inf, self.shape) != 0
    good = growth_tracker + 1
    due = good == growth_interval
    grown = (self.astype(jnp.float64) * scale_growth_factor).astype(self.dtype)
    grown = jnp.where(jnp.isfinite(grown), grown, self)
    backed_off = (self.astype(jnp.float64) * scale_backoff_factor).astype(self.dtype)
    scale = jnp.where(overflow, backed_off, jnp.where(due, grown, self))
    tracker = jnp.where(overflow | due, jnp.zeros_like(growth_tracker), good)
    return scale, tracker.astype(growth_tracker.dtype)
