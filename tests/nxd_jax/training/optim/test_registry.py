"""Optimizers by name, their options, and those of users."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nxd_jax.training.optim import get_optimizer, register_optimizer, register_scheduler, registry
from nxd_jax.utils.adamw_fp32_optim_params import AdamW_FP32OptimParams


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "OPTIMIZERS", dict(registry.OPTIMIZERS))
    monkeypatch.setattr(registry, "SCHEDULERS", dict(registry.SCHEDULERS))
    yield


def test_names() -> None:
    assert get_optimizer("adamw") is torch.optim.AdamW
    assert get_optimizer("adamw_fp32OptState") is AdamW_FP32OptimParams
    made = get_optimizer("sgd", lr=0.5)([torch.nn.Parameter(torch.zeros(1))])
    assert isinstance(made, torch.optim.SGD) and made.defaults["lr"] == 0.5


def test_options_become_numbers() -> None:
    optim = {"name": "adamw", "lr": "3e-4", "weight_decay": 0, "betas": ["0.9", 0.95], "capturable": True, "sched": {"name": "x"}}
    assert registry.optimizer_options(optim) == {"lr": 3e-4, "weight_decay": 0.0, "betas": (0.9, 0.95)}


def test_options_are_what_the_class_takes() -> None:
    found = registry.optimizer_options({"name": "sgd", "lr": 1, "momentum": "0.9", "nesterov": True})
    assert found == {"lr": 1.0, "momentum": 0.9, "nesterov": True}
    found = registry.optimizer_options({"name": "adafactor", "lr": "1e-2", "eps": [None, "1e-3"], "d": 1})
    assert found == {"lr": 1e-2, "eps": (None, 1e-3), "d": 1}
    assert registry.optimizer_options({"name": "rprop", "etas": ["0.5", 1.2]}) == {"etas": (0.5, 1.2)}


def test_your_own() -> None:
    class Mine(torch.optim.SGD):
        pass

    register_optimizer("mine", Mine, None)
    register_optimizer("mine", Mine)
    assert get_optimizer("mine") is Mine
    with pytest.raises(ValueError, match=r"there is an optimizer 'adamw' already: AdamW; register yours under another name"):
        register_optimizer("adamw", Mine, None)
    register_scheduler("mine", torch.optim.lr_scheduler.ConstantLR, None)
    made = registry.make_scheduler(Mine([torch.nn.Parameter(torch.zeros(1))], lr=1.0), {"name": "mine", "factor": 0.5, "max_steps": 3})
    assert made.get_last_lr() == [0.5]


@pytest.mark.parametrize(
    ("optim", "text"),
    [
        ({"name": "adamW"}, r"model.optim.name: 'adamW' must be one of adamw, .*did you mean 'adamw'"),
        ({"name": "novograd"}, r"NovoGrad is no optimizer of torch: register one"),
        ({"name": "adamw", "momentum": 0.9}, r"model.optim.momentum: adamw takes lr, betas, eps"),
        ({"name": "adamw", "lr": "fast"}, r"model.optim.lr: 'fast' must be a number"),
        ({"name": "adamw", "betas": 0.9}, r"model.optim.betas: 0.9 must be a list of numbers"),
        ({"name": "adamw", "amsgrad": "false"}, r"model.optim.amsgrad: 'false' must be True or False, without quotes"),
        ({"name": "adamw", "differentiable": True}, r"model.optim.differentiable: True is for gradients of a step, .*leave it out"),
        ({"name": "sgd", "momentum": "much"}, r"model.optim.momentum: 'much' must be a number"),
    ],
)
def test_wrong_optimizers(optim: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        registry.optimizer_options(optim)
