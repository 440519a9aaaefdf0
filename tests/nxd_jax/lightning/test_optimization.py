"""Optimization: automatic, manual, clipped, accumulated, with several optimizers. Always the numbers of plain PyTorch on all ranks' rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from neuronx_distributed.lightning import NeuronXLAPrecisionPlugin, NeuronXLAStrategy
from neuronx_distributed.trainer import initialize_parallel_optimizer
from pytorch_lightning import Trainer
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import nn
from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

from tests.nxd_jax.lightning import jobs

pytestmark = jobs.MARKS


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


class Torch(jobs.Automatic):
    """With an optimizer of torch's."""

    def configure_optimizers(self) -> Any:
        return adam(self.parameters())


class Nxd(jobs.Automatic):
    """With NxD's wrapper, for ZeRO-1 too."""

    def configure_optimizers(self) -> Any:
        return initialize_parallel_optimizer(self.nxd_config, torch.optim.AdamW, self.parameters(), lr=0.01)


class Xla(jobs.Automatic):
    """With torch_xla's ZeRO-1."""

    def configure_optimizers(self) -> Any:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=0.01, grad_clipping=False)


# -- automatic and manual ----------------------------------------------------------------------------


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(("tp", "devices", "zero1"), [(2, 4, False), (2, 4, True), (1, 1, False), (4, 4, False), (1, 4, True)])
def test_automatic_manual_and_plain(tmp_path: Path, tp: int, devices: int, zero1: bool) -> None:
    sizes: dict[str, Any] = {"tp": tp, "zero1": zero1}
    automatic, _ = jobs.fit(tmp_path, model=jobs.automatic(**sizes), devices=devices, **sizes)
    module = jobs.module(**sizes, nxd_config=jobs.config(**sizes, clip=None))
    manual, _ = jobs.fit(tmp_path, model=module, devices=devices, **sizes)
    plain, _ = jobs.plain_fit(tmp_path, batch=2 * devices // tp)
    jobs.close(automatic, manual)
    jobs.close(automatic, plain)


def test_the_plugin_of_the_guide(tmp_path: Path) -> None:
    """`Trainer(plugins=[NeuronXLAPrecisionPlugin()])`, in both kinds of optimization."""
    for kind, clip, manual in ((jobs.Automatic, None, False), (jobs.Module, 1.0, True)):
        found = []
        for plugins in ([], [NeuronXLAPrecisionPlugin()]):
            model = jobs.module(kind, tp=2, nxd_config=jobs.config(2, clip=clip), manual_opt=manual)
            found.append(jobs.fit(tmp_path, model=model, tp=2, devices=4, plugins=plugins, max_steps=4)[0])
        assert found[0] == found[1] and len(found[0]) == 4


def test_other_plugins() -> None:
    with pytest.raises(TypeError, match=r"works with NeuronXLAPrecisionPlugin or XLAPrecision, got MixedPrecision: pass Trainer\(plugins="):
        Trainer(strategy=NeuronXLAStrategy(), plugins=[MixedPrecision("bf16-mixed", "cpu")])


def test_a_closure_that_is_called_again(tmp_path: Path) -> None:
    """LBFGS asks for loss and gradients several times in a step."""

    def lbfgs(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)

    class Searching(jobs.Automatic):
        def configure_optimizers(self) -> Any:
            return lbfgs(self.parameters())

    found, _ = jobs.fit(tmp_path, model=jobs.automatic(Searching, tp=1), devices=2, max_steps=2)
    wanted, _ = jobs.plain_fit(tmp_path, model=jobs.Plain(lbfgs), max_steps=2)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(
    ("devices", "said"),
    [(1, "training_step returned None: with XLA a step cannot be left out"), (4, "returning None in distributed training")],
)
def test_a_step_that_is_left_out(tmp_path: Path, devices: int, said: str) -> None:
    class Nothing(jobs.Automatic):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    with pytest.raises((MisconfigurationException, RuntimeError)) as raised:
        jobs.fit(tmp_path, model=jobs.automatic(Nothing, tp=1), devices=devices)
    assert said in str(raised.value)


# -- clipping and accumulation -----------------------------------------------------------------------


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(
    ("kind", "tp", "zero1", "algorithm"),
    [
        (Torch, 1, False, "norm"),
        (Torch, 2, False, "norm"),
        (Torch, 2, False, "value"),
        (Nxd, 2, False, "norm"),
        (Nxd, 2, True, "norm"),
        (Xla, 1, False, "norm"),
    ],
)
def test_clipping(tmp_path: Path, kind: Any, tp: int, zero1: bool, algorithm: str) -> None:
    settings: dict[str, Any] = {
        "gradient_clip_val": 0.3 if algorithm == "norm" else 0.02,
        "gradient_clip_algorithm": algorithm,
        "accumulate_grad_batches": 2,
    }
    found, _ = jobs.fit(tmp_path, model=jobs.automatic(kind, tp, zero1), tp=tp, zero1=zero1, devices=4, **settings)
    wanted, _ = jobs.plain_fit(tmp_path, model=jobs.Plain(adam), batch=8 // tp, **settings)
    jobs.close(found, wanted)


@pytest.mark.parametrize(("kind", "tp", "zero1"), [(Nxd, 2, False), (Nxd, 2, True), (Xla, 1, False)])
def test_clipping_by_value(tmp_path: Path, kind: Any, tp: int, zero1: bool) -> None:
    with pytest.raises(MisconfigurationException) as raised:
        settings: dict[str, Any] = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}
        jobs.fit(tmp_path, model=jobs.automatic(kind, tp, zero1), tp=tp, zero1=zero1, devices=4, **settings)
    assert "gradient_clip_algorithm='value' comes before gradients are reduced over ranks" in str(raised.value)
    assert "use 'norm', or a plain torch optimizer" in str(raised.value)


class Clipped(jobs.Module):
    """Manual optimization that clips as Lightning's documentation has it."""

    options: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.manual_backward(loss)
        self.clip_gradients(optimizer, **self.options)
        optimizer.step()
        optimizer.zero_grad()
        self.loss, self.should_print = self.trainer.strategy.reduce(loss.detach()), True


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("optimizer", [Torch, Nxd])
def test_clipping_by_hand(tmp_path: Path, optimizer: Any, algorithm: str) -> None:
    """What is clipped is the average over ranks, not each rank's own gradient."""
    settings: dict[str, Any] = {"gradient_clip_val": 0.3 if algorithm == "norm" else 0.02, "gradient_clip_algorithm": algorithm}
    kind = type("Kind", (Clipped,), {"options": settings, "configure_optimizers": optimizer.configure_optimizers})
    model = jobs.module(kind, tp=2, nxd_config=jobs.config(2, clip=None))
    if optimizer is Nxd and algorithm == "value":
        with pytest.raises(MisconfigurationException, match="comes before gradients are reduced"):
            jobs.fit(tmp_path, model=model, tp=2, devices=4)
        return
    found, _ = jobs.fit(tmp_path, model=model, tp=2, devices=4)
    wanted, _ = jobs.plain_fit(tmp_path, model=jobs.Plain(adam), **settings)
    jobs.close(found, wanted)


# -- several optimizers ------------------------------------------------------------------------------


class Alternating:
    """Two optimizers, each on its own parameters, with `toggle_optimizer`."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
        self.loss, self.should_print = self.trainer.strategy.reduce(loss.detach()), True

    def parts(self: Any) -> list[Any]:
        named = dict(self.model.named_parameters())
        return [[p for name, p in named.items() if ("up" in name) is first] for first in (True, False)]


class Ours(Alternating, jobs.Module):
    def configure_optimizers(self) -> Any:
        return [initialize_parallel_optimizer(self.nxd_config, torch.optim.AdamW, part, lr=0.01) for part in self.parts()]


class Theirs(Alternating, jobs.Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [adam(part) for part in self.parts()]


@pytest.mark.parametrize("zero1", [False, True])
def test_two_optimizers(tmp_path: Path, zero1: bool) -> None:
    model = jobs.module(Ours, tp=2, nxd_config=jobs.config(2, zero1, clip=None))
    found, ours = jobs.fit(tmp_path, model=model, tp=2, zero1=zero1, devices=4)
    wanted, plain = jobs.plain_fit(tmp_path, model=Theirs())
    jobs.close(found, wanted)
    assert ours.global_step == plain.global_step == 24
