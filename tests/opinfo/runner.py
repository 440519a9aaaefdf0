"""Run entries of torch's operator database on device xla and on the CPU."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map

import torch_bridge
from tests.opinfo import exceptions
from tests.opinfo.compare import Counted, attempt, copied, difference, forget_pending, gradients, leaves, stride_difference, to_cpu
from tests.opinfo.table import Row

torch_bridge.register()

SAMPLES = 6
"""Samples taken from each entry and dtype."""

DTYPES = {"float32": torch.float32, "int64": torch.int64, "bfloat16": torch.bfloat16}

CLOSE = {"float32": (1e-4, 1e-4), "int64": (1e-4, 1e-4), "bfloat16": (2e-2, 2e-2)}
"""rtol and atol by dtype; bfloat16's are two or three of its steps, as torch's own kernels round in between where ours do not."""


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
            problem = _first_problem(op, cases, dtype_name)
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
    _, error = attempt(lambda: _problems(op, [case], 0, 0))
    forget_pending()
    return error is not None and exceptions.REFUSED[op.full_name][0] in str(error)


def _defined(op: Any, sample: Any) -> bool:
    """Whether the values of a sample's results are defined, that is, not random."""
    if op.full_name in exceptions.UNDEFINED:
        return False
    at, name = exceptions.DROPS_OUT.get(op.full_name, (len(sample.args), ""))
    dropout = sample.args[at] if at < len(sample.args) else sample.kwargs.get(name)
    return not dropout


def _first_problem(op: Any, cases: list[Case], dtype_name: str) -> str:
    """All samples in one program; on any trouble one by one, so that each answers for itself."""
    rtol, atol = _closeness(op, dtype_name)
    found, error = attempt(lambda: _problems(op, cases, rtol, atol))
    if error is None and not any(found):
        return ""
    forget_pending()
    for i, case in enumerate(cases):
        found, error = attempt(lambda case=case: _problems(op, [case], rtol, atol))
        text = f"{type(error).__name__}: {error}" if error is not None else found[0]
        forget_pending()
        if text:
            return f"sample {i}: {' '.join(text.split())[:400]}"
    return ""


def _closeness(op: Any, dtype_name: str) -> tuple[float, float]:
    found = exceptions.TOLERANCES if dtype_name == "float32" else exceptions.TOLERANCES_BFLOAT16 if dtype_name == "bfloat16" else {}
    rtol, atol, _ = found.get(op.full_name, (*CLOSE[dtype_name], ""))
    return rtol, atol


def _problems(op: Any, cases: list[Case], rtol: float, atol: float) -> list[str]:
    outcomes = []
    for case in cases:
        outcome = _evaluate(op, case.sample, "xla", case.expected.grads is not None)
        if outcome.error is not None:
            raise outcome.error
        outcomes.append(outcome)
    return [_problem(op, case, outcome, rtol, atol) for case, outcome in zip(cases, outcomes, strict=True)]


def _problem(op: Any, case: Case, outcome: Outcome, rtol: float, atol: float) -> str:
    """What is wrong with a sample's results, their strides, or their gradients; empty if nothing."""
    found = _left_device(outcome)
    if not found and op.full_name not in exceptions.STRIDES:
        found = stride_difference(outcome.checked, case.expected.checked)
    return found or _value_problem(op, case, outcome, rtol, atol)


def _value_problem(op: Any, case: Case, outcome: Outcome, rtol: float, atol: float) -> str:
    """Half precision may differ from the CPU's where it is as near to float32."""
    values = _defined(op, case.sample)
    found = _away(outcome, case.expected, rtol, atol, values)
    if not found or not any(x.dtype == torch.bfloat16 for x in leaves(case.expected.checked) if isinstance(x, torch.Tensor)):
        return found
    return found if _away(outcome, _rounded_float32(op, case), rtol, atol, values) else ""


def _away(outcome: Outcome, expected: Outcome, rtol: float, atol: float, values: bool) -> str:
    found = difference(to_cpu(outcome.checked), to_cpu(expected.checked), rtol, atol, values)
    if not found and expected.grads is not None:
        found = difference(to_cpu(outcome.grads), to_cpu(expected.grads), rtol, atol, values)
        found = found and f"gradient {found}"
    return found


def _rounded_float32(op: Any, case: Case) -> Outcome:
    """What the CPU makes of a bfloat16 sample in float32, rounded."""
    sample = copy.copy(case.sample)
    sample.input, sample.args, sample.kwargs = _cast((sample.input, sample.args, sample.kwargs), torch.bfloat16, torch.float32)
    made = _evaluate(op, sample, "cpu", case.expected.grads is not None)
    return Outcome(checked=_cast(made.checked, torch.float32, torch.bfloat16), grads=_cast(made.grads, torch.float32, torch.bfloat16))


def _cast(tree: Any, of: torch.dtype, to: torch.dtype) -> Any:
    def cast(x: Any) -> Any:
        return x.detach().to(to).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) and x.dtype == of else x

    return tree_map(cast, tree)


def _left_device(outcome: Outcome) -> str:
    for x in leaves(outcome.result):
        if isinstance(x, torch.Tensor) and x.device.type != "xla":
            return f"a result on {x.device}"
    return ""
