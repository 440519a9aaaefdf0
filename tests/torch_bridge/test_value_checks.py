"""torch's own checks of values do not cut a step: what is wrong is raised when the step runs, or at once where the script would catch it."""

from __future__ import annotations

import contextlib
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_xla
from torch import distributions as D
from torch import nn

from torch_bridge import metrics
from torch_bridge.collectives import value_checks
from torch_bridge.mesh import world
from torch_bridge.runtime import executor, session


@pytest.fixture(autouse=True)
def first_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No step has ended yet, and distributions validate: torch.compile, in a test before, switches that off for the process."""
    executor.sync()
    monkeypatch.setattr(D.Distribution, "_validate_args", True)
    monkeypatch.setattr(session.current(), "observers", ())
    monkeypatch.setattr(value_checks, "CHECKS", value_checks.ValueChecks())
    yield
    executor.sync()


def end_a_step() -> None:
    """pytest catches what a test raises: a step must have ended in it before checks wait."""
    session.current().observe(value_checks.CHECKS)
    torch_xla.sync()


def on_xla(*values: Any) -> list[torch.Tensor]:
    return [torch.tensor(value, device="xla") for value in values]


def ran(script: Callable[[], Any]) -> int:
    """How many programs a step takes."""
    before = metrics.EXECUTE_TIME.count
    kept = script()
    torch_xla.sync()
    del kept
    return metrics.EXECUTE_TIME.count - before


def _train(device: str) -> tuple[list[torch.Tensor], list[int]]:
    """A variational autoencoder's weights, and how many programs each step took."""
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(6, 4).to(device), nn.Linear(2, 6).to(device)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], 1e-2)
    draws = torch.Generator().manual_seed(1)

    def step() -> torch.Tensor:
        x, noise = torch.rand(3, 6, generator=draws).to(device), torch.randn(3, 2, generator=draws).to(device)
        mean, log_scale = encoder(x).chunk(2, -1)
        posterior = D.Normal(mean, log_scale.exp())
        prior = D.Independent(D.Normal(torch.zeros_like(mean), torch.ones_like(mean)), 1)
        seen = D.Bernoulli(logits=decoder(posterior.loc + posterior.scale * noise))
        loss = D.kl_divergence(D.Independent(posterior, 1), prior).mean() - seen.log_prob((x > 0.5).float()).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    programs = [ran(step) if device == "xla" else int(step().isnan()) for _ in range(4)]
    return [p.detach().cpu() for p in (*encoder.parameters(), *decoder.parameters())], programs


def test_a_training_step_is_one_program() -> None:
    end_a_step()
    weights, programs = _train("xla")
    assert programs == [1] * 4
    torch.testing.assert_close(weights, _train("cpu")[0], rtol=1e-4, atol=1e-5)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "parameter": (
        lambda: D.Normal(*on_xla([0.0, 0.0], [1.0, -2.0])),
        r"Expected parameter scale \(Tensor of shape \(2,\)\) of distribution Normal to satisfy the constraint GreaterThan\(lower_bound=0.0\), "
        r"but found invalid values: 1 of 2, the first is -2 at \[1\], at .*test_value_checks.py:\d+ in <lambda>",
    ),
    "one number": (lambda: D.Exponential(*on_xla(-3.0)), r"but found invalid values: -3, at "),
    "simplex": (lambda: D.Categorical(*on_xla([[-1.0, 2.0]])), r"constraint Simplex, but found invalid values: 1 of 1, the first is at \[0\]"),
    "sample": (
        lambda: D.Bernoulli(*on_xla([0.5, 0.5])).log_prob(*on_xla([0.0, 5.0])),
        r"Expected value argument .* to be within the support \(Boolean\) of the distribution Bernoulli, but found "
        r"invalid values: 1 of 2, the first is 5 at \[1\]",
    ),
    "independent": (
        lambda: D.Independent(D.Uniform(*on_xla([0.0, 0.0], [1.0, 1.0])), 1).log_prob(*on_xla([0.5, 3.0])),
        r"support \(IndependentConstraint\(Interval\)\)|support \(Interval\)",
    ),
    "symmetry": (lambda: D.MultivariateNormal(*on_xla([0.0, 0.0], [[1.0, 2.0], [0.0, 5.0]])), "constraint PositiveDefinite: it is not symmetric"),
    "variance": (lambda: nn.functional.gaussian_nll_loss(*on_xla([0.0], [0.0], [-1.0])), r"var has negative .*: `torch.any\(var < 0\)` is True, at "),
}  # fmt: skip


@pytest.mark.core(keep=3)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_raised_when_the_step_runs(name: str) -> None:
    end_a_step()
    script, text = WRONG[name]
    kept = script()
    with pytest.raises(ValueError, match=text) as error:
        torch_xla.sync()
    assert "validate_args=False" in str(error.value)
    del kept
    assert ran(lambda: torch.ones(2, device="xla") + 1) == 1  # and not again


def test_what_the_host_can_tell_is_raised_at_once() -> None:
    raised = ""
    try:
        D.Categorical(*on_xla([0.5, 0.5])).log_prob(*on_xla([0, 5]))
    except ValueError as error:
        raised = str(error)
        assert raised.startswith("Expected value argument")
    assert raised


def test_a_librarys_branch_that_only_raises() -> None:
    def step(grad: float) -> None:
        weight = torch.ones(2, device="xla", requires_grad=True)
        (weight * grad).sum().backward()
        nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)

    step(1.0)
    assert ran(lambda: step(2.0)) <= 1
    kept = torch.ones(2, device="xla", requires_grad=True)
    (kept * float("nan")).sum().backward()
    nn.utils.clip_grad_norm_([kept], 1.0, error_if_nonfinite=True)
    with pytest.raises(
        RuntimeError, match=r"The total norm of order .* is non-finite.*`torch.logical_or\(.*\)` is True, at .*test_value_checks.py"
    ):
        torch_xla.sync()


def test_a_scripts_own_assertion_is_answered_at_once() -> None:
    """Nothing may run after it."""
    before = metrics.EXECUTE_TIME.count
    assert (torch.full((2,), 0.5, device="xla").exp() > 0).all()
    assert metrics.EXECUTE_TIME.count == before + 1


def test_a_matrix_that_cannot_be_factored() -> None:
    end_a_step()
    kept = torch.linalg.cholesky(*on_xla([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 2.0], [2.0, 1.0]]]))
    with pytest.raises(torch.linalg.LinAlgError, match=r"Batch element 1.*not positive-definite\), at .*test_value_checks.py"):
        torch_xla.sync()
    del kept
    assert ran(lambda: torch.linalg.inv(*on_xla([[2.0, 1.0], [1.0, 2.0]]))) == 1


def test_all_that_is_wrong_is_named() -> None:
    end_a_step()
    kept = [D.Normal(*on_xla(0.0, -1.0 - i)) for i in range(10)]
    with pytest.raises(ValueError, match=r"values: -1, .*\n(.*\n)*\.\.\. and 2 more\nOn device xla this is known when the step has run"):
        torch_xla.sync()
    del kept


def test_what_the_script_catches_is_raised_at_once() -> None:
    def scale(value: float) -> float:
        try:
            return D.Normal(*on_xla(0.0, value)).scale.item()
        except (TypeError, ValueError):
            return 0.0

    def inverse(value: float) -> torch.Tensor:
        try:
            return torch.linalg.inv(*on_xla([[value]]))
        except torch.linalg.LinAlgError:
            return torch.zeros(1, 1)

    assert [scale(-1.0), scale(2.0)] == [0.0, 2.0]
    assert [inverse(0.0).item(), inverse(2.0).item()] == [0.0, 0.5]
    with pytest.raises(ValueError, match="Expected parameter scale"):
        D.Normal(*on_xla(0.0, -1.0))


def test_a_try_around_whole_steps_does_not_cut_them() -> None:
    """Once a step has ended in it: what a run raises it catches, too."""
    programs, caught = [], ""
    try:
        for value in (1.0, 2.0, -3.0):
            programs.append(ran(lambda value=value: D.Normal(*on_xla(0.0, value))))
    except Exception as error:
        caught = str(error)
    assert programs == [2, 1]
    assert "found invalid values: -3" in caught


def test_a_step_that_ended_in_another_call_of_a_function_says_nothing_of_this_one() -> None:
    def raises(function: Callable[[], Any]) -> bool:
        try:
            function()
        except ValueError:
            return True
        return False

    def step() -> None:
        D.Normal(*on_xla(0.0, 1.0))
        torch_xla.sync()

    assert not raises(step)
    assert raises(lambda: D.Normal(*on_xla(0.0, -1.0)))
    assert not raises(step)


def test_errors_that_unittest_and_pytest_wait_for_come_at_once() -> None:
    case = unittest.TestCase()
    case.assertRaises(ValueError, D.Normal, *on_xla(0.0, -1.0))
    case.assertRaisesRegex(ValueError, "Expected parameter scale", lambda: D.Normal(*on_xla(0.0, -1.0)))
    case.assertRaises(torch.linalg.LinAlgError, lambda: torch.linalg.cholesky(*on_xla([[-1.0]])))
    with case.assertRaises(ValueError):
        D.Normal(*on_xla(0.0, -1.0))
    call_form: Any = pytest.raises
    call_form(ValueError, D.Normal, *on_xla(0.0, -1.0))
    waiting = pytest.raises(ValueError)
    with waiting:
        D.Normal(*on_xla(0.0, -1.0))
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(ValueError))
        D.Normal(*on_xla(0.0, -1.0))


def test_a_try_that_raises_again_does_not_cut_steps() -> None:
    end_a_step()
    noted = []
    try:
        assert ran(lambda: D.Normal(*on_xla(0.0, 1.0))) == 1
    except ValueError as error:
        noted.append(error)
        raise


class _BadData(Exception):
    pass


class _BadBatch(_BadData):
    pass


def test_an_error_that_is_raised_again_as_another_one_comes_at_once_where_that_is_caught() -> None:
    def scale(value: float) -> torch.Tensor:
        try:
            return D.Normal(*on_xla(0.0, value)).scale
        except ValueError as error:
            raise _BadBatch from error

    def kept(value: float) -> float | None:
        try:
            return scale(value).item()
        except _BadData:
            return None

    end_a_step()
    assert [kept(-1.0), kept(2.0)] == [None, 2.0]
    assert ran(lambda: scale(1.0)) == 1  # nobody catches it before the step ends


def test_an_abstract_run_goes_on() -> None:
    from nxd_jax import abstract_run

    with abstract_run(1):
        scale = D.Normal(torch.zeros(3, device="xla"), torch.randn(3, device="xla").exp()).scale
        torch_xla.sync()
        assert scale.shape == (3,)


def test_who_looks_at_checks_is_gone_after_a_step_without_any() -> None:
    """So that modules may be run without segments."""
    end_a_step()
    own = session.current()
    assert value_checks.CHECKS not in own.observers
    kept = D.Normal(*on_xla([0.0, 1.0], [1.0, 2.0]))
    assert value_checks.CHECKS in own.observers
    torch_xla.sync()
    assert value_checks.CHECKS in own.observers
    torch_xla.sync()
    assert value_checks.CHECKS not in own.observers
    with pytest.raises(ValueError, match="found invalid values"):
        assert ran(lambda: D.Normal(*on_xla([0.0, 1.0], [1.0, -2.0]))) == kept
    del kept


@pytest.fixture
def two_ranks() -> Iterator[None]:
    world.configure(world.World(2))
    yield
    world.configure(None)


def test_the_rank_is_named(two_ranks: None) -> None:
    end_a_step()
    kept = D.Normal(torch.zeros(2, device="xla"), torch.ones(2, device="xla") - 1.5 * world.rank())
    with pytest.raises(ValueError, match=r": 2 of 2, the first is -0.5 at \[0\], on rank 1, at "):
        torch_xla.sync()
    del kept
