"""What the host can tell of masks does not cut a step: what they pick (`x[mask]`), and branches on masks that have become floats."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_xla
from torch import nn

from torch_bridge import metrics

LABELS = torch.tensor([[3, -100, 5, 2], [-100, 1, 4, -100]])
TARGETS = torch.tensor([[0.5, float("nan"), 1.0, 2.0], [float("nan"), -1.0, 0.25, float("nan")]])

Pick = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
PICKS: dict[str, Pick] = {
    "mask of labels": lambda x, labels, targets: x[labels >= 0],
    "masked_select": lambda x, labels, targets: torch.masked_select(x, labels >= 0),
    "masked_select of a broadcast mask": lambda x, labels, targets: x.masked_select((labels >= 0)[:, :1]),
    "nonzero": lambda x, labels, targets: x.flatten()[(labels >= 0).flatten().nonzero().squeeze(1)],
    "pairs of indices": lambda x, labels, targets: x[(labels < 0).nonzero(as_tuple=True)],
    "mask and numbers": lambda x, labels, targets: x[(labels >= 0)[:, 0], 1:],
    "mask of floats": lambda x, labels, targets: x[~torch.isnan(targets)],
    "labels picked by a mask": lambda x, labels, targets: x.sum() * labels.masked_select(labels > 0),
    "mask of sizes": lambda x, labels, targets: (x @ x.T)[~torch.eye(2, dtype=torch.bool, device=x.device)],
    "mask picked by a mask": lambda x, labels, targets: x[labels >= 0][targets[labels >= 0] > 0],
    "branch on a float mask": lambda x, labels, targets: (
        x * 2 if (((1.0 - (labels > 0).float()) * torch.finfo(x.dtype).min) < 0).any() else x
    ),
    "branch on written floats": lambda x, labels, targets: x * 2 if _written(labels).min().item() == -1 else x,
}


def _written(labels: torch.Tensor) -> torch.Tensor:
    mask = (labels > 0).float() * 3
    mask[:, 1] = -1
    return (mask > 0).long() - (mask < 0).long()


def _train(pick: Pick, device: str) -> tuple[list[torch.Tensor], list[int]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    draws = torch.Generator().manual_seed(1)
    programs = []
    for _ in range(4):
        x, labels, targets = torch.randn(2, 4, generator=draws).to(device), LABELS.to(device), TARGETS.to(device)
        before = metrics.EXECUTE_TIME.count
        loss = pick(model(x), labels, targets).tanh().pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if device == "xla":
            torch_xla.sync()
        programs.append(metrics.EXECUTE_TIME.count - before)
    return [p.detach().cpu() for p in model.parameters()], programs


@pytest.mark.core(keep=4)
@pytest.mark.parametrize("name", PICKS)
def test_a_step_is_one_program(name: str) -> None:
    weights, programs = _train(PICKS[name], "xla")
    assert programs == [1] * 4
    torch.testing.assert_close(weights, _train(PICKS[name], "cpu")[0], rtol=1e-5, atol=1e-6)


def test_a_mask_of_results_runs_what_it_needs() -> None:
    """Numbers that the device may round otherwise are not worked out on the host."""
    x = torch.tensor([0.25, -0.5, 3.0]).to("xla")
    torch_xla.sync()
    before = metrics.EXECUTE_TIME.count
    assert x[(x * 1.1) > 0].tolist() == [0.25, 3.0]
    assert x[(x.bool().float() * 0.3 + 0.1).tanh() > 0.3].tolist() == [0.25, -0.5, 3.0]
    assert metrics.EXECUTE_TIME.count - before == 2


def test_far_back_in_a_long_step() -> None:
    mask = torch.ones(2, 4, dtype=torch.long, device="xla") > 0
    x = torch.randn(2, 4).to("xla")
    before = metrics.EXECUTE_TIME.count
    for _ in range(600):
        x = x + 1
    assert mask.all()
    assert metrics.EXECUTE_TIME.count == before
    torch_xla.sync()


def _averaged(optimizer: Callable[..., torch.optim.Optimizer], device: str) -> tuple[list[torch.Tensor], list[int]]:
    """Weights and their averages, whose Python code asks for the number of steps; and how many programs each step took."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device)
    own = optimizer(model.parameters())
    mean = torch.optim.swa_utils.AveragedModel(model)
    programs = []
    for k in range(4):
        before = metrics.EXECUTE_TIME.count
        own.zero_grad()
        model(torch.arange(8.0).view(2, 4).to(device) / (k + 1)).pow(2).mean().backward()
        own.step()
        mean.update_parameters(model)
        if device == "xla":
            torch_xla.sync()
        programs.append(metrics.EXECUTE_TIME.count - before)
    return [p.detach().cpu() for p in (*model.parameters(), *mean.parameters())], programs


@pytest.mark.parametrize("optimizer", [lambda p: torch.optim.SGD(p, 0.1), lambda p: torch.optim.ASGD(p, 0.1, t0=2, alpha=0.5)])
def test_numbers_of_steps(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    """`1 / (n + 1)` is worked out on the host."""
    weights, programs = _averaged(optimizer, "xla")
    assert programs == [1] * 4
    torch.testing.assert_close(weights, _averaged(optimizer, "cpu")[0], rtol=1e-5, atol=1e-6)


def test_numbers_that_the_device_rounds_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_CC_FLAGS", "--auto-cast=all --auto-cast-type=bf16")
    count = torch.tensor(2.0, device="xla")
    torch_xla.sync()
    before = metrics.EXECUTE_TIME.count
    assert (1 / (count + 1)).item() == pytest.approx(1 / 3, rel=1e-2)
    assert metrics.EXECUTE_TIME.count == before + 1
