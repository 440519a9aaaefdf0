"""Run entries of torch's module database on device xla and on the CPU: outputs, gradients and buffers, in training and evaluation."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch

import torch_bridge
from tests.opinfo import exceptions
from tests.opinfo.compare import Counted, attempt, copied, difference, forget_pending, gradients, to_cpu
from tests.opinfo.table import Row

torch_bridge.register()


def run(entry: Any, case: str) -> Row:
    """One entry in "train" or "eval" mode, float32."""
    name = f"nn.{entry.module_cls.__name__}"
    if name in exceptions.SKIPPED:
        return Row("module", name, case, "skip", exceptions.SKIPPED[name])
    with warnings.catch_warnings(), torch.random.fork_rng(), Counted() as counted:
        warnings.simplefilter("ignore")
        problem = _first_problem(entry, name, case == "train")
    if problem:
        return Row("module", name, case, "fail", problem)
    if counted.fallbacks:
        return Row("module", name, case, "fallback", ", ".join(counted.fallbacks))
    return Row("module", name, case, "pass", "needs values: " + ", ".join(counted.on_host) if counted.on_host else "")


def _first_problem(entry: Any, name: str, training: bool) -> str:
    torch.manual_seed(0)
    inputs = entry.module_inputs_func(entry, device="cpu", dtype=torch.float32, requires_grad=True, training=training)
    for i, given in enumerate(inputs):
        if given.forward_input is None:
            continue
        torch.manual_seed(0)
        module = entry.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs).train(training)
        forward = given.forward_input
        if entry.is_lazy:  # the first call makes the parameters
            module(*copied(forward.args, "cpu"), **copied(forward.kwargs, "cpu"))
        expected, error = attempt(lambda m=module, f=forward: _evaluate(m, f, "cpu"))
        if error is not None:
            continue
        problem = _problem(module, forward, expected, name)
        if problem:
            forget_pending()
            return f"input {i} ({given.desc}): {problem[:400]}"
    return ""


def _problem(module: torch.nn.Module, forward: Any, expected: list[Any], name: str) -> str:
    rtol, atol, _ = exceptions.TOLERANCES.get(name, (1e-4, 1e-4, ""))
    got, error = attempt(lambda: to_cpu(_evaluate(module, forward, "xla")))
    if error is not None:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    for what, g, e in zip(("output", "gradient", "buffer"), got, expected, strict=True):
        problem = difference(g, to_cpu(e), rtol, atol, name not in exceptions.UNDEFINED)
        if problem:
            return f"{what} {problem}"
    return ""


def _evaluate(module: torch.nn.Module, forward: Any, device: str) -> list[Any]:
    """Results, gradients (inputs, then parameters) and buffers of a copy of the module on a device."""
    module = copy.deepcopy(module).to(device)
    args, kwargs = copied((forward.args, forward.kwargs), device)
    torch.manual_seed(0)
    out = module(*args, **kwargs)
    grads = gradients(out, (args, kwargs, list(module.parameters())))
    return [out, grads, [b for b in module.buffers() if b is not None]]
