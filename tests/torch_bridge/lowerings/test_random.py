"""Random lowerings: dtypes, shapes and ranges as torch; values compared in distribution (moments, Kolmogorov-Smirnov)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_bridge.lowerings as lowerings
from tests.torch_bridge.lowerings.parity import check, to_jax, to_torch
from torch_bridge import _compat
from torch_bridge.ir import dtypes

aten = torch.ops.aten
N = 20_000


def draw(op, *args, seed=0, **kwargs):
    """The results of a random lowering under jit, as CPU tensors."""
    low = lowerings.lookup(op)
    assert low is not None and low.rng
    with _compat.enable_x64():
        arrays = [to_jax(a) if isinstance(a, torch.Tensor) else None for a in args]

        def call(key, arrays):
            return low.fn(*[a if x is None else x for a, x in zip(args, arrays, strict=True)], key=key, **kwargs)

        out = jax.jit(call)(jax.random.key(seed), arrays)
        return tuple(to_torch(o) for o in out) if isinstance(out, tuple) else to_torch(out)


def ks(sample, cdf):
    """Kolmogorov-Smirnov distance times sqrt(n): above 1.95 in one draw of a thousand for a continuous cdf."""
    x = np.sort(sample.double().numpy())
    n, f = len(x), cdf(x)
    return math.sqrt(n) * max(np.max(f - np.arange(n) / n), np.max(np.arange(1, n + 1) / n - f))


def phi(x):
    return 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


F = torch.empty(N)
FROM = getattr(aten.random, "from")
CONTINUOUS = [
    ("rand", lambda: draw(aten.rand.default, [N]), lambda x: x),
    ("uniform", lambda: draw(aten.uniform.default, F, -2.0, 3.0), lambda x: (x + 2) / 5),
    ("uniform named", lambda: draw(aten.uniform.default, F, **{"from": 1.0, "to": 3.0}), lambda x: (x - 1) / 2),
    ("uniform f64", lambda: draw(aten.uniform.default, F.double(), 1.0, 1.5), lambda x: (x - 1) * 2),
    ("randn", lambda: draw(aten.randn.default, [N]), phi),
    ("randn_like", lambda: draw(aten.randn_like.default, F, dtype=torch.float64), phi),
    (
        "randn complex",
        lambda: torch.view_as_real(draw(aten.randn.default, [N], dtype=torch.complex64))[:, 1],
        lambda x: phi(x * math.sqrt(2)),
    ),
    ("normal_functional", lambda: draw(aten.normal_functional.default, F, 1.0, 2.0), lambda x: phi((x - 1) / 2)),
    ("normal tensors", lambda: draw(aten.normal.Tensor_Tensor, F.fill_(1.0), torch.tensor(2.0)), lambda x: phi((x - 1) / 2)),
    ("normal mean", lambda: draw(aten.normal.Tensor_float, F.fill_(-1.0), 0.5), lambda x: phi((x + 1) * 2)),
    ("normal std", lambda: draw(aten.normal.float_Tensor, 3.0, F.fill_(2.0)), lambda x: phi((x - 3) / 2)),
    ("normal size", lambda: draw(aten.normal.float_float, 3.0, 2.0, [N]), lambda x: phi((x - 3) / 2)),
    ("log_normal", lambda: draw(aten.log_normal.default, F, 1.0, 2.0), lambda x: phi((np.log(x) - 1) / 2)),
    ("exponential", lambda: draw(aten.exponential.default, F, 0.5), lambda x: 1 - np.exp(-0.5 * x)),
    ("cauchy", lambda: draw(aten.cauchy.default, F, 1.0, 2.0), lambda x: np.arctan((x - 1) / 2) / math.pi + 0.5),
    ("gamma(1)", lambda: draw(aten._standard_gamma.default, torch.ones(N)), lambda x: 1 - np.exp(-x)),
    ("gamma(2)", lambda: draw(aten._standard_gamma.default, torch.full((N,), 2.0)), lambda x: 1 - np.exp(-x) * (1 + x)),
    (
        "dirichlet(1, 2)",
        lambda: draw(aten._sample_dirichlet.default, torch.tensor([1.0, 2.0]).repeat(N, 1))[:, 0],
        lambda x: 1 - (1 - x) ** 2,
    ),
]


@pytest.mark.thorough(keep=7)
@pytest.mark.parametrize(("name", "sample", "cdf"), CONTINUOUS, ids=[c[0] for c in CONTINUOUS])
def test_continuous(name, sample, cdf):
    assert ks(sample(), cdf) < 1.95


def _rate(x):
    return x.double().mean(), x.double().var()


DISCRETE = [  # name, sample, mean, variance
    ("bernoulli.p", lambda: draw(aten.bernoulli.p, F, 0.3), 0.3, 0.21),
    ("bernoulli.p tiny", lambda: draw(aten.bernoulli.p, torch.empty(10 * N), 1e-5), 1e-5, 1e-5),
    ("bernoulli int", lambda: draw(aten.bernoulli.p, F.long(), 0.3), 0.3, 0.21),
    ("bernoulli self", lambda: draw(aten.bernoulli.default, torch.full((N,), 0.7)), 0.7, 0.21),
    ("bernoulli.Tensor", lambda: draw(aten.bernoulli.Tensor, F.int(), torch.tensor(0.7)), 0.7, 0.21),
    ("geometric", lambda: draw(aten.geometric.default, F, 0.25), 4.0, 12.0),
    ("poisson", lambda: draw(aten.poisson.default, torch.full((N,), 3.5)), 3.5, 3.5),
    ("poisson large", lambda: draw(aten.poisson.default, torch.full((N,), 1000.0)), 1000.0, 1000.0),
    ("binomial", lambda: draw(aten.binomial.default, torch.full((N,), 40.0), torch.full((N,), 0.25)), 10.0, 7.5),
    ("randint", lambda: draw(aten.randint.default, 6, [N]), 2.5, 35 / 12),
    ("randint.low", lambda: draw(aten.randint.low, -3, 4, [N]), 0.0, 4.0),
    ("randint large", lambda: draw(aten.randint.low, -(10**12), 10**12, [N]).double() / 1e12, 0.0, 1 / 3),
    ("randint_like.Tensor", lambda: draw(aten.randint_like.Tensor, F, torch.tensor(6)), 2.5, 35 / 12),
    ("random.to", lambda: draw(aten.random.to, F, 6), 2.5, 35 / 12),
    ("random.from", lambda: draw(FROM, F, 10, 16), 12.5, 35 / 12),
    ("multinomial", lambda: draw(aten.multinomial.default, torch.tensor([1.0, 0.0, 3.0, 0.0]), N, True), 1.5, 0.75),
    ("multinomial once", lambda: draw(aten.multinomial.default, torch.tensor([[1.0, 0.0, 3.0]]).repeat(N, 1), 1), 1.5, 0.75),
]


@pytest.mark.thorough(keep=7)
@pytest.mark.parametrize(("name", "sample", "mean", "var"), DISCRETE, ids=[c[0] for c in DISCRETE])
def test_moments(name, sample, mean, var):
    x = sample().double().flatten()
    assert abs(x.mean() - mean) < 4.5 * math.sqrt(var / len(x))
    assert abs(x.var() - var) < 0.1 * var + 4.5 * math.sqrt(var / len(x)) * (len(x) > N)


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        (aten.rand.default, ([2, 3],), {}),
        (aten.rand.default, ([0, 3],), {"dtype": torch.float64}),
        (aten.rand.default, ([],), {"dtype": torch.complex64}),
        (aten.rand_like.default, (torch.ones(3, dtype=torch.bfloat16),), {}),
        (aten.rand_like.default, (torch.ones(3, dtype=torch.int32),), {"dtype": torch.float16}),
        (aten.randn.default, ([2],), {"dtype": torch.complex128}),
        (aten.randint.default, (5, [2]), {}),
        (aten.randint.default, (5, [2]), {"dtype": torch.float16}),
        (aten.randint.low, (0, 2, [2]), {"dtype": torch.bool}),
        (aten.randint_like.default, (torch.ones(3), 5), {}),
        (aten.randint_like.low_dtype, (torch.ones(3), 2, 5), {"dtype": torch.uint8}),
        (aten.randint_like.Tensor, (torch.ones(3, dtype=torch.float64), torch.tensor(5)), {}),
        (aten.randperm.default, (5,), {"dtype": torch.int32}),
        (aten.randperm.default, (0,), {}),
        (aten.bernoulli.p, (torch.ones(2, 0, dtype=torch.int8), 0.5), {}),
        (aten.bernoulli.Tensor, (torch.ones(2, 3, dtype=torch.int64), torch.rand(3, dtype=torch.float64)), {}),
        (aten.bernoulli.default, (torch.rand(3, dtype=torch.float16),), {}),
        (aten.normal.Tensor_Tensor, (torch.zeros(2, 1, dtype=torch.float64), torch.ones(3)), {}),
        (aten.normal.Tensor_Tensor, (torch.zeros(2), torch.ones(2, dtype=torch.float64)), {}),
        (aten.normal.float_Tensor, (0.0, torch.ones(2, dtype=torch.bfloat16)), {}),
        (aten.normal_functional.default, (torch.zeros(2, dtype=torch.complex64),), {}),
        (aten.log_normal.default, (torch.zeros(2, dtype=torch.bfloat16),), {}),
        (aten.geometric.default, (torch.zeros(2, dtype=torch.int64), 0.5), {}),
        (aten.poisson.default, (torch.ones(2, dtype=torch.bfloat16),), {}),
        (aten.binomial.default, (torch.ones(2), torch.tensor([0.5])), {}),
        (aten.multinomial.default, (torch.ones(2, 3, dtype=torch.float16), 2), {}),
        (aten.multinomial.default, (torch.ones(3), 7, True), {}),
        (aten._standard_gamma.default, (torch.ones(2, 3, dtype=torch.float64),), {}),
        (aten._sample_dirichlet.default, (torch.ones(2, 3),), {}),
        (aten.rrelu_with_noise_functional.default, (torch.randn(3).bfloat16(), torch.zeros(3).bfloat16(), 0.1, 0.3, True), {}),
    ],
)
def test_dtype_and_shape(op, args, kwargs):
    expected, got = op(*args, **kwargs), draw(op, *args, **kwargs)
    for e, g in zip(*((x if isinstance(x, tuple) else (x,)) for x in (expected, got)), strict=True):
        assert (e.dtype, e.shape) == (g.dtype, g.shape)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_uniform_never_reaches_its_upper_bound(dtype):
    x = draw(aten.rand.default, [N], dtype=dtype)
    assert x.min() >= 0 and x.max() < 1
    for low, high in [(0.0, 3.0), (-1.0, 1.0), (0.9, 1.0), (100.0, 101.0), (-1.0, 0.0)]:
        x = draw(aten.uniform.default, torch.empty(N, dtype=dtype), low, high)
        assert x.double().min() >= torch.tensor(low, dtype=dtype).double() and x.double().max() < high
    assert (draw(aten.uniform.default, torch.empty(3, dtype=dtype), 2.0, 2.0) == 2).all()


def test_bfloat16_uniform_has_all_of_torchs_values():
    assert len(draw(aten.rand.default, [N], dtype=torch.bfloat16).unique()) == 256


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_exponential_is_positive_and_finite(dtype):
    x = draw(aten.exponential.default, torch.empty(200_000, dtype=dtype))
    assert (x > 0).all() and x.isfinite().all()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float32]
)
def test_random_covers_the_range_of_its_dtype(dtype):
    x = draw(aten.random.default, torch.empty(N, dtype=dtype)).double()
    top = {torch.bool: 1, torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24}.get(dtype) or torch.iinfo(dtype).max
    assert x.min() >= 0 and x.max() <= top and x.max() > 0.99 * top and abs(x.mean() / top - 0.5) < 0.02


def test_random_full_int64_range():
    x = draw(FROM, torch.empty(N, dtype=torch.int64), -(2**63), None)
    assert x.min() < -0.99 * 2**63 and x.max() > 0.99 * 2**63
    x = draw(aten.randint.low, -(2**63), 2**63 - 1, [N])
    assert x.min() < -0.99 * 2**63 and x.max() > 0.99 * 2**63


def test_integers_in_half_precision_stay_below_the_bound():
    x = draw(aten.randint.default, 1000, [N], dtype=torch.bfloat16).double()
    assert x.max() < 1000 and x.max() > 980
    y = draw(aten.randint.low, 1000, 2000, [N], dtype=torch.bfloat16).double()
    with pytest.warns(UserWarning, match="out of bounds"):
        reference = torch.randint(1000, 2000, [N], dtype=torch.bfloat16).double()
    assert (y.min(), y.max()) == (reference.min(), reference.max())


def test_randperm_is_a_permutation():
    x = draw(aten.randperm.default, 1000)
    assert torch.equal(x.sort().values, torch.arange(1000)) and not torch.equal(x, torch.arange(1000))


def test_bernoulli_at_its_ends():
    assert not draw(aten.bernoulli.p, F, 0.0).any() and draw(aten.bernoulli.p, F, 1.0).all()
    assert draw(aten.bernoulli.default, torch.ones(N)).all() and not draw(aten.bernoulli.default, torch.zeros(N)).any()


def test_multinomial_without_replacement():
    weights = torch.tensor([1.0, 2.0, 0.0, 4.0]).repeat(N, 1)
    x = draw(aten.multinomial.default, weights, 3)
    assert (x.sort(1).values == torch.tensor([0, 1, 3])).all()  # distinct, and never the zero
    first = torch.bincount(x[:, 0], minlength=4) / N
    torch.testing.assert_close(first, weights[0] / 7, atol=0.02, rtol=0)
    second = torch.bincount(x[x[:, 0] == 3][:, 1], minlength=4) / (x[:, 0] == 3).sum()
    torch.testing.assert_close(second, torch.tensor([1 / 3, 2 / 3, 0, 0]), atol=0.02, rtol=0)


def test_multinomial_never_draws_a_zero_weight():
    weights = torch.zeros(3, 1000)
    weights[:, 7], weights[:, 500] = 1e-3, 1e3
    for replacement, n in ((True, 5000), (False, 2)):
        assert set(draw(aten.multinomial.default, weights, n, replacement).unique().tolist()) <= {7, 500}


def test_same_key_same_values_other_key_other_values():
    for op, args in [
        (aten.rand.default, ([50],)),
        (aten.poisson.default, (torch.full((50,), 9.0),)),
        (aten.randperm.default, (50,)),
        (aten.bernoulli.p, (torch.empty(50), 0.5)),
    ]:
        assert torch.equal(draw(op, *args, seed=1), draw(op, *args, seed=1))
        assert not torch.equal(draw(op, *args, seed=1), draw(op, *args, seed=2))


def test_poisson_takes_any_kind_of_key():
    with _compat.enable_x64():
        out = lowerings.lookup(aten.poisson.default).fn(jnp.full((N,), 3.5), key=jax.random.key(0, impl="rbg"))
        assert abs(float(out.mean()) - 3.5) < 0.1
        assert float(lowerings.lookup(aten.poisson.default).fn(jnp.zeros(()), key=jax.random.key(0))) == 0.0


def test_rrelu():
    x = torch.randn(N)
    out, noise = draw(aten.rrelu_with_noise_functional.default, x, torch.zeros(N), 0.25, 0.75, True)
    assert torch.equal(out, x * noise) and (noise[x > 0] == 1).all()
    assert ks(noise[x <= 0], lambda v: (v - 0.25) * 2) < 1.95
    expected = aten.rrelu_with_noise_functional(x, torch.zeros(N), 0.25, 0.75, False)
    with _compat.enable_x64():
        lower = dtypes.Scalar(float, jnp.asarray(0.25, jnp.float64))
        got = lowerings.lookup(aten.rrelu_with_noise_functional.default).fn(
            to_jax(x), to_jax(torch.zeros(N)), lower, 0.75, False, key=jax.random.key(0)
        )
    for e, g in zip(expected, got, strict=True):
        torch.testing.assert_close(to_torch(g), e)


def test_gradients_of_gamma_and_dirichlet():
    alpha = torch.tensor([0.3, 1.0, 2.5, 8.0, 40.0], dtype=torch.float64)
    check(aten._standard_gamma_grad.default, alpha, torch.tensor([0.1, 0.7, 3.0, 6.0, 42.0], dtype=torch.float64), rtol=2e-3, atol=1e-4)
    x = torch.tensor([0.1, 0.5, 0.3, 0.2, 0.6], dtype=torch.float64)
    check(aten._dirichlet_grad.default, x, alpha, alpha + 3.0, rtol=2e-3, atol=1e-4)
    with _compat.enable_x64():
        low = lowerings.lookup(aten._standard_gamma.default).fn
        slope = jax.grad(lambda a: low(a, key=jax.random.key(0)).mean())(jnp.full((N,), 3.0)).sum()
    assert abs(float(slope) - 1.0) < 0.03  # d E[gamma(a)] / d a


def test_samples_have_no_gradient():
    with _compat.enable_x64():
        key = jax.random.key(0)
        for op, args in [
            (aten.normal.Tensor_Tensor, (jnp.ones(3), jnp.ones(3))),
            (aten.bernoulli.default, (jnp.full(3, 0.5),)),
            (aten.poisson.default, (jnp.ones(3),)),
        ]:
            assert not jax.grad(lambda *a, op=op: lowerings.lookup(op).fn(*a, key=key).sum())(*args).any()
