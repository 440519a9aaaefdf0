"""Random numbers of device xla, as scripts ask for them: distribution, reproducibility, independence, gradients of samples, refused arguments.

The tests of single lowerings are in `lowerings/test_random.py`. Seeds are fixed, so that nothing here is flaky; the probabilities say how rare a failure is
for a right sampler with another seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.stats as st
import torch
from torch import distributions as D
from torch import nn
from torch.nn import functional as F

import torch_bridge
from torch_bridge import metrics

torch_bridge.register()

N = 8192
RARE = 1e-4
"""A right sampler fails a goodness-of-fit test with this probability."""

Draw = Callable[[], torch.Tensor]


@pytest.fixture(autouse=True, scope="module")
def no_validation() -> Iterator[None]:
    """Values that `torch.distributions` looks at to validate arguments are not what is tested here."""
    before = D.Distribution._validate_args
    D.Distribution.set_default_validate_args(False)
    yield
    D.Distribution.set_default_validate_args(before)


def empty(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(N, device="xla", dtype=dtype)


def full(value: float) -> torch.Tensor:
    return torch.full((N,), value, device="xla")


def on_xla(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(v, device="xla") for v in values]


def rrelu_slopes() -> torch.Tensor:
    return -F.rrelu(-torch.ones(N, device="xla"), 0.2, 0.6, training=True)


CONTINUOUS: dict[str, tuple[Draw, st.rv_continuous]] = {
    "rand": (lambda: torch.rand(N, device="xla"), st.uniform()),
    "rand f64": (lambda: torch.rand(N, device="xla", dtype=torch.float64), st.uniform()),
    "rand_like": (lambda: torch.rand_like(empty()), st.uniform()),
    "uniform_": (lambda: empty().uniform_(-2, 3), st.uniform(-2, 5)),
    "randn": (lambda: torch.randn(N, device="xla"), st.norm()),
    "randn_like": (lambda: torch.randn_like(empty()), st.norm()),
    "normal": (lambda: torch.normal(1.0, 2.0, (N,), device="xla"), st.norm(1, 2)),
    "normal tensors": (lambda: torch.normal(full(1.0), full(2.0)), st.norm(1, 2)),
    "normal_": (lambda: empty().normal_(-1, 0.5), st.norm(-1, 0.5)),
    "trunc_normal_": (lambda: nn.init.trunc_normal_(empty(), 0, 1, -1, 2), st.truncnorm(-1, 2)),
    "log_normal_": (lambda: empty().log_normal_(0.5, 0.7), st.lognorm(0.7, scale=math.exp(0.5))),
    "exponential_": (lambda: empty().exponential_(0.5), st.expon(scale=2)),
    "cauchy_": (lambda: empty().cauchy_(1, 2), st.cauchy(1, 2)),
    "gamma": (lambda: torch._standard_gamma(full(2.5)), st.gamma(2.5)),
    "gamma small": (lambda: torch._standard_gamma(full(0.3)), st.gamma(0.3)),
    "dirichlet": (lambda: torch._sample_dirichlet(torch.tensor([1.0, 2.0, 3.0], device="xla").repeat(N, 1))[:, 2], st.beta(3, 3)),
    "rrelu": (rrelu_slopes, st.uniform(0.2, 0.4)),
}

DISCRETE: dict[str, tuple[Draw, st.rv_discrete]] = {
    "bernoulli": (lambda: torch.bernoulli(full(0.3)), st.bernoulli(0.3)),
    "bernoulli_": (lambda: empty().bernoulli_(0.6), st.bernoulli(0.6)),
    "bernoulli_ tensor": (lambda: empty(torch.int32).bernoulli_(full(0.9)), st.bernoulli(0.9)),
    "randint": (lambda: torch.randint(-3, 9, (N,), device="xla"), st.randint(-3, 9)),
    "randint_like": (lambda: torch.randint_like(empty(), 7), st.randint(0, 7)),
    "random_": (lambda: empty().random_(2, 12), st.randint(2, 12)),
    "randperm": (lambda: torch.randperm(N, device="xla") % 16, st.randint(0, 16)),
    "geometric_": (lambda: empty().geometric_(0.25), st.geom(0.25)),
    "poisson": (lambda: torch.poisson(full(3.5)), st.poisson(3.5)),
    "poisson large": (lambda: torch.poisson(full(40.0)), st.poisson(40)),
    "binomial": (lambda: torch.binomial(full(12.0), full(0.3)), st.binom(12, 0.3)),
    "multinomial": (
        lambda: torch.multinomial(torch.tensor([1.0, 2.0, 0.0, 5.0], device="xla"), N, replacement=True),
        st.rv_discrete(values=([0, 1, 2, 3], [1 / 8, 2 / 8, 0, 5 / 8])),
    ),
    "gumbel_softmax": (
        lambda: F.gumbel_softmax(torch.tensor([0.0, math.log(3.0), math.log(4.0)], device="xla").repeat(N, 1), hard=True).argmax(-1),
        st.rv_discrete(values=([0, 1, 2], [1 / 8, 3 / 8, 4 / 8])),
    ),
    "dropout": (lambda: F.dropout(torch.ones(N, device="xla"), 0.3) > 0, st.bernoulli(0.7)),
    "dropout1d": (lambda: F.dropout1d(torch.ones(N, 1, 2, device="xla"), 0.3)[:, 0, 1] > 0, st.bernoulli(0.7)),
    "feature_dropout": (lambda: torch.feature_dropout(torch.ones(N // 4, 4, 2, device="xla"), 0.3, True)[:, :, 0] > 0, st.bernoulli(0.7)),
    "alpha_dropout": (lambda: F.alpha_dropout(torch.zeros(N, device="xla"), 0.3, True) > 0, st.bernoulli(0.7)),
    "feature_alpha_dropout": (
        lambda: F.feature_alpha_dropout(torch.zeros(N, 1, 2, device="xla"), 0.3, True)[:, :, 1] > 0,
        st.bernoulli(0.7),
    ),
}


EVERY = {**CONTINUOUS, **DISCRETE}
Samples = dict[str, np.ndarray]


def numbers(x: torch.Tensor) -> np.ndarray:
    """A sample as float64 numbers, in the order it was drawn."""
    return x.detach().double().cpu().flatten().numpy()


def seeded(draw: Draw, seed: int = 1) -> np.ndarray:
    torch.manual_seed(seed)
    return numbers(draw())


def draw_all() -> Samples:
    """One sample of each kind, from one program."""
    drawn = {name: draw() for name, (draw, _) in EVERY.items()}
    torch.xla.synchronize()
    return {name: numbers(x) for name, x in drawn.items()}


class Rounds(NamedTuple):
    """Samples of the seed 7, of the step after it, of that step again from its restored state, of seed 7 again, and of seed 8."""

    first: Samples
    second: Samples
    replayed: Samples
    again: Samples
    other: Samples
    compilations: int


@pytest.fixture(scope="module")
def rounds() -> Rounds:
    draw_all(), draw_all()  # what starts a run and what follows may be programs of their own
    torch.manual_seed(7)
    first = draw_all()
    compiled = metrics.COUNTERS["UncachedCompile"]
    state = torch.xla.get_rng_state()
    second = draw_all()
    torch.xla.set_rng_state(state)
    replayed = draw_all()
    torch.manual_seed(7)
    again = draw_all()
    torch.manual_seed(8)
    return Rounds(first, second, replayed, again, draw_all(), metrics.COUNTERS["UncachedCompile"] - compiled)


def frequencies(sample: np.ndarray, law: st.rv_discrete) -> float:
    """The p-value of Pearson's chi-square test; outcomes expected fewer than 20 times count together."""
    values = np.arange(int(sample.min()), int(sample.max()) + 1)
    expected, seen = law.pmf(values) * len(sample), np.array([(sample == v).sum() for v in values])
    assert not seen[expected == 0].any()
    common = expected >= 20
    rest = len(sample) - expected[common].sum(), len(sample) - seen[common].sum()
    e, o = np.append(expected[common], rest[0]), np.append(seen[common], rest[1])
    keep = e > 1e-6
    return float(st.chisquare(o[keep], e[keep] * o[keep].sum() / e[keep].sum()).pvalue)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous(name: str, rounds: Rounds) -> None:
    law = CONTINUOUS[name][1]
    sample = rounds.first[name]
    assert len(sample) == N
    assert st.kstest(sample, law.cdf).pvalue > RARE
    if name != "cauchy_":  # it has no moments
        assert abs(sample.mean() - law.mean()) < 4.5 * law.std() / math.sqrt(N)
        assert abs(sample.var() / law.var() - 1) < 4.5 * math.sqrt((float(law.stats(moments="k")) + 2) / N)


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete(name: str, rounds: Rounds) -> None:
    law = DISCRETE[name][1]
    sample = rounds.first[name]
    assert len(sample) == N
    assert frequencies(sample, law) > RARE
    assert abs(sample.mean() - law.mean()) < 4.5 * law.std() / math.sqrt(N)


def test_the_frequencies_of_a_wrong_law_are_seen(rounds: Rounds) -> None:
    assert frequencies(rounds.first["poisson"], st.poisson(3.7)) < RARE
    assert st.kstest(rounds.first["gamma"], st.gamma(2.6).cdf).pvalue < RARE


# -- one draw and the next --------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_a_seed_or_a_state_gives_the_same_numbers_and_calls_are_independent(name: str, rounds: Rounds) -> None:
    """Neither the next element of a call, nor the same element of the next call or seed, says anything about an element."""
    first, second, replayed, again, other = (samples[name] for samples in rounds[:-1])
    assert np.array_equal(again, first)
    assert np.array_equal(replayed, second)
    assert not np.array_equal(second, first) and not np.array_equal(other, first)
    for unrelated in (second, other, np.roll(first, 1)):
        assert abs(st.spearmanr(first, unrelated).statistic) < 4.5 / math.sqrt(N)


def test_neither_a_seed_nor_a_step_recompiles(rounds: Rounds) -> None:
    assert rounds.compilations == 0


def test_neighbouring_seeds_are_unrelated() -> None:
    samples = np.stack([seeded(lambda: torch.randn(1024, device="xla"), seed) for seed in range(8)])
    off_diagonal = np.corrcoef(samples)[~np.eye(8, dtype=bool)]
    assert np.abs(off_diagonal).max() < 4.5 / math.sqrt(1024)
    assert st.kstest(samples[:, 0], st.norm.cdf).pvalue > RARE


def test_fields_of_one_module_draw_differently() -> None:
    """Two dropout layers of equal shape in one graph, and one layer in two steps."""
    model = nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.5)]).to("xla")
    x = torch.ones(N, device="xla")
    masks = []
    for _ in range(2):
        masks += [layer(x) > 0 for layer in model]
        torch.xla.synchronize()
    rows = np.corrcoef(torch.stack(masks).double().cpu().numpy())
    assert np.abs(rows[~np.eye(4, dtype=bool)]).max() < 4.5 / math.sqrt(N)


# -- dropout ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_mean_and_alpha_dropout_the_variance_too(p: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(8 * N, device="xla")
    torch.xla.synchronize()
    y, z = F.dropout(x + 1, p), F.alpha_dropout(x, p, True)
    scale = math.sqrt(8 * N)
    assert abs(y.mean().item() - (x + 1).mean().item()) < 4.5 * math.sqrt(2 * p / (1 - p)) / scale
    torch.testing.assert_close((y / (x + 1)).cpu(), ((y != 0) / (1 - p)).cpu())
    assert abs(z.mean().item()) < 6 / scale and abs(z.var().item() - 1) < 0.08


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_channel_dropout_takes_whole_channels(dims: int) -> None:
    torch.manual_seed(0)
    y = getattr(F, f"dropout{dims}d")(torch.ones(64, 16, *[3] * dims, device="xla"), 0.25).cpu().flatten(2)
    assert (y == y[..., :1]).all()
    torch.testing.assert_close(y, (y > 0) / 0.75)
    assert abs((y[..., 0] > 0).double().mean() - 0.75) < 4.5 * math.sqrt(0.1875 / 1024)


@pytest.mark.parametrize("function", [F.dropout, F.dropout1d, F.alpha_dropout, F.feature_alpha_dropout])
def test_dropout_at_its_ends(function: Callable[..., torch.Tensor]) -> None:
    x = torch.randn(4, 5, 6)
    for p, training in ((0.0, True), (0.7, False), (1.0, True)):
        assert torch.equal(function(x.to("xla"), p, training).cpu(), function(x, p, training))


def test_attention_drops_probabilities() -> None:
    """With values that are the identity, attention returns its dropped probabilities."""
    torch.manual_seed(0)
    q = torch.zeros(8, 4, 32, 32, device="xla")
    eye = torch.eye(32, device="xla").expand(8, 4, 32, 32)
    out = F.scaled_dot_product_attention(q, q, eye, dropout_p=0.25).cpu()
    assert out.unique().allclose(torch.tensor([0.0, 1 / (32 * 0.75)]))
    assert abs((out > 0).double().mean() - 0.75) < 4.5 * math.sqrt(0.1875 / out.numel())


# -- torch.distributions ----------------------------------------------------------------------------


class Kumaraswamy(NamedTuple):
    """scipy has no such distribution."""

    a: float
    b: float

    def cdf(self, x: np.ndarray) -> np.ndarray:
        return 1 - (1 - x**self.a) ** self.b


UNIVARIATE: dict[str, tuple[Callable[..., D.Distribution], tuple[float, ...], Callable[..., Any]]] = {
    "Normal": (D.Normal, (1.0, 2.0), st.norm),
    "Uniform": (D.Uniform, (-1.0, 2.0), lambda a, b: st.uniform(a, b - a)),
    "Laplace": (D.Laplace, (1.0, 2.0), st.laplace),
    "Cauchy": (D.Cauchy, (1.0, 2.0), st.cauchy),
    "HalfCauchy": (D.HalfCauchy, (2.0,), lambda s: st.halfcauchy(0, s)),
    "HalfNormal": (D.HalfNormal, (2.0,), lambda s: st.halfnorm(0, s)),
    "Gumbel": (D.Gumbel, (1.0, 2.0), st.gumbel_r),
    "LogNormal": (D.LogNormal, (0.3, 0.6), lambda m, s: st.lognorm(s, scale=np.exp(m))),
    "Exponential": (D.Exponential, (0.5,), lambda r: st.expon(scale=1 / r)),
    "Gamma": (D.Gamma, (2.5, 0.7), lambda a, r: st.gamma(a, scale=1 / r)),
    "InverseGamma": (D.InverseGamma, (3.5, 0.7), lambda a, r: st.invgamma(a, scale=r)),
    "Chi2": (D.Chi2, (3.0,), st.chi2),
    "Beta": (D.Beta, (2.0, 0.8), st.beta),
    "Kumaraswamy": (D.Kumaraswamy, (2.0, 3.0), lambda a, b: Kumaraswamy(a, b)),
    "Pareto": (D.Pareto, (2.0, 4.0), lambda s, a: st.pareto(a, scale=s)),
    "Weibull": (D.Weibull, (2.0, 1.5), lambda s, c: st.weibull_min(c, scale=s)),
    "StudentT": (D.StudentT, (5.0, 1.0, 2.0), st.t),
    "FisherSnedecor": (D.FisherSnedecor, (6.0, 9.0), st.f),
}
COMPOSED = {"StudentT", "FisherSnedecor"}
"""Functions of two random numbers: their samples have no one slope."""

COUNTS: dict[str, tuple[Callable[[], D.Distribution], st.rv_discrete]] = {
    "Bernoulli": (lambda: D.Bernoulli(*on_xla(0.3)), st.bernoulli(0.3)),
    "Binomial": (lambda: D.Binomial(9, *on_xla(0.3)), st.binom(9, 0.3)),
    "Geometric": (lambda: D.Geometric(*on_xla(0.3)), st.geom(0.3, -1)),
    "NegativeBinomial": (lambda: D.NegativeBinomial(*on_xla(3.0, 0.4)), st.nbinom(3, 0.6)),
    "Poisson": (lambda: D.Poisson(*on_xla(2.5)), st.poisson(2.5)),
    "Categorical": (
        lambda: D.Categorical(torch.tensor([1.0, 3.0, 4.0], device="xla")),
        st.rv_discrete(values=([0, 1, 2], [1 / 8, 3 / 8, 4 / 8])),
    ),
}


Slopes = dict[str, tuple[np.ndarray, list[np.ndarray]]]


@pytest.fixture(scope="module")
def slopes() -> Slopes:
    """A sample of each distribution and its derivative by each parameter, from one program."""
    torch.manual_seed(2)
    drawn = {}
    for name, (make, values, _) in UNIVARIATE.items():
        parameters = [torch.full((N,), v, device="xla", requires_grad=True) for v in values]
        sample = make(*parameters).rsample()
        sample.sum().backward()
        drawn[name] = sample, [p.grad for p in parameters]
    torch.xla.synchronize()
    return {name: (numbers(x), [numbers(g) for g in grads]) for name, (x, grads) in drawn.items()}


@pytest.mark.parametrize("name", UNIVARIATE)
def test_univariate_distributions_and_the_slopes_of_their_samples(name: str, slopes: Slopes) -> None:
    """Moving a parameter moves a sample along its quantile: d x / d theta = -(d cdf / d theta) / pdf, whatever the sampler."""
    _, values, law = UNIVARIATE[name]
    x, grads = slopes[name]
    cdf = lambda x, v=values: law(*v).cdf(x)  # noqa: E731
    assert st.kstest(x, cdf).pvalue > RARE
    if name in COMPOSED:
        return
    middle = np.flatnonzero((cdf(x) > 0.02) & (cdf(x) < 0.98))[:200]
    x, step = x[middle], 1e-4
    width = step * np.abs(x)
    pdf = (cdf(x + width) - cdf(x - width)) / (2 * width)
    for i, grad in enumerate(grads):
        above, below = ([v + sign * step * (j == i) for j, v in enumerate(values)] for sign in (1, -1))
        slope = -(cdf(x, above) - cdf(x, below)) / (2 * step) / pdf
        np.testing.assert_allclose(grad[middle], slope, rtol=5e-3, atol=5e-3, err_msg=f"{name}, parameter {i}")


def test_slopes_of_composed_samples_in_the_mean() -> None:
    """E[log |t|] and E[log F] have closed forms in the degrees of freedom."""
    trigamma = lambda x: torch.polygamma(1, torch.tensor(x)).item()  # noqa: E731
    torch.manual_seed(3)
    df, first, second = (torch.full((4 * N,), v, device="xla", requires_grad=True) for v in (5.0, 6.0, 9.0))
    D.StudentT(df).rsample().abs().log().sum().backward()
    D.FisherSnedecor(first, second).rsample().log().sum().backward()
    for parameter, expected in (
        (df, 1 / 10 - trigamma(2.5) / 4),
        (first, trigamma(3.0) / 2 - 1 / 6),
        (second, 1 / 9 - trigamma(4.5) / 2),
    ):
        g = parameter.grad.double().cpu()
        assert abs(g.mean().item() - expected) < 4.5 * g.std().item() / math.sqrt(len(g))


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("name", COUNTS)
def test_counting_distributions(name: str) -> None:
    make, law = COUNTS[name]
    assert frequencies(seeded(lambda: make().sample((N,))), law) > RARE


MULTIVARIATE: dict[str, Callable[[], D.Distribution]] = {
    "MultivariateNormal": lambda: D.MultivariateNormal(*on_xla([1.0, 2.0], [[2.0, 0.6], [0.6, 1.0]])),
    "LowRankMultivariateNormal": lambda: D.LowRankMultivariateNormal(*on_xla([1.0, 2.0], [[1.0], [0.5]], [0.5, 0.8])),
    "Dirichlet": lambda: D.Dirichlet(*on_xla([1.0, 2.0, 3.0])),
    "Multinomial": lambda: D.Multinomial(6, *on_xla([0.2, 0.3, 0.5])),
    "OneHotCategorical": lambda: D.OneHotCategorical(*on_xla([0.2, 0.3, 0.5])),
    "Wishart": lambda: D.Wishart(*on_xla(9.0, [[1.0, 0.3], [0.3, 2.0]])),
    "MixtureSameFamily": lambda: D.MixtureSameFamily(D.Categorical(*on_xla([0.3, 0.7])), D.Normal(*on_xla([-2.0, 1.0], [0.5, 1.0]))),
    "ContinuousBernoulli": lambda: D.ContinuousBernoulli(*on_xla([0.2, 0.7])),
    "GeneralizedPareto": lambda: D.GeneralizedPareto(*on_xla([1.0, 0.0], [2.0, 1.0], [0.1, 0.05])),
    "Independent": lambda: D.Independent(D.Gamma(*on_xla([2.0, 3.0], [1.0, 2.0])), 1),
}


@pytest.mark.thorough(keep=5)
@pytest.mark.filterwarnings("ignore:Singular sample detected")  # torch's Wishart says so of every sample, on the CPU too
@pytest.mark.parametrize("name", MULTIVARIATE)
def test_moments_of_multivariate_distributions(name: str) -> None:
    """The sample's mean and variance are those the distribution states."""
    law = MULTIVARIATE[name]()
    torch.manual_seed(4)
    sample = law.sample((N,))
    mean, variance = (m.double().cpu() for m in (law.mean, law.variance))
    x = sample.double().cpu()
    assert ((x.mean(0) - mean).abs() < 4.5 * variance.sqrt() / math.sqrt(N)).all()
    assert ((x.var(0) / variance - 1).abs() < 0.2).all()


def test_the_correlations_of_multivariate_samples() -> None:
    torch.manual_seed(5)
    x = MULTIVARIATE["MultivariateNormal"]().sample((N,)).cpu()
    assert (torch.cov(x.T) - torch.tensor([[2.0, 0.6], [0.6, 1.0]])).abs().max() < 0.15
    counts = MULTIVARIATE["Multinomial"]().sample((N,)).cpu()
    assert (counts.sum(1) == 6).all()
    assert abs(torch.cov(counts.T)[0, 2].item() + 6 * 0.2 * 0.5) < 0.07


def test_relaxed_and_circular_distributions() -> None:
    """A relaxed draw lies above 1/2 as often as the law it relaxes is 1; von Mises draws agree with scipy's law."""
    relaxed = seeded(lambda: D.RelaxedBernoulli(*on_xla(0.5, 0.3)).rsample((N,)) > 0.5)
    assert frequencies(relaxed, st.bernoulli(0.3)) > RARE
    hot = seeded(lambda: D.RelaxedOneHotCategorical(*on_xla(0.5, [0.2, 0.3, 0.5])).rsample((N,)).argmax(-1))
    assert frequencies(hot, st.rv_discrete(values=([0, 1, 2], [0.2, 0.3, 0.5]))) > RARE
    angles = seeded(lambda: D.VonMises(*on_xla(0.5, 2.0)).sample((512,)))
    assert st.kstest(angles, st.vonmises(2.0, 0.5).cdf).pvalue > RARE


def test_gradients_reach_what_a_hard_gumbel_softmax_is_made_of() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]], device="xla").repeat(64, 1).requires_grad_()
    torch.manual_seed(6)
    hard = F.gumbel_softmax(logits, tau=0.7, hard=True)
    assert torch.equal(hard.sum(-1).round().cpu(), torch.ones(64))
    (hard * torch.arange(3.0, device="xla")).sum().backward()
    grad = logits.grad.cpu()
    assert grad.abs().max() > 0.1 and grad.sum(-1).abs().max() < 1e-5


# -- refused arguments ------------------------------------------------------------------------------

X = lambda dtype=torch.float32: torch.empty(3, device="xla", dtype=dtype)  # noqa: E731
REFUSED: dict[str, tuple[Draw, type[Exception], str]] = {
    "bernoulli_ p": (lambda: X().bernoulli_(1.5), RuntimeError, r"p to be in \[0, 1\], but got p=1.5"),
    "bernoulli integers": (lambda: torch.bernoulli(X(torch.int64)), NotImplementedError, "bernoulli.*int64.*randint"),
    "bernoulli_ integer p": (lambda: X().bernoulli_(X(torch.int64)), NotImplementedError, "tensor p.*int64"),
    "randint empty": (lambda: torch.randint(5, 5, (3,), device="xla"), RuntimeError, "'from' to be less than 'to', but got from=5 >= to=5"),
    "randint dtype": (
        lambda: torch.randint(0, 1000, (3,), device="xla", dtype=torch.uint8),
        RuntimeError,
        r"to - 1 is out.*uint8: 999.*255",
    ),
    "randint complex": (lambda: torch.randint(0, 9, (3,), device="xla", dtype=torch.complex64), RuntimeError, "complex64"),
    "randint_like": (lambda: torch.randint_like(X(), 0), RuntimeError, "from=0 >= to=0"),
    "randint_like low": (lambda: torch.randint_like(X(torch.uint8), -1, 3), RuntimeError, "from is out of bounds for torch.uint8"),
    "random_": (lambda: X().random_(0), RuntimeError, "from=0 >= to=0"),
    "random_ from": (lambda: X(torch.int8).random_(-200, 3), RuntimeError, r"from is out.*int8: -200 is not in \[-128, 127\]"),
    "random_ from only": (lambda: X(torch.bool).random_(2, None), RuntimeError, "from is out of bounds for torch.bool"),
    "randperm": (lambda: torch.randperm(300, device="xla", dtype=torch.uint8), RuntimeError, "n=300 is too large for torch.uint8.*255"),
    "randperm half": (lambda: torch.randperm(2050, device="xla", dtype=torch.half), RuntimeError, "n=2050.*float16.*2048"),
    "randperm bool": (lambda: torch.randperm(2, device="xla", dtype=torch.bool), NotImplementedError, "randperm.*bool"),
    "rand": (lambda: torch.rand(3, device="xla", dtype=torch.int64), NotImplementedError, "int64.*randint"),
    "rand_like": (lambda: torch.rand_like(X(torch.int32)), NotImplementedError, "int32.*randint"),
    "uniform_ order": (lambda: X().uniform_(1, 0), RuntimeError, "from=1.0 > to=0.0"),
    "uniform_ bound": (lambda: X(torch.half).uniform_(0, 1e6), RuntimeError, "to=1000000.0 is out of bounds for torch.float16.*65504"),
    "uniform_ width": (lambda: X().uniform_(-3e38, 3e38), RuntimeError, r"to - from <= 3.40282e\+38"),
    "uniform_ integers": (lambda: X(torch.int32).uniform_(), NotImplementedError, "int32.*randint"),
    "poisson": (lambda: torch.poisson(X(torch.int64)), NotImplementedError, "poisson.*int64"),
    "binomial count": (lambda: torch.binomial(X(torch.int64), X()), ValueError, "for count, got: torch.int64"),
    "binomial prob": (lambda: torch.binomial(X(), X(torch.int64)), ValueError, "for prob, got: torch.int64"),
    "multinomial": (lambda: torch.multinomial(torch.ones(3, device="xla"), 4), RuntimeError, "without replacement"),
    "normal_": (lambda: X().normal_(0, -1), RuntimeError, "std >= 0.0, but found std -1"),
    "geometric_": (lambda: X().geometric_(1.0), RuntimeError, r"p to be in \(0, 1\), but got p=1"),
    "exponential_": (lambda: X().exponential_(-1), RuntimeError, "lambda > 0.0, but found lambda=-1"),
    "cauchy_": (lambda: X().cauchy_(0, 0), RuntimeError, "sigma > 0.0, but found sigma=0"),
    "log_normal_": (lambda: X().log_normal_(0, 0), RuntimeError, "std > 0.0, but found std=0"),
    "rrelu": (lambda: F.rrelu(X(), 0.5, 0.1, training=True), RuntimeError, "Lower bound should be less"),
    "feature_dropout": (lambda: torch.feature_dropout(X(), 0.5, True), RuntimeError, "at least 2 dimensions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_cpu_refuses_is_refused(name: str) -> None:
    draw, error, text = REFUSED[name]
    before = torch.xla.get_rng_state()
    with pytest.raises(error, match=text):
        draw()
    assert torch.equal(torch.xla.get_rng_state(), before)


def test_parameters_that_only_their_values_show_wrong_give_no_plausible_sample() -> None:
    """The CPU raises; on the device NaN, or the index -1, takes the place of the sample, and only of that one."""
    wrong = torch.tensor([0.5, -1.0, 0.5], device="xla")
    for sample in (torch.poisson(wrong), torch.bernoulli(wrong), X().bernoulli_(wrong), torch.normal(torch.zeros_like(wrong), wrong)):
        assert sample.isnan().tolist() == [False, True, False]
    for bad in ([1.0, -1.0], [1.0, math.nan], [1.0, math.inf], [0.0, 0.0]):
        weights = torch.tensor([[1.0, 1.0], bad], device="xla")
        for replacement in (True, False):
            drawn = torch.multinomial(weights, 2, replacement).cpu()
            assert (drawn[0] >= 0).all() and (drawn[1] == -1).all()


@pytest.mark.parametrize("deviation", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("mean", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_normal_has_the_dtype_of_its_mean(mean: torch.dtype, deviation: torch.dtype) -> None:
    given = torch.zeros(2, 1, dtype=mean), torch.ones(3, dtype=deviation)
    found = torch.normal(*(t.to("xla") for t in given))
    assert found.dtype == torch.normal(*given).dtype and found.cpu().shape == (2, 3)
