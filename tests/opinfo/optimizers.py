"""Run entries of torch's optimizer database for ten steps on device xla and on the CPU."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import torch_bridge
from tests.opinfo import exceptions
from tests.opinfo.compare import Counted, attempt, copied, difference, forget_pending, to_cpu
from tests.opinfo.table import Row

torch_bridge.register()

STEPS = 10


def cases(entry: Any) -> list[str]:
    """The implementations an optimizer has: the loop over parameters, foreach, fused."""
    return ["for-loop", *(impl for impl in ("foreach", "fused") if impl in entry.supported_impls)]


def run(entry: Any, case: str) -> Row:
    """One optimizer in one implementation, with all the database's arguments, against the CPU's for-loop."""
    name = f"optim.{entry.optim_cls.__name__}"
    if name in exceptions.SKIPPED:
        return Row("optim", name, case, "skip", exceptions.SKIPPED[name])
    with warnings.catch_warnings(), torch.random.fork_rng(), Counted() as counted:
        warnings.simplefilter("ignore")
        problem = _first_problem(entry, case)
    if problem:
        return Row("optim", name, case, "fail", problem)
    if counted.fallbacks:
        return Row("optim", name, case, "fallback", ", ".join(counted.fallbacks))
    return Row("optim", name, case, "pass", "needs values: " + ", ".join(counted.on_host) if counted.on_host else "")


def _first_problem(entry: Any, case: str) -> str:
    name = f"optim.{entry.optim_cls.__name__}"
    rtol, atol, _ = exceptions.TOLERANCES.get(name, (1e-4, 1e-4, ""))
    for given in entry.optim_inputs_func(device="cpu", dtype=torch.float32):
        if any(given.kwargs.get(k) for k in ("foreach", "fused", "differentiable")):
            continue
        base = {"foreach": False} if "foreach" in entry.supported_impls else {}
        expected, error = attempt(lambda k=given.kwargs, b=base: _train(entry, {**k, **b}, "cpu"))
        if error is not None:
            continue
        chosen = {**base, case: True} if case != "for-loop" else base
        chosen = {**chosen, "foreach": case == "foreach"} if base else chosen
        got, error = attempt(lambda k=given.kwargs, b=chosen: to_cpu(_train(entry, {**k, **b}, "xla")))
        problem = (
            " ".join(f"{type(error).__name__}: {error}".split()) if error is not None else difference(got, to_cpu(expected), rtol, atol)
        )
        if problem:
            forget_pending()
            return f"{given.desc}: {problem[:400]}"
    return ""


def _train(entry: Any, kwargs: dict[str, Any], device: str) -> list[torch.Tensor]:
    """The parameters and the loss after ten steps of fitting a small two-layer network (sparse gradients: an embedding)."""
    torch.manual_seed(0)
    sparse = entry.only_supports_sparse_grads
    model: torch.nn.Module = torch.nn.Embedding(7, 3, sparse=True) if sparse else _Net(matrices_only=entry.optim_cls.__name__ == "Muon")
    x = torch.tensor([1, 3, 3, 5]) if sparse else torch.randn(5, 4)
    target = torch.randn(len(x), 3).to(device)
    model, x = model.to(device), x.to(device)
    optimizer = entry.optim_cls(model.parameters(), **copied(kwargs, device))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), target)
        loss.backward()
        return loss

    for _ in range(STEPS):
        if entry.step_requires_closure:
            loss = optimizer.step(closure)
        else:
            loss = closure()
            optimizer.step()
    return [*(p.detach() for p in model.parameters()), loss.detach()]


class _Net(torch.nn.Module):
    def __init__(self, matrices_only: bool):
        super().__init__()
        self.first = torch.nn.Linear(4, 6, bias=not matrices_only)
        self.last = torch.nn.Linear(6, 3, bias=not matrices_only)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))
