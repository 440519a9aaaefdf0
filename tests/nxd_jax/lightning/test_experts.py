"""A Trainer over a model with experts: the numbers of ranks that hold all of them, checkpoints from one layout to the other."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from neuronx_distributed.lightning import NeuronXLAStrategy
from pytorch_lightning import seed_everything
from torch.utils.data import DataLoader

from tests.nxd_jax.lightning import jobs
from tests.nxd_jax.lightning.test_pipeline import Language, Rows
from tests.nxd_jax.modules.moe.training import Layout, Model

pytestmark = [*jobs.MARKS, pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")]

ONE = Layout(2, aux=0.0)
"""Two data-parallel ranks with all experts. Auxiliary losses, which are of a rank's own tokens, are left out: layouts have different ones."""


def fit(folder: Path, layout: Layout, strategy: Any = None, steps: int = 4, ckpt_path: str | None = None) -> tuple[list[float], Any]:
    losses = jobs.Losses()
    made = jobs.trainer(
        folder,
        strategy=strategy or NeuronXLAStrategy(nxd_config=layout.config()),
        devices=layout.ranks,
        max_steps=steps,
        callbacks=[losses],
    )
    seed_everything(0, verbose=False)
    model = Language(
        model_fn=lambda: Model(layout),
        nxd_config=layout.config(),
        opt_cls=torch.optim.AdamW,
        opt_kwargs={"lr": 0.01},
        scheduler_cls=jobs.halving,
    )
    made.fit(model, DataLoader(Rows(), batch_size=8), ckpt_path=ckpt_path)
    return losses.losses, made


@cache
def plain() -> list[float]:
    """Losses with all experts on every rank."""
    with TemporaryDirectory() as folder:
        return fit(Path(folder), ONE)[0]


@pytest.mark.thorough(keep=1)
@pytest.mark.core(keep=1)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(4, tp=2, ep=2, zero1=True, sequence_parallel=True, aux=0.0),
        Layout(2, ep=2, aux=0.0),
        Layout(4, ep=2, pp=2, microbatches=2, aux=0.0),
    ],
    ids=str,
)
def test_fit(tmp_path: Path, layout: Layout) -> None:
    found, _ = fit(tmp_path / "experts", layout)
    assert len(found) == 4 and found == pytest.approx(plain(), rel=1e-4)


def test_sizes_as_arguments(tmp_path: Path) -> None:
    layout = Layout(4, tp=2, ep=2, aux=0.0)
    strategy = NeuronXLAStrategy(tensor_parallel_size=2, expert_parallel_size=2)
    found, trainer = fit(tmp_path, layout, strategy)
    assert trainer.strategy.expert_parallel_size == 2
    assert found == pytest.approx(plain(), rel=1e-4)


def test_resume_in_another_layout(tmp_path: Path) -> None:
    """Two steps with experts shared out, then two without: the losses of a run that goes on in its own layout."""
    losses = []
    for name, layout in {"experts": Layout(4, tp=2, ep=2, zero1=True, aux=0.0), "one": ONE}.items():
        _, trainer = fit(tmp_path / name, layout, steps=2)
        trainer.save_checkpoint(tmp_path / name / "saved.ckpt")
        losses.append(fit(tmp_path / f"{name} resumed", ONE, ckpt_path=str(tmp_path / name / "saved.ckpt"))[0])
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-4)
