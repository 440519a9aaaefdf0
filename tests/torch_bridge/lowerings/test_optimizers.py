"""`_foreach_*` lists, fused optimizer steps and the gradient scaler's ops against eager torch."""

from __future__ import annotations

import pytest
import torch

import torch_bridge.lowerings as lowerings
from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.parity import check, to_jax, to_torch
from tests.torch_bridge.lowerings.test_arithmetic import T, bf16, f64, inf, ints, nan, rand
from torch_bridge import _compat
from torch_bridge.ir import dtypes

aten = torch.ops.aten
LIST = [rand(3, 2), rand(5), T(0.5)]
OTHERS = [rand(3, 2), rand(5), T(1.5)]
POSITIVE = [x.abs() + 0.1 for x in LIST]
MIXED = [rand(4, dtype=bf16), ints(3), rand(2, dtype=f64)]
UNARY = [
    "abs",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "exp",
    "expm1",
    "floor",
    "frac",
    "lgamma",
    "log1p",
    "neg",
    "reciprocal",
    "round",
    "sigmoid",
    "sign",
    "sin",
    "sinh",
    "tan",
    "tanh",
    "trunc",
    "clone",
    "zero",
    "max",
    "atan",
]


@pytest.mark.core(keep=13)
@pytest.mark.parametrize("name", UNARY)
@together
def test_foreach_unary(name: str) -> None:
    check(getattr(aten, f"_foreach_{name}").default, LIST, jit=name == "exp")


@pytest.mark.parametrize("name", ["acos", "asin", "log", "log2", "log10", "sqrt", "rsqrt"])
def test_foreach_of_positive(name: str) -> None:
    check(getattr(aten, f"_foreach_{name}").default, [x.clamp(max=0.9) for x in POSITIVE], jit=False)


FOREACH = [
    *(
        (getattr(aten, f"_foreach_{n}").List, (LIST, OTHERS), {})
        for n in ("add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max")
    ),
    *(
        (getattr(aten, f"_foreach_{n}").Scalar, (LIST, 0.5), {})
        for n in ("add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max", "pow")
    ),
    *(
        (getattr(aten, f"_foreach_{n}").ScalarList, (LIST, [0.5, 2, 1.5]), {})
        for n in ("add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max")
    ),
    (aten._foreach_add.List, (LIST, OTHERS), {"alpha": 0.3}),
    (aten._foreach_sub.List, (LIST, OTHERS), {"alpha": 2}),
    (aten._foreach_add.Tensor, (LIST, T(2.0)), {"alpha": 0.3}),
    (aten._foreach_mul.Tensor, (LIST, T(2.0)), {}),
    (aten._foreach_div.Tensor, (LIST, T(2.0)), {}),
    (aten._foreach_add.Scalar, (MIXED, 2.5), {}),
    (aten._foreach_mul.Scalar, (MIXED, 3), {}),
    (aten._foreach_pow.List, (POSITIVE, OTHERS), {}),
    (aten._foreach_pow.ScalarList, (POSITIVE, [2, 0.5, 3.0]), {}),
    (aten._foreach_pow.ScalarAndTensor, (0.5, LIST), {}),
    (aten._foreach_lerp.List, (LIST, OTHERS, POSITIVE), {}),
    (aten._foreach_lerp.Scalar, (LIST, OTHERS, 0.3), {}),
    (aten._foreach_lerp.ScalarList, (LIST, OTHERS, [0.3, 0.6, 0.9]), {}),
    (aten._foreach_addcmul.Scalar, (LIST, OTHERS, POSITIVE, 0.3), {}),
    (aten._foreach_addcmul.Scalar, (LIST, OTHERS, POSITIVE), {}),
    (aten._foreach_addcdiv.Scalar, (LIST, OTHERS, POSITIVE, 0.3), {}),
    (aten._foreach_addcdiv.ScalarList, (LIST, OTHERS, POSITIVE, [0.3, 1, 2]), {}),
    (aten._foreach_addcmul.Tensor, (LIST, OTHERS, POSITIVE, T([0.3, 1.0, 2.0])), {}),
    (aten._foreach_addcdiv.Tensor, (LIST, OTHERS, POSITIVE, T([0.3, 1.0, 2.0])), {}),
    (aten._foreach_norm.Scalar, (LIST,), {}),
    (aten._foreach_norm.Scalar, (LIST, 1), {}),
    (aten._foreach_norm.Scalar, (LIST, inf, torch.float64), {}),
    (aten._foreach_norm.Scalar, ([rand(4, dtype=bf16)], 2), {"dtype": torch.float32}),
    (aten._foreach_powsum.Scalar, (LIST, 2), {}),
]
if _compat.has_foreach("mm"):
    FOREACH.append((aten._foreach_mm.default, ([rand(2, 3)], [rand(3, 4)]), {}))


@pytest.mark.parametrize("op,args,kwargs", FOREACH)
@together
def test_foreach(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> None:
    check(op, *args, **kwargs)


PARAMS = [rand(4, 3), rand(5)]
GRADS = [rand(4, 3), rand(5)]
AVERAGE, SQUARE, PEAK = [rand(4, 3), rand(5)], [rand(4, 3) ** 2, rand(5) ** 2], [rand(4, 3) ** 2, rand(5) ** 2]
STEPS = [T(3.0), T(7.0)]
SCALER = [{}, {"grad_scale": T(4.0), "found_inf": T(0.0)}, {"grad_scale": T(4.0), "found_inf": T(1.0)}, {"found_inf": T(0.0)}]


def check_step(op: torch._ops.OpOverload, *lists: list, **options: object) -> None:
    check(op, *lists, rtol=3e-6, atol=1e-6, **options)


@pytest.mark.parametrize("name", ["_fused_adam", "_fused_adamw"])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("scaler", SCALER)
@together
def test_fused_adam(name: str, amsgrad: bool, scaler: dict) -> None:
    options = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": amsgrad, "maximize": bool(scaler)}
    lists = (PARAMS, GRADS, AVERAGE, SQUARE, PEAK if amsgrad else [], STEPS)
    check_step(getattr(aten, name).default, *lists, lr=0.01, **options, **scaler)
    if not scaler:
        check_step(getattr(aten, name).tensor_lr, *lists, lr=T(0.01), **options)
        check_step(getattr(aten, name).default, *lists, lr=0.01, **(options | {"beta1": 0.3, "weight_decay": 0.0}))
        check_step(getattr(aten, name).default, *[[x.to(bf16) for x in xs] for xs in lists[:5]], STEPS, lr=0.01, **options)


@pytest.mark.parametrize("momentum,nesterov,first", [(0.0, False, False), (0.9, False, True), (0.9, False, False), (0.9, True, False)])
@pytest.mark.parametrize("scaler", SCALER)
@together
def test_fused_sgd(momentum: float, nesterov: bool, first: bool, scaler: dict) -> None:
    options = {
        "weight_decay": 0.1,
        "momentum": momentum,
        "dampening": 0.0 if nesterov else 0.2,
        "nesterov": nesterov,
        "is_first_step": first,
    }
    lists = (PARAMS, GRADS, AVERAGE if momentum else [])
    check_step(aten._fused_sgd.default, *lists, lr=0.1, maximize=bool(scaler), **options, **scaler)
    check_step(aten._fused_sgd.tensor_lr, *lists, lr=T(0.1), maximize=False, **options)


@pytest.mark.parametrize("scaler", SCALER)
@together
def test_fused_adagrad(scaler: dict) -> None:
    options = {"lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-8, "maximize": bool(scaler)}
    check_step(aten._fused_adagrad.default, PARAMS, GRADS, SQUARE, STEPS, lr=0.1, **options, **scaler)
    check_step(aten._fused_adagrad.tensor_lr, PARAMS, GRADS, SQUARE, STEPS, lr=T(0.1), **options)


def test_learning_rate_as_input() -> None:
    """A lifted learning rate: no recompilation under a schedule."""
    options = {"weight_decay": 0.1, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False, "is_first_step": False}
    expected = aten._fused_sgd.default(PARAMS, GRADS, [], lr=0.1, **options)
    with _compat.enable_x64():
        lists = [[to_jax(x) for x in xs] for xs in (PARAMS, GRADS)]
        got = lowerings.lookup(aten._fused_sgd.default).fn(*lists, [], lr=dtypes.Scalar(float, 0.1), **options)
        torch.testing.assert_close([to_torch(x) for x in got[0]], expected[0])


@together
def test_gradient_scaler() -> None:
    for grads in ([T([1.0, 2.0]), T([[3.0]])], [T([1.0, inf]), T([[3.0]])], [T([nan])]):
        check(aten._amp_foreach_non_finite_check_and_unscale.default, grads, T(0.0), T(0.25))
    check(aten._amp_foreach_non_finite_check_and_unscale.default, [T([1.0])], T(1.0), T(0.25))
    for found, tracker, scale in ((0.0, 3, 8.0), (1.0, 3, 8.0), (0.0, 1999, 8.0), (0.0, 1999, 3e38)):
        args = (T(scale), T(tracker, dtype=torch.int32), T(found), 2.0, 0.5, 2000)
        check(aten._amp_update_scale.default, *args)
