"""Random things that a script does between steps of a pipeline, with direct passes and with every pass recorded: the same losses and weights."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_xla
from torch import nn

from nxd_jax.pipeline import direct
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.pipeline.test_direct import pipeline

STEPS = 16
SCHEDULES = {"1f1b": 1, "zb_h1": 1, "gpipe": 1, "interleaved": 2, "zbv": 2}


class Block(nn.Module):
    """A residual block whose numbers a script may change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(6, 6), nn.LayerNorm(6), nn.Dropout(0.25)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.relu(self.linear(self.norm(x)))) * self.scale


class Model(nn.Module):
    """Four blocks, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Script:
    """Trains, and does something now and then. seed: of what it does, and of its data."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.schedule = self.random.choice(sorted(SCHEDULES))
        torch.manual_seed(seed)
        self.module = Model()
        self.model, self.optimizer = pipeline(
            self.module,
            4,
            transformer_layer_cls=Block,
            schedule=self.schedule,
            virtual_pipeline_size=SCHEDULES[self.schedule],
        )
        self.blocks: list[Any] = list(self.module.layers)
        self.around: Any = None
        self.forget_gradients: Callable[[], None] = self.optimizer.zero_grad
        self.weights = list(self.model.local_parameters())
        self.hooks: list[Any] = []
        self.data = torch.Generator().manual_seed(seed)
        self.losses: list[float] = []

    def run(self) -> tuple[list[float], list[torch.Tensor]]:
        """Losses, and weights at the end."""
        changes = sorted(name for name in vars(Script) if name.startswith("do_"))
        for k in range(STEPS):
            self.around, self.forget_gradients = contextlib.nullcontext(), self.optimizer.zero_grad
            self.rows, self.block = 8, self.random.choice(self.blocks)
            self.weight, self.number = self.random.choice(self.weights), round(self.random.uniform(0.1, 0.4), 2)
            if k >= 3 and self.random.random() < 0.6:
                getattr(self, self.random.choice(changes))()
            with self.around:
                self.losses.append(float(self.step()))
            self.optimizer.step()
            self.forget_gradients()
            torch_xla.sync()
        return self.losses, [p.detach().cpu() for p in self.weights]

    def step(self) -> torch.Tensor:
        return self.model.run_train(x=torch.randn(self.rows, 6, generator=self.data))

    def do_freeze(self) -> None:
        self.weight.requires_grad_(False)

    def do_thaw(self) -> None:
        for p in self.weights:
            p.requires_grad_(True)

    def do_scale(self) -> None:
        self.block.scale = self.number

    def do_dropout(self) -> None:
        self.block.dropout.p = self.number

    def do_evaluate(self) -> None:
        self.losses.append(float(self.model.run_eval(x=torch.randn(8, 6, generator=self.data))))

    def do_accumulate(self) -> None:
        self.step()

    def do_keep_gradients(self) -> None:
        self.forget_gradients = lambda: None

    def do_set_a_gradient(self) -> None:
        def gradients() -> None:
            self.optimizer.zero_grad()
            if self.weight.requires_grad:
                self.weight.grad = torch.ones_like(self.weight) * 0.01

        self.forget_gradients = gradients

    def do_write_a_weight(self) -> None:
        with torch.no_grad():
            self.weight.mul_(0.9)

    def do_give_a_weight_other_memory(self) -> None:
        self.weight.data = self.weight.data * 0.9

    def do_hook_a_weight(self) -> None:
        if self.weight.requires_grad:
            self.hooks.append(self.weight.register_hook(lambda grad: grad * 0.5))

    def do_hook_a_layer(self) -> None:
        self.hooks.append(self.block.register_forward_hook(lambda module, args, result: result * 0.9))

    def do_unhook(self) -> None:
        while self.hooks:
            self.hooks.pop().remove()

    def do_other_rows(self) -> None:
        self.rows = 4

    def do_learning_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.number

    def do_autocast(self) -> None:
        self.around = torch.autocast("xla", dtype=torch.bfloat16)


@pytest.mark.parametrize("seed", range(8))
def test_scripts_that_change_things_between_steps(nxd: Nxd, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for every_pass_recorded in (True, False):
        nxd(2, pp=2)
        with monkeypatch.context() as patch:
            if every_pass_recorded:
                patch.setattr(direct.Direct, "forward", lambda *_: None)
            found.append(Script(seed).run())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
