"""Checkpoints of pipelines: they load in any layout, with or without a pipeline, bit for bit, and training goes on as if it had never stopped."""

from __future__ import annotations

from pathlib import Path

import neuronx_distributed as nxd_api
import pytest
import torch

from nxd_jax.checkpoint import reading
from tests.nxd_jax.checkpoint import job
from tests.nxd_jax.checkpoint.pipeline_job import Layout, values
from tests.nxd_jax.conftest import Nxd

HOW: dict[str, tuple[bool, bool, torch.dtype, bool]] = {
    "zero1-tied": (True, True, torch.float32, False),
    "plain-background": (False, False, torch.float32, True),
    "zero1-tied-bfloat16-background": (True, True, torch.bfloat16, True),
    "tied": (False, True, torch.float32, False),
}
"""zero1, tied, dtype, in the background."""


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("how", HOW)
def test_from_layout_to_layout_and_back(nxd: Nxd, tmp_path: Path, how: str) -> None:
    """pp 4 x tp 2 x dp 2, then pp 2 x 2 stages x tp 4 x dp 2, then no pipeline, then the first again: the same bits, and the same training goes on."""
    zero1, tied, dtype, background = HOW[how]
    first = Layout(16, 4, 2, zero1=zero1)
    first.start(nxd)
    made = first.build(tied=tied, dtype=dtype)
    first.train(made, 0, 2)
    held = values(made)
    nxd_api.save_checkpoint(tmp_path, "0", *made, user_content={"steps": 2}, async_save=background)
    expected = first.train(made, 2, 4)
    nxd_api.finalize_checkpoint()
    for k, layout in enumerate((Layout(16, 2, 4, 2, zero1), Layout(2, zero1=zero1), first)):
        layout.start(nxd)
        made = layout.build(seed=k + 1, tied=tied, dtype=dtype)
        assert nxd_api.load_checkpoint(tmp_path, str(k), *made) == {"steps": 2}
        assert job.differing(values(made), held) == [] and made[2].last_epoch == 2
        assert [g["lr"] for g in made[1].param_groups] == [0.01 * (1 / 3)] * 2
        nxd_api.save_checkpoint(tmp_path, str(k + 1), *made, user_content={"steps": 2}, async_save=background)
        found = layout.train(made, 2, 4)
        nxd_api.finalize_checkpoint()
        torch.testing.assert_close(found, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=0.0)
    assert found == expected


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("background", [True, False])
def test_training_goes_on_bit_for_bit(nxd: Nxd, tmp_path: Path, background: bool) -> None:
    """With dropout, whose random numbers go on, and a schedule whose last stage is with the first rank."""
    layout = Layout(8, 2, 2, 2, True, "zbv")
    layout.start(nxd)
    made = layout.build(dropout=0.2, tied=True)
    layout.train(made, 0, 2)
    nxd_api.save_checkpoint(tmp_path, "two", *made, async_save=background)
    expected = layout.train(made, 2, 4)
    nxd_api.finalize_checkpoint()
    made = layout.build(seed=1, dropout=0.2, tied=True)
    layout.train(made, 0, 1)
    nxd_api.load_checkpoint(tmp_path, None, *made)
    assert layout.train(made, 2, 4) == expected


def test_weights_that_master_weights_stand_for(nxd: Nxd, tmp_path: Path) -> None:
    layout = Layout(8, 2, 2, zero1=True)
    layout.start(nxd)
    made = layout.build(dtype=torch.bfloat16, tied=True)
    layout.train(made, 0, 1)
    held = values(made)
    nxd_api.save_checkpoint(tmp_path, "t", *made, avoid_saving_lower_precision_weights=True)
    assert set(reading.Folder(tmp_path / "t/model").entries) == {"head.weight", *(f"layers.{k}.scale" for k in range(4))}
    made = layout.build(seed=1, dtype=torch.bfloat16, tied=True)
    nxd_api.load_checkpoint(tmp_path, "t", *made)
    assert job.differing(values(made), held) == []


def test_the_pipeline_inside(nxd: Nxd, tmp_path: Path) -> None:
    """An `NxDPPModel` in place of the model that `initialize_parallel_model` returns."""
    layout = Layout(4, 2, 2)
    layout.start(nxd)
    model, optimizer, _ = made = layout.build()
    layout.train(made, 0, 1)
    held = values(made)
    nxd_api.save_checkpoint(tmp_path, "t", model.pipeline, optimizer)
    model, optimizer, _ = made = layout.build(seed=1)
    nxd_api.load_checkpoint(tmp_path, "t", model.pipeline, optimizer)
    assert job.differing(values(made), held) == []


# -- mistakes ------------------------------------------------------------------------------------------


def test_another_model(nxd: Nxd, tmp_path: Path) -> None:
    """Names that only one has are said with the pipeline rank that has them, and nothing changes."""
    layout = Layout(4, 2, 2)
    layout.start(nxd)
    model, optimizer, _ = layout.build()
    nxd_api.save_checkpoint(tmp_path, "t", model, optimizer)
    other, stepper, _ = made = layout.build(layers=6, more=True)
    before = values(made)
    with pytest.raises(RuntimeError) as found:
        nxd_api.load_checkpoint(tmp_path, "t", other)
    text = str(found.value)
    assert "missing in the checkpoint: layers.4.scale, layers.4.norm.weight (pipeline rank 1), " in text.replace("layers.5.scale, ", "")
    with pytest.raises(ValueError, match=r"has no state for layers.4.up.weight \(pipeline rank 1\), "):
        nxd_api.load_checkpoint(tmp_path, "t", other, stepper, strict=False)
    nxd_api.save_checkpoint(tmp_path, "u", other)
    with pytest.raises(RuntimeError, match=r"unexpected in the checkpoint: layers.4.down.weight \(pipeline rank 1\), "):
        nxd_api.load_checkpoint(tmp_path, "u", model)
    assert before
