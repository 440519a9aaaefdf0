"""Run the operator database's error inputs: what eager torch refuses, device xla must refuse with the same kind of exception."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from tests.opinfo import exceptions
from tests.opinfo.compare import attempt, copied, forget_pending, to_cpu
from tests.opinfo.table import Row

CASE = "errors"
"""How the table names this case."""


def run(op: Any) -> Row:
    """One entry: all its error inputs; those that the CPU accepts say nothing."""
    name = op.full_name

    def row(status: str, reason: str = "") -> Row:
        return Row("op", name, CASE, status, reason)

    if op.error_inputs_func is None:
        return row("skip", "the database has no error inputs")
    if name in exceptions.SKIPPED:
        return row("skip", exceptions.SKIPPED[name])
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        outcomes = [o for o in (_outcome(op, given.sample_input) for given in op.error_inputs("cpu")) if o is not None]
    if not outcomes:
        return row("skip", "no error input is refused by the CPU")
    problems = [o for o in outcomes if o and not _accepted(name, o)]
    if not problems:
        return row("pass")
    return row("fail", f"{len(problems)} of {len(outcomes)} error inputs: {problems[0]}")


def _outcome(op: Any, sample: Any) -> str | None:
    """What is wrong with how xla takes an error input; empty if nothing, None if the CPU does not refuse it or it cannot be moved to xla."""
    expected = _raised(op, sample, "cpu")
    if expected is None:
        return None
    _, error = attempt(lambda: copied((sample.input, sample.args, sample.kwargs), "xla"))
    if error is not None:
        return None
    found = _raised(op, sample, "xla")
    forget_pending()
    if found is None:
        return f"accepted, though the CPU raises {_told(expected)}"
    if not isinstance(found, _kind(expected)):
        return f"{_told(found)} instead of {_told(expected)}"
    return ""


def _raised(op: Any, sample: Any, device: str) -> Exception | None:
    """The exception of a call, also one that only the values bring up."""
    given, args, kwargs = copied((sample.input, sample.args, sample.kwargs), device)
    _, error = attempt(lambda: to_cpu(op.op(given, *args, **kwargs)))
    return error


def _kind(expected: Exception) -> type[Exception]:
    """NotImplementedError says that the CPU lacks a dtype; xla may refuse with the RuntimeError it is."""
    return RuntimeError if isinstance(expected, NotImplementedError) else type(expected)


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def _accepted(name: str, problem: str) -> bool:
    """Whether the table of exceptions says so."""
    return any(text in problem for text, _ in exceptions.ERRORS.get(name, ()))
