"""`compiler/channels_last.py`: what is computed with the channels last is what torch's order gives, and stays in that order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from jax.extend import core
from torch import nn

from torch_bridge.compiler import channels_last, permuted_values
from torch_bridge.config.settings import SETTINGS
from torch_bridge.errors import VerificationError
from torch_bridge.lowerings import convolution as convolutions
from torch_bridge.lowerings import torch_kernels

CHANNELS = 6
SHAPES = ((2, CHANNELS, 5, 4), (CHANNELS,) * 4)
"""Dims that differ, and dims that a wrong order would not be noticed by its shape."""


def conv(x: jax.Array, w: jax.Array, **more: Any) -> jax.Array:
    return lax.conv_general_dilated(x, w, (1,) * (x.ndim - 2), [(1, 1)] * (x.ndim - 2), **more)


def between(op: Callable[[jax.Array], Any]) -> Callable[..., Any]:
    """An op after one convolution and, where its result can be, before another."""

    def f(x: jax.Array, w: jax.Array) -> Any:
        y = op(conv(x, w))
        y = y.astype(jnp.float32) if isinstance(y, jax.Array) else y
        return conv(y, w) if getattr(y, "ndim", 0) == 4 and y.shape[1] == CHANNELS else y

    return f


def arrays(*shapes: Sequence[int]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def check(f: Callable[..., Any], inputs: Sequence[jax.Array]) -> None:
    found, wanted = jax.jit(lambda *xs: channels_last.evaluate(f, xs))(*inputs), jax.jit(f)(*inputs)
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def transposes(f: Callable[..., Any], inputs: Sequence[jax.Array]) -> int:
    """How many transposes there are in the evaluation that move elements."""
    jaxpr = jax.make_jaxpr(lambda *xs: channels_last.evaluate(f, xs))(*inputs).jaxpr
    return sum(e.primitive.name == "transpose" and _moves(e.invars[0].aval.shape, e.params["permutation"]) for e in jaxpr.eqns)


def _moves(shape: Sequence[int], permutation: Sequence[int]) -> bool:
    left = [d for d in permutation if shape[d] > 1]
    return left != sorted(left)


@jax.custom_jvp
def cubed(x: jax.Array) -> jax.Array:
    return x * x * x


cubed.defjvps(lambda dx, _, x: 3 * x * x * dx)


def turns(y: jax.Array, w: jax.Array | None = None) -> jax.Array:
    return lax.scan(lambda c, k: (jnp.sin(c) * k, None), y, jnp.arange(1.0, 4.0, dtype=jnp.float32))[0]


def scale(y: jax.Array) -> jax.Array:
    return jnp.arange(1.0, 1 + y.shape[1], dtype=jnp.float32)[:, None, None]


KEPT: dict[str, Callable[[jax.Array], Any]] = {
    "an unary op": jnp.tanh,
    "a number": lambda y: 2 * y + 1,
    "a scale for each channel": lambda y: y * scale(y),
    "numbers for each sample and channel": lambda y: y + jnp.ones(y.shape[:2], jnp.float32)[:, :, None, None],
    "itself": lambda y: y * y,
    "a choice": lambda y: jnp.where(y > 0, y, 0.1 * y),
    "bounds": lambda y: lax.clamp(-1.0, y, jnp.float32(1)),
    "conversions": lambda y: y.astype(jnp.bfloat16).astype(jnp.float32),
    "batch norm": lambda y: (y - y.mean((0, 2, 3), keepdims=True)) * lax.rsqrt(y.var((0, 2, 3), keepdims=True) + 1),
    "layer norm of channels": lambda y: y - y.mean(1, keepdims=True),
    "group norm": lambda y: (y.reshape(y.shape[0], 2, -1, *y.shape[2:]) - 1).reshape(y.shape),
    "group norm, flat": lambda y: y.reshape(y.shape[0], 2, y.shape[1] // 2, -1).cumsum(3).reshape(y.shape),
    "padding": lambda y: jnp.pad(y, ((0, 1), (0, 0), (2, 0), (1, 3))),
    "cropping": lambda y: y[1:, :, 1:4:2, :3],
    "reversal": lambda y: jnp.flip(y, (1, 3)),
    "sums so far, of channels": lambda y: jnp.cumsum(y, 1),
    "maxima so far, of rows": lambda y: lax.cummax(y, 2),
    "concatenation": lambda y: jnp.concatenate([y, y + 1], 2),
    "halves": lambda y: lax.split(y, (2, y.shape[2] - 2), 2)[1],
    "max pooling": lambda y: lax.reduce_window(y, -jnp.inf, lax.max, (1, 1, 2, 3), (1, 1, 2, 1), "VALID"),
    "average pooling": lambda y: lax.reduce_window(y, 0.0, lax.add, (1, 1, 3, 2), (1, 1, 1, 2), ((0, 0), (0, 0), (1, 1), (1, 0))),
    "a slice from a place": lambda y: lax.dynamic_slice(y, (0, 0, jnp.int32(1), 0), (*y.shape[:2], 2, 3)),
    "a barrier": lambda y: lax.optimization_barrier((y, y + 1))[1],
    "upsampling": lambda y: jnp.broadcast_to(y[:, :, :, None, :, None], (*y.shape[:3], 2, y.shape[3], 3)).reshape(
        *y.shape[:2], 2 * y.shape[2], 3 * y.shape[3]
    ),
    "a call": jax.jit(lambda y: y + 1),
    "a rule for derivatives": cubed,
    "a kernel of one channel": lambda y: lax.platform_dependent(y, cpu=lambda y: y + 1, default=jnp.sin),
    "precision": lambda y: lax.reduce_precision(y, 5, 10),
}
"""What lies between two convolutions and costs no transpose."""

OTHERS: dict[str, Callable[[jax.Array], Any]] = {
    "numbers for each place": lambda y: y + jnp.arange(y.size, dtype=jnp.float32).reshape(y.shape),
    "another order": lambda y: y.transpose(3, 1, 0, 2),
    "channels last": lambda y: y.transpose(0, 2, 3, 1) @ jnp.ones((y.shape[1], 3), jnp.float32),
    "patches": lambda y: y.reshape(*y.shape[:2], -1).transpose(0, 2, 1),
    "flat": lambda y: y.reshape(y.shape[0], -1),
    "all in one": lambda y: y.reshape(-1),
    "merged with the batch": lambda y: y.reshape(-1, *y.shape[2:]),
    "a sum": jnp.sum,
    "sums of rows": lambda y: y.sum((0, 2)),
    "the place of the largest": lambda y: (jnp.argmax(y, 1), jnp.argmin(y, 3), jnp.argmax(y.reshape(y.shape[0], -1), 1)),
    "any and all": lambda y: ((y > 0).any((1, 2)), (y > 0).all((0, 3))),
    "new and old dims of one": lambda y: y[:, None, :, :, :, None].squeeze((1, 5)),
    "a product over the channels": lambda y: jnp.einsum("bchw,bdhw->bcd", y, y),
    "a product with batch dims": lambda y: jnp.einsum("bchw,bchv->hbcwv", y, y + 1),
    "attention": lambda y: jnp.einsum("bcn,bcm->bnm", y.reshape(*y.shape[:2], -1), y.reshape(*y.shape[:2], -1)),
    "sorted": lambda y: jnp.sort(y, 1),
    "taken": lambda y: jnp.take(y, jnp.array([2, 0, 1]), axis=1),
    "added in places": lambda y: y.at[:, 1].add(1.0),
    "loop": turns,
    "while": lambda y: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2), (0, y))[1],
    "branch": lambda y: lax.cond(y.sum() > 0, jnp.sin, jnp.cos, y),
    "computed again": jax.checkpoint(lambda y: jnp.sin(jnp.cos(y))),
    "a complex number": lambda y: jnp.abs(lax.complex(y, y + 1)),
    "rotated": lambda y: jnp.rot90(y, axes=(2, 3)),
    "integers": lambda y: (y * 8).astype(jnp.int32) >> 1,
    "a sum over an axis with a name": lambda y: jax.vmap(lambda v: v - 0.1 * lax.psum(v, "c"), 1, 1, axis_name="c")(y),
    "a maximum over an axis with a name": lambda y: y.sum() - jax.vmap(lambda v: lax.pmax(v, "h"), 2, axis_name="h")(y),
    "a constant": lambda y: (y, 3, jnp.ones((2, 3, 4))),
    "an empty part": lambda y: y[:0].reshape(0, 5),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", [*KEPT, *OTHERS])
def test_the_values_are_those_of_torchs_order(name: str, shape: tuple[int, ...]) -> None:
    check(between({**KEPT, **OTHERS}[name]), arrays(shape, (CHANNELS, CHANNELS, 3, 3)))


@pytest.mark.parametrize("name", KEPT)
def test_what_lies_between_two_convolutions_keeps_the_order(name: str) -> None:
    """What is transposed: the input of the first convolution, and the result of the second."""
    assert transposes(between(KEPT[name]), arrays(SHAPES[0], (CHANNELS, CHANNELS, 3, 3))) == 2


@pytest.mark.parametrize(
    "stride, padding, dilation, groups", [(1, 1, 1, 1), (2, 1, 1, 1), (2, 0, 1, 3), (1, 2, 2, 1), (1, 1, 1, CHANNELS), (3, 2, 2, 2)]
)
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_convolutions_and_their_gradients(ndim: int, stride: int, padding: int, dilation: int, groups: int) -> None:
    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(x, v, (1,) * ndim, "SAME")
        y = lax.conv_general_dilated(
            y, w, (stride,) * ndim, [(padding, padding)] * ndim, rhs_dilation=(dilation,) * ndim, feature_group_count=groups
        )
        return (lax.conv_general_dilated(jnp.tanh(y), v, (1,) * ndim, "SAME") ** 2).sum()

    window = (3,) * ndim
    inputs = arrays((2, CHANNELS, *(9, 8, 7)[:ndim]), (CHANNELS, CHANNELS // groups, *window), (CHANNELS, CHANNELS, *window))
    check(jax.value_and_grad(f, argnums=(0, 1, 2)), inputs)


GROUPED: dict[str, tuple[int, bool, int]] = {
    "depthwise": (1, False, CHANNELS),
    "strided": (2, False, 3),
    "transposed": (1, True, CHANNELS),
    "transposed, strided": (2, True, 2),
}
"""Stride, whether it is a transposed one, groups."""


def grouped(case: str, ndim: int) -> tuple[Callable[..., Any], list[jax.Array]]:
    """A grouped convolution that is a kernel of torch between two of XLA's, with its gradients, and inputs for them."""
    stride, transposed, groups = GROUPED[case]
    geometry = ((stride,) * ndim, (1,) * ndim, (1,) * ndim, transposed, (0,) * ndim, groups)

    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
        y = conv(x, v)
        out = convolutions.convolution(y, w, None, *geometry)
        return conv(out, v), *convolutions.convolution_backward(jnp.sin(out / 64), y, w, None, *geometry, [True, True, False])[:2]

    window = (3,) * ndim
    return f, arrays((2, CHANNELS, *(7, 6, 5)[:ndim]), (CHANNELS, CHANNELS // groups, *window), (CHANNELS, CHANNELS, *window))


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("case", GROUPED)
def test_kernels_of_torch_take_their_channels_last(case: str, ndim: int) -> None:
    """What is transposed: the input of the first convolution, the result of the last, and the gradient that is given away."""
    f, inputs = grouped(case, ndim)
    with torch_kernels.using(True):
        check(f, inputs)
        assert "torch_bridge_kernel" in jax.jit(lambda *xs: channels_last.evaluate(f, xs)).lower(*inputs).as_text()
        assert transposes(f, inputs) == 3
    found = jax.jit(f)(*inputs)
    with torch_kernels.using(True):
        for a, b in zip(jax.jit(lambda *xs: channels_last.evaluate(f, xs))(*inputs), found, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_one_gradient_of_a_kernel_of_torch(wanted: tuple[bool, bool]) -> None:
    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
        y = conv(x, v)
        return convolutions.convolution_backward(jnp.sin(y), y, w, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 2, [*wanted, False])

    with torch_kernels.using(True):
        check(f, arrays((2, CHANNELS, 5, 4), (CHANNELS, CHANNELS // 2, 3, 3), (CHANNELS, CHANNELS, 3, 3)))


def test_other_calls_through_ffi_get_torchs_order() -> None:
    """Kernels without images, and what is not ours."""

    @torch_kernels.kernel("row numbers")
    def _(arguments: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        assert arguments[0].is_contiguous()
        results[0].copy_(arguments[0] + torch.arange(arguments[0].numel()).view_as(arguments[0]))

    try:
        with torch_kernels.using(True):
            check(between(lambda y: torch_kernels.call("row numbers", (y,), y)[0]), arrays(SHAPES[0], (CHANNELS, CHANNELS, 3, 3)))
    finally:
        del torch_kernels.registry._KERNELS["row numbers"]
    eqn = jax.make_jaxpr(lambda x: jax.ffi.ffi_call("of_others", x)(x))(jnp.ones(3)).eqns[0]
    assert torch_kernels.images_of(eqn) is None


def _random_chain(seed: int) -> Callable[..., Any]:
    """Ten random ops, on values whose dims all fit each other."""

    def f(x: jax.Array, w: jax.Array) -> list[jax.Array]:
        rng = random.Random(seed)
        kept = [conv(x, w)]
        for _ in range(10):
            y = kept[-1]
            axis = rng.randrange(y.ndim)
            which = rng.randrange(10)
            if which == 0 and y.ndim == 4 and y.shape[1] == CHANNELS:
                y = conv(y, w)
            elif which == 1:
                y = y.transpose(rng.sample(range(y.ndim), y.ndim))
            elif which == 2:
                other = rng.choice(kept)
                y = y - jnp.cos(other) if other.shape == y.shape else y - jnp.mean(other)
            elif which == 3:
                y = y - y.mean(axis, keepdims=True)
            elif which == 4 and y.ndim > 3:
                y = y.sum(axis)
            elif which == 5:
                y = jnp.flip(y, axis)
            elif which == 6 and y.ndim < 6:
                shape = list(y.shape)
                shape[axis : axis + 1] = [2, shape[axis] // 2] if shape[axis] % 2 == 0 else [1, shape[axis]]
                y = y.reshape(shape)
            elif which == 7 and axis + 1 < y.ndim > 3:
                y = y.reshape(*y.shape[:axis], -1, *y.shape[axis + 2 :])
            elif which == 8 and y.ndim < 6:
                y = jnp.broadcast_to(jnp.expand_dims(y, axis), (*y.shape[:axis], 2, *y.shape[axis:]))
            elif which == 9:
                y = lax.dynamic_slice_in_dim(jnp.concatenate([y, 2 * y], axis), jnp.int32(1), y.shape[axis], axis)
            kept.append(y)
        return kept

    return f


@pytest.mark.parametrize("seed", range(25))
def test_random_ops(seed: int) -> None:
    check(_random_chain(seed), arrays(SHAPES[seed % 2], (CHANNELS, CHANNELS, 3, 3)))


def test_every_reshape_of_every_order() -> None:
    """Those that the rule takes are right, and all that move no element among torch's dims are taken in torch's order."""
    old = (2, 3, 4)
    news = [s for n in range(1, 5) for s in itertools.product((1, 2, 3, 4, 6, 8, 12, 24), repeat=n) if np.prod(s) == 24]
    x = np.arange(24, dtype=np.float32).reshape(old)
    eqns = {new: jax.make_jaxpr(lambda v, new=new: lax.reshape(v, new))(x).eqns for new in news}
    taken = 0
    for new, order in itertools.product(news, itertools.permutations(range(3))):
        eqn = eqns[new]
        if not eqn:
            continue
        value = permuted_values.lying(jnp.asarray(x.transpose(order)), order)
        result = channels_last._reshape(eqn[0], [value])
        assert order != (0, 1, 2) or result is not None, new
        if result is not None:
            taken += 1
            np.testing.assert_array_equal(permuted_values.in_torchs_order(result[0]), x.reshape(new))
    assert taken > len(news)


def test_elementwise_primitives_are_those_of_jax() -> None:
    known = {p.name for p in vars(lax).values() if isinstance(p, core.Primitive)} | {
        p.name for p in vars(core.primitives).values() if hasattr(p, "name")
    }
    assert channels_last._ELEMENTWISE - known <= {"copy_p", "stop_gradient"}


def test_a_wrong_rule_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SETTINGS, "verify", True)
    monkeypatch.setitem(channels_last._RULES, "tanh", lambda eqn, values: [values[0].read((0, 1, 2, 3))[:, :1]])
    with pytest.raises(VerificationError, match=r"float32\[2, 1, 5, 4\] in order \[0, 1, 2, 3\] for float32\[2, 6, 5, 4\] of tanh"):
        check(between(jnp.tanh), arrays(SHAPES[0], (CHANNELS, CHANNELS, 3, 3)))


# -- as a user sees it -----------------------------------------------------------------------------


class Levels(nn.Module):
    """Convolutions of one kind down and up again, with pooling, norms and a skip connection."""

    def __init__(self, ndim: int):
        super().__init__()
        convolution, transposed = (getattr(nn, f"{kind}{ndim}d") for kind in ("Conv", "ConvTranspose"))
        norm, self.pool = getattr(nn, f"BatchNorm{ndim}d")(8), getattr(nn, f"MaxPool{ndim}d")(2)
        self.first = nn.Sequential(convolution(3, 8, 3, padding=1, bias=False), norm, nn.ReLU())
        self.down = nn.Sequential(convolution(8, 8, 3, padding=1, groups=8), convolution(8, 16, 1), nn.GroupNorm(4, 16), nn.SiLU())
        self.up = transposed(16, 8, 2, 2)
        self.last = convolution(16, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        up = self.up(self.down(self.pool(x)))
        return self.last(torch.cat([x, up], 1)).flatten(2).transpose(1, 2)


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_training_gives_eager_torchs_numbers(ndim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[int] = []
    evaluate = channels_last.evaluate

    def counted(run: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        evaluated.append(len(inputs))
        return evaluate(run, inputs)

    monkeypatch.setattr(channels_last, "evaluate", counted)

    def trained(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Levels(ndim)
        x, y = torch.randn(2, 3, *(6, 8, 4)[:ndim]), torch.randn(2, int(np.prod((6, 8, 4)[:ndim])), 4)
        model, x, y = model.to(device), x.to(device), y.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().cpu())
        return [*losses, *(p.detach().cpu() for p in model.parameters()), *(b.cpu() for b in model.buffers())]

    for found, wanted in zip(trained("xla"), trained("cpu"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert evaluated


def test_a_few_convolutions_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels_last, "evaluate", partial(pytest.fail, "evaluated again"))
    x, convolution = torch.randn(1, 3, 5, 5), nn.Conv2d(3, 2, 3)
    wanted = convolution(x).detach()
    torch.testing.assert_close(convolution.to("xla")(x.to("xla")).detach().cpu(), wanted)
