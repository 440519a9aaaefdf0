"""torch's optimizers as optax chains: optax's own transformations where their numbers are torch's, and rules of ours where they are not.

A chain is built for each step from the step's numbers, for parameters of one group and one dtype, in a dict by name. What is narrower than float32 is given
to it in float32, in which torch computes it too.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import torch
from jax.typing import ArrayLike
from torch import optim

from torch_bridge.lowerings.precision import opmath, round_to

Numbers = dict[str, Any]
"""A group's numbers in one step: floats, or 0-d arrays where a scheduler changes them."""
Moments = dict[str, Any]
"""A parameter's state, by torch's names."""
Flags = frozenset[str]


class Kind(NamedTuple):
    """What is known about a torch optimizer.

    chain(numbers, flags, stored): its step, but for what `chain` does for all. numbers(optimizer, group), flags(group): of an entry of `param_groups`.
    states: torch's names of what optax's own transformations keep. counts: whether torch's state has a step count.
    """

    chain: Callable[[Numbers, Flags, Stored], list[optax.GradientTransformation]]
    numbers: Callable[[optim.Optimizer, dict[str, Any]], Numbers]
    flags: Callable[[dict[str, Any]], Flags]
    states: dict[str, str] = {}
    counts: bool = True


def kind_of(optimizer: optim.Optimizer) -> Kind:
    """The kind of an optimizer; TypeError for classes that are not known, and for subclasses with a step of their own."""
    own = type(optimizer)
    for cls, kind in KINDS.items():
        if isinstance(optimizer, cls) and _steps_as(own, cls):
            return kind
    known = ", ".join(cls.__name__ for cls in KINDS)
    raise TypeError(f"to_optax knows torch.optim's {known}, got {own.__module__}.{own.__qualname__}: {_instead(optimizer)}")


def _instead(optimizer: optim.Optimizer) -> str:
    """What to do with an optimizer that is not known."""
    own = "write its rule as an optax.GradientTransformation"
    for cls in type(optimizer).__mro__:
        if cls in KINDS:
            return f"it steps in its own way. If the numbers are {cls.__name__}'s, make a torch.optim.{cls.__name__} and load its state_dict(); else {own}"
        if cls.__name__ in _NEAR:
            return f"use optax.{_NEAR[cls.__name__]}, whose numbers are optax's own, or {own}"
    return own


def _steps_as(own: type, cls: type) -> bool:
    """Whether a subclass has its parent's step, whatever hooks are around it."""
    return all(inspect.unwrap(getattr(own, name)) is inspect.unwrap(getattr(cls, name)) for name in ("step", "_init_group"))


_NEAR = {
    "Adadelta": "adadelta",
    "Adamax": "adamax",
    "LBFGS": "lbfgs",
    "Muon": "contrib.muon",
    "NAdam": "nadam",
    "RAdam": "radam",
    "Rprop": "rprop",
    "Lion": "lion",
}


def chain(kind: Kind, numbers: Numbers, flags: Flags, dtype: Any) -> optax.GradientTransformationExtraArgs:
    """A step of torch's: gradients are turned round to maximise, weight decay is added to them, and the rest is the optimizer's own.

    dtype: of its parameters. The update takes `steps`, a dict of the step counts of its parameters, this step included.
    """
    stored = Stored(dtype)
    before = [optax.scale(-1.0)] if "maximize" in flags else []
    if "decoupled" not in flags and _decays(numbers):
        before += [optax.add_decayed_weights(stored(numbers["weight_decay"])), _rounding(stored)]
    return optax.chain(*before, *kind.chain(numbers, flags, stored))


class Stored:
    """Rounds a float32 to what torch stores in bfloat16 and float16, after each operation and of some numbers before it; leaves other dtypes alone."""

    def __init__(self, dtype: Any):
        self.dtype = jnp.dtype(dtype)
        self.exact = opmath(self.dtype) == self.dtype

    def __call__(self, x: ArrayLike) -> Any:
        if self.exact:
            return x
        x = jnp.asarray(x, jnp.float32)
        rounded = round_to(x, self.dtype)
        if self.dtype != jnp.float16:
            return rounded
        return jnp.where(jnp.abs(x) < 2.0**-14, jnp.round(x * 2.0**24) / 2.0**24, rounded)  # what is denormal in float16 alone is kept


def _rounding(stored: Stored) -> optax.GradientTransformation:
    return optax.stateless_with_tree_map(lambda x, _: stored(x))


# -- rules of ours -----------------------------------------------------------------------------------


class Leaf(NamedTuple):
    """One parameter in one step, which is counted from 1."""

    param: Any
    grad: Any
    step: Any


Rule = Callable[[Leaf, Moments], tuple[Any, Moments]]
Start = Callable[[Any], Any]


def _for_each(rule: Rule, start: dict[str, Start]) -> optax.GradientTransformationExtraArgs:
    """A transformation of single parameters. start: what each moment is at first, from its parameter; None if that has no such moment."""

    def init(params: Any) -> Any:
        first = {key: {name: make(p) for name, p in params.items()} for key, make in start.items()}
        return {key: {name: x for name, x in own.items() if x is not None} for key, own in first.items()}

    def update(updates: Any, state: Any, params: Any = None, *, steps: Any, **_: Any) -> Any:
        out: dict[str, Any] = {}
        new: dict[str, Any] = {key: {} for key in state}
        for name, grad in updates.items():
            moments = {key: own[name] for key, own in state.items() if name in own}
            out[name], moments = rule(Leaf(params[name], grad, steps[name]), moments)
            for key, value in moments.items():
                new[key][name] = value
        return out, new

    return optax.GradientTransformationExtraArgs(init, update)


def _adam(n: Numbers, flags: Flags, stored: Stored) -> list[optax.GradientTransformation]:
    """Adam and AdamW.

    `optax.scale_by_adam` works out 1 - beta2**step in float32, where 1 - 0.999 is off by 1e-5: with lr 0.1 parameters are off by 9e-6 after 20 steps. It
    counts steps once for all parameters, torch for each. `optax.scale_by_amsgrad` keeps the greatest of the corrected second moments, torch of the
    uncorrected.
    """
    start: dict[str, Start] = {"exp_avg": jnp.zeros_like, "exp_avg_sq": jnp.zeros_like}
    if "amsgrad" in flags:
        start["max_exp_avg_sq"] = jnp.zeros_like
    return [_for_each(functools.partial(_adam_rule, n, flags, stored), start)]


def _adam_rule(n: Numbers, flags: Flags, stored: Stored, x: Leaf, old: Moments) -> tuple[Any, Moments]:
    first = stored(_lerp(old["exp_avg"], x.grad, 1 - n["beta1"]))
    second = stored(stored(old["exp_avg_sq"] * n["beta2"]) + (1 - n["beta2"]) * x.grad * x.grad)
    new = {"exp_avg": first, "exp_avg_sq": second}
    if "amsgrad" in flags:
        second = new["max_exp_avg_sq"] = jnp.maximum(old["max_exp_avg_sq"], second)
    root = jnp.sqrt(_correction(n["beta2"], x.step))
    denominator = stored(stored(stored(jnp.sqrt(second)) / root) + stored(n["eps"]))
    update = -(n["lr"] / _correction(n["beta1"], x.step)) * first / denominator
    return (_decay(x, n, stored) + update if "decoupled" in flags else update), new


def _correction(beta: Any, step: Any) -> Any:
    """1 - beta**step, exact to the last digits also where beta is close to 1."""
    if isinstance(beta, float):
        return -jnp.expm1(step * math.log(beta)) if beta > 0 else 1.0
    return -jnp.expm1(step * jnp.log(beta))


def _decay(x: Leaf, n: Numbers, stored: Stored) -> Any:
    """What decoupled weight decay adds."""
    if not _decays(n):
        return 0.0
    return stored(x.param * (1 - n["lr"] * n["weight_decay"])) - x.param


def _decays(n: Numbers) -> bool:
    return not (isinstance(n["weight_decay"], float) and n["weight_decay"] == 0)


def _lerp(a: jax.Array, b: jax.Array, weight: Any) -> Any:
    return a + weight * (b - a)


def _sgd(n: Numbers, flags: Flags, stored: Stored) -> list[optax.GradientTransformation]:
    momentum = [_momentum(n["momentum"], n["dampening"], flags, stored)] if "momentum" in flags else []
    return [*momentum, optax.scale(-stored(n["lr"]))]


def _momentum(momentum: Any, dampening: Any, flags: Flags, stored: Stored) -> optax.GradientTransformation:
    """`optax.trace`, but for dampening, which torch does not apply to the first gradient, and for what it rounds in between."""
    if stored.exact and "dampening" not in flags:
        return optax.trace(momentum, nesterov="nesterov" in flags)

    def rule(x: Leaf, old: Moments) -> tuple[Any, Moments]:
        weight = jnp.where(x.step == 1, 1.0, stored(1 - dampening))
        buffer = stored(stored(old["momentum_buffer"] * momentum) + weight * x.grad)
        update = stored(x.grad + stored(momentum) * buffer) if "nesterov" in flags else buffer
        return update, {"momentum_buffer": buffer}

    return _for_each(rule, {"momentum_buffer": jnp.zeros_like})


def _adagrad(n: Numbers, flags: Flags, stored: Stored) -> list[optax.GradientTransformation]:
    """`optax.scale_by_rss` adds eps below the root, torch beside it; and torch's learning rate falls with each parameter's steps."""

    def rule(x: Leaf, old: Moments) -> tuple[Any, Moments]:
        total = stored(old["sum"] + x.grad * x.grad)
        rate = n["lr"] / (1 + (x.step - 1) * n["lr_decay"])
        return -rate * x.grad / stored(stored(jnp.sqrt(total)) + stored(n["eps"])), {"sum": total}

    return [_for_each(rule, {"sum": functools.partial(jnp.full_like, fill_value=n["initial_accumulator_value"])})]


def _rmsprop(n: Numbers, flags: Flags, stored: Stored) -> list[optax.GradientTransformation]:
    """optax's alias `rmsprop` has the learning rate inside of the momentum, torch outside."""
    if "momentum" not in flags:
        return [_scale_by_rms(n, flags, stored), optax.scale(-n["lr"])]
    return [_scale_by_rms(n, flags, stored), _momentum(n["momentum"], 0.0, flags, stored), optax.scale(-stored(n["lr"]))]


def _scale_by_rms(n: Numbers, flags: Flags, stored: Stored) -> optax.GradientTransformation:
    """optax's own, but for what torch rounds in between."""
    if stored.exact:
        scale = optax.scale_by_stddev if "centered" in flags else optax.scale_by_rms
        return scale(n["alpha"], eps=n["eps"], eps_in_sqrt=False)

    def rule(x: Leaf, old: Moments) -> tuple[Any, Moments]:
        square = stored(stored(old["square_avg"] * n["alpha"]) + (1 - n["alpha"]) * x.grad * x.grad)
        new = {"square_avg": square}
        if "centered" in flags:
            new["grad_avg"] = stored(_lerp(old["grad_avg"], x.grad, 1 - n["alpha"]))
            square = stored(square - new["grad_avg"] * new["grad_avg"])
        return x.grad / stored(stored(jnp.sqrt(square)) + stored(n["eps"])), new

    names = ("square_avg", "grad_avg") if "centered" in flags else ("square_avg",)
    return _for_each(rule, dict.fromkeys(names, jnp.zeros_like))


def _adafactor(n: Numbers, flags: Flags, stored: Stored) -> list[optax.GradientTransformation]:
    """`optax.adafactor` has no relative step size (torch's is at most 1/sqrt(step)), factors the two largest dims (torch: the last two), and adds eps to each
    square (torch: bounds the estimates by it)."""
    start: dict[str, Start] = {
        "row_var": lambda p: jnp.zeros_like(p[..., :1]) if p.ndim > 1 else None,
        "col_var": lambda p: jnp.zeros_like(p[..., :1, :]) if p.ndim > 1 else None,
        "variance": lambda p: jnp.zeros_like(p) if p.ndim < 2 else None,
    }
    return [_for_each(functools.partial(_adafactor_rule, n, stored), start)]


def _adafactor_rule(n: Numbers, stored: Stored, x: Leaf, old: Moments) -> tuple[Any, Moments]:
    step = jnp.asarray(x.step, float)
    near = jnp.power(step, n["beta2_decay"])
    rate = jnp.maximum(n["eps2"], stored(_norm(x.param)) / math.sqrt(x.param.size)) * jnp.minimum(n["lr"], 1 / jnp.sqrt(step))
    eps1 = stored(n["eps1"])
    if x.param.ndim > 1:
        new = {key: stored(_lerp(old[key], _mean_square(x.grad, dim, stored), near)) for key, dim in (("row_var", -1), ("col_var", -2))}
        mean = jnp.maximum(stored(new["row_var"].mean(-2, keepdims=True)), eps1)
        variance = stored(stored(new["row_var"] * new["col_var"]) / mean)
    else:
        variance = stored(_lerp(old["variance"], stored(x.grad * x.grad), near))
        new = {"variance": variance}
    update = stored(stored(1 / jnp.sqrt(jnp.maximum(variance, stored(n["eps1"] ** 2)))) * x.grad)
    size = stored(_norm(update)) / (math.sqrt(x.param.size) * n["d"])
    return _decay(x, n, stored) - stored(rate / jnp.maximum(1, size)) * update, new


def _norm(x: jax.Array) -> Any:
    return jnp.linalg.norm(x.ravel())


def _mean_square(grad: jax.Array, dim: int, stored: Stored) -> Any:
    norm = stored(jnp.linalg.norm(grad, axis=dim, keepdims=True))
    return stored(stored(norm * norm) / grad.shape[dim])


# -- torch's options -----------------------------------------------------------------------------------


def _numbers(*names: str) -> Callable[[optim.Optimizer, dict[str, Any]], Numbers]:
    return lambda _, group: {name: _number(group[name]) for name in names}


def _number(x: float | torch.Tensor) -> float:
    """Options may be tensors."""
    return float(x)


def _adam_numbers(optimizer: optim.Optimizer, group: dict[str, Any]) -> Numbers:
    beta1, beta2 = group["betas"]
    if isinstance(beta1, torch.Tensor) or isinstance(beta2, torch.Tensor):
        raise TypeError("betas are tensors, which torch rounds to the dtype of each parameter: to_optax takes them as floats")
    return {**_numbers("lr", "eps", "weight_decay")(optimizer, group), "beta1": _number(beta1), "beta2": _number(beta2)}


def _adagrad_numbers(optimizer: optim.Optimizer, group: dict[str, Any]) -> Numbers:
    first = optimizer.defaults["initial_accumulator_value"]  # torch takes no group's
    return {**_numbers("lr", "lr_decay", "eps", "weight_decay")(optimizer, group), "initial_accumulator_value": _number(first)}


def _adafactor_numbers(optimizer: optim.Optimizer, group: dict[str, Any]) -> Numbers:
    eps1, eps2 = group["eps"]
    if eps1 is None:  # torch takes that of a group's first parameter for all of them
        eps1 = next((torch.finfo(p.dtype).eps for p in group["params"] if p.requires_grad), 0.0)
    return {**_numbers("lr", "beta2_decay", "d", "weight_decay")(optimizer, group), "eps1": _number(eps1), "eps2": _number(eps2)}


def _flags(*names: str) -> Callable[[dict[str, Any]], Flags]:
    return lambda group: frozenset(name for name in ("maximize", *names) if group.get(name))


def _adam_flags(group: dict[str, Any]) -> Flags:
    decoupled = {"decoupled"} if group.get("decoupled_weight_decay") else set()
    return _flags("amsgrad")(group) | decoupled


_ADAM = Kind(_adam, _adam_numbers, _adam_flags)

KINDS: dict[type[optim.Optimizer], Kind] = {
    optim.AdamW: _ADAM,
    optim.Adam: _ADAM,
    optim.SGD: Kind(
        _sgd,
        _numbers("lr", "momentum", "dampening", "weight_decay"),
        _flags("momentum", "dampening", "nesterov"),
        {"trace": "momentum_buffer"},
        counts=False,
    ),
    optim.Adagrad: Kind(_adagrad, _adagrad_numbers, _flags()),
    optim.RMSprop: Kind(
        _rmsprop,
        _numbers("lr", "alpha", "eps", "weight_decay", "momentum"),
        _flags("momentum", "centered"),
        {"nu": "square_avg", "mu": "grad_avg", "trace": "momentum_buffer"},
    ),
    optim.Adafactor: Kind(_adafactor, _adafactor_numbers, lambda group: _flags()(group) | {"decoupled"}),
}
