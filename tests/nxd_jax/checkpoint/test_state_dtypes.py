"""The dtype of optimizer state that was saved by an optimizer with master weights and is loaded by one without, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import neuronx_distributed as nxd
import pytest
import torch

from nxd_jax.checkpoint import contents
from nxd_jax.utils.adamw_fp32_optim_params import AdamW_FP32OptimParams
from tests.nxd_jax.checkpoint import job
from tests.nxd_jax.conftest import Nxd


class Precise(torch.optim.Optimizer):
    """Momentum in float32, whatever its parameters are."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["moment"] = p.grad.float() + 0.9 * state.get("moment", 0.0)
                p.sub_((group["lr"] * state["moment"]).to(p.dtype))


def dtypes(made: Any) -> set[torch.dtype]:
    return {t.dtype for state in contents.stepping(made[1]).state.values() for k, t in state.items() if k != "step"}


@pytest.mark.parametrize("form", ["nxd", "original"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_with_master_weights_and_without(
    nxd: Nxd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[torch.optim.Optimizer], form: str
) -> None:
    """bfloat16 weights: ZeRO-1 has master weights and state in float32, a plain optimizer both in bfloat16."""
    monkeypatch.setenv("NXD_JAX_CHECKPOINT_FORMAT", form)
    losses = []
    for k, zero1 in enumerate((True, False, True)):
        nxd(2)
        made = job.build(zero1=zero1, dtype=torch.bfloat16, seed=k, optimizer_class=kind)
        made[0].eval()  # no dropout
        if k:
            _load(tmp_path, made)
            assert dtypes(made) == {torch.float32 if zero1 else torch.bfloat16}
        losses += job.train(made, k, k + 1)
        _save(tmp_path, k, made)
    nxd(2)
    whole = job.build(zero1=True, dtype=torch.bfloat16, optimizer_class=kind)
    whole[0].eval()
    assert losses == pytest.approx(job.train(whole, 0, 3), rel=2e-2)


def _load(path: Path, made: Any) -> None:
    nxd.load_checkpoint(path, None, *made)


def _save(path: Path, k: int, made: Any) -> None:
    nxd.save_checkpoint(path, f"step_{k}", *made)


def test_weights_of_another_dtype(nxd: Nxd, tmp_path: Path) -> None:
    """Trained in float32, fine-tuned in bfloat16."""
    nxd(1)
    made = job.build()
    job.train(made, 0, 1)
    _save(tmp_path, 0, made)
    made = job.build(dtype=torch.bfloat16, seed=1)
    _load(tmp_path, made)
    assert dtypes(made) == {torch.bfloat16}
    job.train(made, 1, 2)


def test_state_of_a_dtype_of_its_own_stays(nxd: Nxd, tmp_path: Path) -> None:
    """An optimizer that keeps float32 for bfloat16 weights goes on bit for bit."""
    nxd(1)
    made = job.build(dtype=torch.bfloat16, optimizer_class=Precise)
    job.train(made, 0, 1)
    _save(tmp_path, 0, made)
    job.train(made, 1, 2)
    again = job.build(dtype=torch.bfloat16, seed=1, optimizer_class=Precise)
    _load(tmp_path, again)
    assert dtypes(again) == {torch.float32}
    job.train(again, 1, 2)
    assert job.differing(job.weights(again[0]), job.weights(made[0])) == []


@pytest.mark.filterwarnings("ignore:XLA_DOWNCAST_BF16 is deprecated")
def test_an_optimizer_says_its_dtype(nxd: Nxd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With XLA_DOWNCAST_BF16=1 moments are torch.double, also those that were saved without it."""
    nxd(1)
    made = job.build(optimizer_class=AdamW_FP32OptimParams)
    job.train(made, 0, 1)
    _save(tmp_path, 0, made)
    monkeypatch.setenv("XLA_DOWNCAST_BF16", "1")
    made = job.build(optimizer_class=AdamW_FP32OptimParams)
    _load(tmp_path, made)
    assert dtypes(made) == {torch.double}
