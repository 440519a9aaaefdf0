"""Learning rates by their formulas, step by step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nxd_jax.training.optim import lr_schedulers, prepare_lr_scheduler
from nxd_jax.training.optim.registry import make_scheduler


def rates(steps: int, base: float = 1.0, **sched: Any) -> list[float]:
    """The rate of each step, as the optimizer has it."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=base)
    scheduler = make_scheduler(optimizer, sched)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def cosine(t: float, high: float, low: float) -> float:
    return low + (high - low) * 0.5 * (1 + math.cos(math.pi * t))


def test_cosine() -> None:
    found = rates(14, 2.0, name="CosineAnnealing", warmup_steps=3, max_steps=11, min_lr=0.2, constant_steps=0)
    expected = [2 * (n + 1) / 4 for n in range(4)] + [cosine((n - 3) / 8, 2.0, 0.2) for n in range(4, 12)] + [0.2] * 2
    assert found == pytest.approx(expected)


def test_cosine_with_constant_steps_is_megatrons() -> None:
    found = rates(14, 2.0, name="CosineAnnealing", warmup_steps=2, max_steps=12, min_lr=0.2, constant_steps=4)
    assert found == pytest.approx([0.0, 1.0, 2.0] + [cosine((n - 2) / 6, 2.0, 0.2) for n in range(3, 9)] + [0.2] * 5)


def test_more_constant_steps_than_steps_drop_the_rate_after_the_warm_up() -> None:
    """As the file megatron_gpt has it: 750 steps of warm-up, 80000 constant ones, 20000 in all."""
    found = rates(1000, 1.5e-4, name="CosineAnnealing", warmup_steps=750, max_steps=20000, min_lr=1e-5, constant_steps=80000)
    assert found[:2] == [0.0, 1.5e-4 / 750] and found[750] == 1.5e-4 and found[751:] == [1e-5] * 249


def test_linear() -> None:
    found = rates(12, name="LinearAnnealingWithWarmUp", warmup_steps=2, max_steps=10)
    assert found == pytest.approx([0, 0.5] + [(10 - n) / 8 for n in range(2, 11)] + [0])
    assert rates(2, name="LinearAnnealingWithWarmUp", warmup_steps=None, max_steps=2) == [1, 0.5]


def test_others() -> None:
    warm = {"warmup_steps": 1, "max_steps": 5}
    assert rates(7, name="WarmupPolicy", min_lr=0.1, **warm) == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.1])
    assert rates(7, name="WarmupHoldPolicy", hold_steps=2, **warm) == pytest.approx([0.5, 1, 1, 1, 1, 1, 0])
    assert rates(6, name="SquareAnnealing", min_lr=0.2, **warm) == pytest.approx([0.5, 1, 0.5625, 0.25, 0.2, 0.2])
    assert rates(6, name="SquareAnnealing", **warm)[4:] == pytest.approx([0.0625, 1e-5])
    assert rates(6, name="SquareRootAnnealing", min_lr=0.1, **warm) == pytest.approx([0.5, 1, 0.6**0.5, 0.4**0.5, 0.2**0.5, 0.1])
    assert rates(6, name="InverseSquareRootAnnealing", **warm) == pytest.approx([0.5, 1, *((2 / (n + 1)) ** 0.5 for n in range(2, 6))])
    assert rates(6, name="WarmupAnnealing", **warm) == pytest.approx([0.5, 1, 0.75, 0.5, 0.25, 0])
    assert rates(7, name="WarmupAnnealing", min_lr=0.2, **warm) == pytest.approx([0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    decay = rates(7, name="PolynomialDecayAnnealing", min_lr=0.2, power=2, cycle=True, **warm)
    assert decay == pytest.approx([0.5, 1, *(0.2 + 0.8 * (n / 4) ** 2 for n in (3, 2, 1, 0)), 0.2])
    unheld = rates(7, name="PolynomialHoldDecayAnnealing", **warm)
    assert unheld == pytest.approx(rates(7, name="PolynomialDecayAnnealing", **warm))
    held = rates(7, name="PolynomialHoldDecayAnnealing", min_lr=0.2, hold_steps=2, **warm)
    assert held == pytest.approx([0.5, 1, 1, 1, 0.6, 0.2, 0.2])
    held = rates(8, name="NoamHoldAnnealing", min_lr=0.6, decay_rate=0.5, warmup_steps=2, hold_steps=2, max_steps=9)
    assert held == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, (2 / 3) ** 0.5, (2 / 4) ** 0.5, (2 / 5) ** 0.5])
    noam = rates(4, name="NoamAnnealing", d_model=16, warmup_steps=2, max_steps=9)
    assert noam == pytest.approx([0.25 * 2**-1.5, 0.25 * 2**-1.5, 0.25 * 2 * 2**-1.5, 0.25 * 3**-0.5])
    assert rates(4, name="StepLR", step_size=2, gamma=0.1, max_steps=9) == pytest.approx([1, 1, 0.1, 0.1])
    assert rates(3, name="ExponentialLR", gamma=0.5, max_steps=9) == pytest.approx([1, 0.5, 0.25])


def test_a_warm_up_as_a_share() -> None:
    assert rates(3, name="WarmupPolicy", warmup_ratio=0.2, max_steps=10) == pytest.approx([1 / 3, 2 / 3, 1])


def test_a_schedule_goes_on_from_its_state() -> None:
    sched = {"name": "CosineAnnealing", "warmup_steps": 2, "max_steps": 8, "min_lr": 0.1}
    whole = rates(8, **sched)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    first = make_scheduler(optimizer, sched)
    for _ in range(4):
        optimizer.step()
        first.step()
    state = first.state_dict()
    again = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    again.load_state_dict(optimizer.state_dict())
    second = make_scheduler(again, sched)
    second.load_state_dict(state)
    again.load_state_dict(optimizer.state_dict())
    found = []
    for _ in range(4):
        found.append(again.param_groups[0]["lr"])
        again.step()
        second.step()
    assert found == pytest.approx(whole[4:])


@pytest.mark.parametrize(
    "sched",
    [
        {"name": "LinearAnnealingWithWarmUp", "warmup_steps": 1},
        {"name": "CosineAnnealing", "warmup_steps": 1, "min_lr": 0.1},
        {"name": "WarmupAnnealing"},
    ],
    ids=lambda sched: sched["name"],
)
def test_more_steps_than_when_it_was_saved(sched: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """The configuration's max_steps counts, from the first step on; the checkpoint's would leave rates at the end of its own curve."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    first = make_scheduler(optimizer, {**sched, "max_steps": 3})
    for _ in range(3):
        optimizer.step()
        first.step()
    again = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    second = make_scheduler(again, {**sched, "max_steps": 8})
    again.load_state_dict(optimizer.state_dict())
    second.load_state_dict(first.state_dict())
    assert "learning rates go on from step 3 with max_steps=8 in place of 3" in caplog.text
    found = []
    for _ in range(5):
        found.append(again.param_groups[0]["lr"])
        assert second.get_last_lr() == found[-1:]
        again.step()
        second.step()
    assert found == pytest.approx(rates(8, **sched, max_steps=8)[3:]) and min(found) > 0


def test_as_lightning_takes_it() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    found = prepare_lr_scheduler(optimizer, {"name": "WarmupPolicy", "max_steps": 3, "monitor": "val_loss", "reduce_on_plateau": False})
    assert found["interval"] == "step" and isinstance(found["scheduler"], lr_schedulers.WarmupPolicy)
    assert prepare_lr_scheduler(optimizer, {"name": "StepLR", "step_size": 2, "max_steps": 3})["interval"] == "step"
    assert prepare_lr_scheduler(optimizer, {"name": "ExponentialLR", "gamma": 0.5, "max_steps": 3})["interval"] == "epoch"


@pytest.mark.parametrize(
    ("sched", "text"),
    [
        ({"name": "Cosine"}, r"model.optim.sched.name: 'Cosine' must be one of .*did you mean 'CosineAnnealing'"),
        ({"name": None}, r"model.optim.sched.name: None must be one of"),
        (
            {"name": "LinearAnnealingWithWarmUp", "min_lr": 0.1, "max_steps": 4},
            r"model.optim.sched.min_lr: LinearAnnealingWithWarmUp takes warmup_steps, max_steps",
        ),
        (
            {"name": "CosineAnnealing", "hold_steps": 1, "max_steps": 4},
            r"model.optim.sched.hold_steps: CosineAnnealing takes constant_steps, constant_ratio, min_lr",
        ),
        ({"name": "CosineAnnealing", "min_lr": 2.0, "max_steps": 4}, r"min_lr=2.0 must not be above the learning rate, which is 1.0"),
        ({"name": "CosineAnnealing"}, r"CosineAnnealing needs max_steps"),
        ({"name": "WarmupAnnealing"}, r"WarmupAnnealing needs max_steps"),
        ({"name": "SquareRootAnnealing"}, r"SquareRootAnnealing needs max_steps"),
        ({"name": "NoamHoldAnnealing", "max_steps": 4}, r"NoamHoldAnnealing needs warmup_steps or warmup_ratio"),
        ({"name": "WarmupPolicy", "warmup_steps": 1, "warmup_ratio": 0.1}, r"give warmup_steps or warmup_ratio, not both: 1, 0.1"),
        ({"name": "WarmupPolicy", "warmup_ratio": 0.1}, r"warmup_ratio=0.1 needs max_steps"),
        ({"name": "WarmupPolicy", "warmup_ratio": 1.5, "max_steps": 4}, r"warmup_ratio=1.5 must be between 0 and 1"),
        ({"name": "WarmupPolicy", "warmup_steps": -1}, r"warmup_steps=-1 must be a whole number of steps, and not negative"),
        ({"name": "LinearAnnealingWithWarmUp", "warmup_steps": 0.1, "max_steps": 9}, r"warmup_steps=0.1 must be a whole number of steps"),
        ({"name": "WarmupPolicy", "last_epoch": 5}, r"model.optim.sched.last_epoch: 5 must be left out"),
        ({"name": "WarmupPolicy", "min_lr": "low"}, r"model.optim.sched.min_lr: 'low' must be a number"),
    ],
)
def test_wrong_schedules(sched: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        rates(2, **sched)
