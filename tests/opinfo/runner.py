"""Run entries of torch's operator database on device xla and on the CPU."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import torch_bridge
from tests.opinfo import exceptions
from tests.opinfo.compare import Counted, attempt, copied, difference, forget_pending, gradients, leaves, to_cpu
from tests.opinfo.table import Row

torch_bridge.register()

SAMPLES = 6
"""Samples taken from each entry and dtype."""

DTYPES = {"float32": torch.float32, "int64": torch.int64}


@dataclass
class Outcome:
    """What one sample gave on one device: results, gradients (None: not differentiable), error."""

    result: Any = None
    checked: Any = None
    grads: Any = None
    error: Exception | None = None


@dataclass
class Case:
    """A sample and what the CPU made of it."""

    sample: Any
    expected: Outcome = field(default_factory=Outcome)


def run(op: Any, dtype_name: str, samples: int = SAMPLES) -> Row:
    """One entry in one dtype."""
    name, dtype = op.full_name, DTYPES[dtype_name]

    def row(status: str, reason: str = "") -> Row:
        return Row("op", name, dtype_name, status, reason)

    if name in exceptions.SKIPPED:
        return row("skip", exceptions.SKIPPED[name])
    if dtype not in op.supported_dtypes("cpu"):
        return row("skip", f"torch has no {dtype_name} form on the CPU")
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        cases = [c for c in _cases(op, dtype, samples) if c.expected.error is None]
        if not cases:
            return row("skip", "no sample runs on the CPU")
        cases = [c for c in cases if not _refused(op, c)]
        if not cases:
            return row("skip", exceptions.REFUSED[name][1])
        with Counted() as counted:
            problem = _first_problem(op, cases)
    if problem:
        return row("fail", problem)
    if counted.fallbacks:
        return row("fallback", ", ".join(counted.fallbacks))
    return row("pass", "needs values: " + ", ".join(counted.on_host) if counted.on_host else "")


def _cases(op: Any, dtype: torch.dtype, samples: int) -> Iterator[Case]:
    differentiable = dtype.is_floating_point and op.supports_autograd
    found, error = attempt(lambda: list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=differentiable), samples)))
    if error is not None:
        raise error
    for sample in found:
        yield Case(sample, _evaluate(op, sample, "cpu", differentiable))


def _evaluate(op: Any, sample: Any, device: str, differentiate: bool) -> Outcome:
    torch.manual_seed(0)
    inputs = copied((sample.input, sample.args, sample.kwargs), device)
    outcome = Outcome()
    out, outcome.error = attempt(lambda: op.op(inputs[0], *inputs[1], **inputs[2]))
    if outcome.error is not None:
        return outcome
    outcome.result = out
    outcome.checked = _checked(op, sample, out)
    if differentiate:
        outcome.grads, error = attempt(lambda: gradients(sample.output_process_fn_grad(out), inputs))
        if device != "cpu":
            outcome.error = error
    return outcome


def _checked(op: Any, sample: Any, out: Any) -> Any:
    """The part of a result that is compared."""
    if op.full_name in exceptions.GAUGE:
        return sample.output_process_fn_grad(out)
    first, _ = exceptions.FIRST_RESULTS.get(op.full_name, (None, ""))
    return out if first is None else out[:first]


def _refused(op: Any, case: Case) -> bool:
    """True for a sample that raises as the table of exceptions says."""
    if op.full_name not in exceptions.REFUSED:
        return False
    _, error = attempt(lambda: _problems(op, [case]))
    forget_pending()
    return error is not None and exceptions.REFUSED[op.full_name][0] in str(error)


def _defined(op: Any, sample: Any) -> bool:
    """Whether the values of a sample's results are defined, that is, not random."""
    if op.full_name in exceptions.UNDEFINED:
        return False
    at, name = exceptions.DROPS_OUT.get(op.full_name, (len(sample.args), ""))
    dropout = sample.args[at] if at < len(sample.args) else sample.kwargs.get(name)
    return not dropout


def _first_problem(op: Any, cases: list[Case]) -> str:
    """All samples in one program; on any trouble one by one, so that each answers for itself."""
    found, error = attempt(lambda: _problems(op, cases))
    if error is None and not any(found):
        return ""
    forget_pending()
    for i, case in enumerate(cases):
        found, error = attempt(lambda case=case: _problems(op, [case]))
        text = f"{type(error).__name__}: {error}" if error is not None else found[0]
        forget_pending()
        if text:
            return f"sample {i}: {' '.join(text.split())[:400]}"
    return ""


def _problems(op: Any, cases: list[Case]) -> list[str]:
    rtol, atol, _ = exceptions.TOLERANCES.get(op.full_name, (1e-4, 1e-4, ""))
    outcomes = []
    for case in cases:
        outcome = _evaluate(op, case.sample, "xla", case.expected.grads is not None)
        if outcome.error is not None:
            raise outcome.error
        outcomes.append(outcome)
    problems = []
    for case, outcome in zip(cases, outcomes, strict=True):
        values = _defined(op, case.sample)
        problem = _left_device(outcome, case.expected) or difference(
            to_cpu(outcome.checked), to_cpu(case.expected.checked), rtol, atol, values
        )
        if not problem and case.expected.grads is not None:
            problem = difference(to_cpu(outcome.grads), to_cpu(case.expected.grads), rtol, atol, values)
            problem = problem and f"gradient {problem}"
        problems.append(problem)
    return problems


def _left_device(outcome: Outcome, expected: Outcome) -> str:
    for x in leaves(outcome.result):
        if isinstance(x, torch.Tensor) and x.device.type != "xla":
            return f"a result on {x.device}"
    return ""
