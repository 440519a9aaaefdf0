"""Checks that compile together fail one by one: each under the id of its own test, with the message that it has alone."""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests import quick
from tests.torch_bridge.lowerings import batches, conftest
from torch_bridge.lowerings import Lowering, registry

aten = torch.ops.aten

VALUES = """
import pytest, torch
from tests.torch_bridge.lowerings.autograd_parity import check_grad
from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.gradients import check_gradient
from tests.torch_bridge.lowerings.nn_checks import check_gradients
from tests.torch_bridge.lowerings.parity import check

X = torch.linspace(0.1, 1, 5)

@pytest.mark.parametrize("name", ["exp", "sin", "cos", "tan", "sqrt", "log"])
@together
def test_op(name):
    check(getattr(torch.ops.aten, name).default, X)
    check(getattr(torch.ops.aten, name).default, X.double())
"""
GRADIENTS = """
@pytest.mark.parametrize("name", ["exp", "sin", "cos"])
@pytest.mark.parametrize("verify", [check_gradient, check_gradients, check_grad])
@together
def test_gradient(verify, name):
    verify(getattr(torch.ops.aten, name).default, X)
"""

Run = Callable[..., dict[str, str]]


class Reports:
    """A plugin that keeps the message of what failed, by test; empty for what passed."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the report of the call, and of a setup that failed."""
        if report.when == "call" or report.failed:
            message = report.longrepr.reprcrash.message if report.failed else ""
            self.texts[report.nodeid.partition("::")[2]] = re.sub(r"(?m)^  .*\n", "", message)  # JAX writes its callers there


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many programs compiled together, batch by batch."""
    found: list[int] = []
    run_together = batches.run_together
    monkeypatch.setattr(batches, "run_together", lambda programs: (found.append(len(programs)), run_together(programs))[1])
    return found


@pytest.fixture
def run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run tests written in a text as those of this folder run: all, or the one named."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def run(text: str, name: str = "") -> dict[str, str]:
        path = tmp_path / "test_made.py"
        path.write_text(text)
        sys.modules.pop(path.stem, None)  # of an earlier run
        reports = Reports()
        options = ["-p", "no:terminal", "-p", "no:timeout", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", "/dev/null"]
        pytest.main([str(path) + name, "--rootdir", str(tmp_path), *options], plugins=[conftest, reports])
        return reports.texts

    return run


def lowered(monkeypatch: pytest.MonkeyPatch, op: torch._ops.OpOverload, fn: Callable) -> None:
    """Give an op another lowering, for one test."""
    monkeypatch.setitem(registry._TABLE, op, Lowering(fn))


def raises(x: object) -> object:
    raise RuntimeError("this lowering is broken")


def fails_when_run(x: jax.Array) -> jax.Array:
    return jax.pure_callback(raises, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def failed(texts: dict[str, str]) -> set[str]:
    return {name for name, text in texts.items() if text}


def test_all_pass_in_one_program(run: Run, sizes: list[int]) -> None:
    texts = run(VALUES + GRADIENTS)
    assert len(texts) == 15 and not failed(texts)
    assert sizes == [21]


def test_a_program_at_a_time(run: Run, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "SIZE", 6)
    texts = run(VALUES + GRADIENTS)
    assert len(texts) == 15 and not failed(texts)
    assert sizes == [6, 6, 6, 3]


def test_a_test_that_is_named_compiles_alone(run: Run, sizes: list[int]) -> None:
    assert run(VALUES + GRADIENTS, "::test_gradient[check_grad-exp]") == {"test_gradient[check_grad-exp]": ""}
    assert sizes == []


BROKEN = [
    pytest.param(lambda x: jnp.sin(x) + 1e-3, "Tensor-likes are not close!", id="wrong numbers"),
    pytest.param(
        lambda x: jnp.sin(x).astype(jnp.float16), "aten.sin.default: dtype torch.float16, torch gives torch.float32", id="wrong dtype"
    ),
    pytest.param(lambda x: jnp.sin(x)[None], "aten.sin.default: shape (1, 5), torch gives (5,)", id="wrong shape"),
    pytest.param(lambda x: (jnp.sin(x), x), "aten.sin.default: 2 results, torch gives 1", id="too many results"),
    pytest.param(raises, "this lowering is broken", id="raises"),
    pytest.param(fails_when_run, "this lowering is broken", id="fails when run"),
    pytest.param(lambda x: np.sin(x), "TracerArrayConversionError", id="takes no tracer"),
]


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(("fn", "text"), BROKEN)
def test_a_wrong_lowering_fails_at_its_own_id(run: Run, sizes: list[int], monkeypatch: pytest.MonkeyPatch, fn: Callable, text: str) -> None:
    lowered(monkeypatch, aten.sin.default, fn)
    found = run(VALUES)
    assert sizes == [12]
    assert failed(found) == {"test_op[sin]"} and len(found) == 6
    assert text in found["test_op[sin]"]
    assert run(VALUES, "::test_op[sin]")["test_op[sin]"] == found["test_op[sin]"]


@pytest.mark.parametrize("fn", [lambda x: jnp.sin(jax.lax.stop_gradient(x)) + 0 * x, fails_when_run], ids=["wrong", "raises"])
def test_a_wrong_gradient_fails_at_its_own_ids(run: Run, monkeypatch: pytest.MonkeyPatch, fn: Callable) -> None:
    lowered(monkeypatch, aten.sin.default, fn)
    name = "test_gradient[check_gradient-sin]"
    found = run(VALUES + GRADIENTS)
    assert failed(found) - {"test_op[sin]"} == {
        f"test_gradient[{check}-sin]" for check in ("check_gradient", "check_gradients", "check_grad")
    }
    assert run(VALUES + GRADIENTS, f"::{name}")[name] == found[name]


def test_a_quick_file_compiles_with_the_older_emitters(sizes: list[int]) -> None:
    """An option that this version of XLA does not know would leave each check to run alone, and other tests of quick files to fail: then there is none."""
    programs = [batches.Program(name, jax.jit(getattr(jnp, name)), jnp.arange(3.0)) for name in ("sin", "cos")]
    with quick.compiling():
        found = batches.run_together(programs)
    np.testing.assert_allclose(found[1], np.cos(np.arange(3.0)), rtol=1e-6)
    assert len(found) == 2


def test_a_batched_test_takes_no_fixtures(run: Run) -> None:
    found = run(VALUES + "\n@together\ndef test_fixture(tmp_path):\n    check(torch.ops.aten.exp.default, X)\n", "::test_fixture")
    assert "test_fixture is marked `together`: it takes parameters only, got ['tmp_path']" in found["test_fixture"]


def test_numbers_that_were_not_rehearsed_run_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of these bodies draws other numbers: what is ready is not theirs, and a wrong lowering fails."""
    lowered(monkeypatch, aten.sin.default, lambda x: jnp.where(x < 6, jnp.sin(x), 0))
    text = """
import itertools, pytest, torch
from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.parity import check

NUMBERS = itertools.count(1)

@pytest.mark.parametrize("i", range(4))
@together
def test_sin(i):
    check(torch.ops.aten.sin.default, torch.full((3,), float(next(NUMBERS))))
"""
    assert failed(run(text)) == {"test_sin[1]", "test_sin[2]", "test_sin[3]"}  # 1 to 4 were rehearsed
