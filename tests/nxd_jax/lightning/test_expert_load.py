"""What experts get, in Lightning's log, and biases that move with the optimizer that Lightning steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from neuronx_distributed.lightning import NeuronXLAStrategy
from pytorch_lightning import seed_everything
from torch.utils.data import DataLoader

from nxd_jax.modules.moe import load
from nxd_jax.modules.moe.load_reader import layers
from tests.nxd_jax.lightning import jobs
from tests.nxd_jax.lightning.test_pipeline import Language, Rows
from tests.nxd_jax.modules.moe.training import EXPERTS, Layout, Model
from torch_bridge.recorder import sharded

pytestmark = [*jobs.MARKS, pytest.mark.filterwarnings("ignore:The progress bar already tracks a metric")]


class Counting:
    """What both kinds of optimization have in common, for classes beside it."""

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()  # type: ignore[misc]
        self.load_log = load.LoadLog(self.model)  # type: ignore[attr-defined]
        self.balancer = load.ExpertBalancer(self.model, 0.01)  # type: ignore[attr-defined]
        self.balancer.attach(found[0][0])
        self.written: list[dict[str, float]] = []
        return found

    def write(self) -> None:
        self.log_dict(self.load_log.step())  # type: ignore[attr-defined]

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)  # type: ignore[misc]
        self.written.append({k: v.item() for k, v in self.trainer.callback_metrics.items() if k.startswith("moe/")})  # type: ignore[attr-defined]


class Manual(Counting, Language):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.write()
        return loss


class Automatic(Counting, jobs.Automatic):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(**batch)
        self.log("loss", loss)
        self.write()
        return loss


def rule(steps: list[dict[str, load.LoadStatistics]], name: str) -> torch.Tensor:
    """Biases by hand."""
    found = torch.zeros(EXPERTS)
    for step in steps:
        counted = torch.tensor(step[name].tokens, dtype=torch.float64)
        found += (0.01 * torch.sign(counted.mean() - counted)).float()
    return found


CASES = {
    "automatic": (Automatic, Layout(4, ep=2, router="group", zero1=True, factor=1.0), {}),
    "accumulated": (Automatic, Layout(4, ep=2, router="group"), {"accumulate_grad_batches": 2}),
    "pipeline": (Manual, Layout(4, ep=2, pp=2, router="group", microbatches=2, factor=1.0), {}),
}


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("case", CASES)
def test_what_is_logged_and_what_moves(tmp_path: Path, case: str) -> None:
    kind, layout, options = CASES[case]
    trainer = jobs.trainer(tmp_path, strategy=NeuronXLAStrategy(nxd_config=layout.config()), devices=layout.ranks, max_steps=3, **options)
    seed_everything(0, verbose=False)
    model = kind(
        model_fn=lambda: Model(layout),
        nxd_config=layout.config(),
        opt_cls=torch.optim.AdamW,
        opt_kwargs={"lr": 0.01},
        scheduler_cls=jobs.halving,
        manual_opt=kind is Manual,
    )
    trainer.fit(model, DataLoader(Rows(), batch_size=4))
    noted = [step.layers for step in model.load_log.steps]
    batches = 3 * options.get("accumulate_grad_batches", 1)
    assert len(noted) == len(model.written) == batches
    for written, step in zip(model.written, noted, strict=True):
        assert written["moe/imbalance"] == pytest.approx(max(s.imbalance for s in step.values()))
        for name, statistics in step.items():
            assert written[f"moe/dropped_share/{name}"] == pytest.approx(statistics.dropped_share)
    together = [_sum(noted[at : at + batches // 3]) for at in range(0, batches, batches // 3)]
    for name, layer in layers(model.model).items():
        for shard in sharded.shards(layer.router.e_score_correction_bias):
            torch.testing.assert_close(shard, rule(together, name))


def _sum(steps: list[dict[str, load.LoadStatistics]]) -> dict[str, load.LoadStatistics]:
    """Micro-batches of an optimizer step."""
    return {name: load.LoadStatistics(tuple(map(sum, zip(*(s[name].tokens for s in steps), strict=True))), 0) for name in steps[0]}
