"""Whole runs of the original's Megatron files, shrunk: losses do not depend on how ranks are laid out. (Each model against another one: `models`.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nxd_jax.lightning import jobs
from tests.nxd_jax.training import yaml_runs
from tests.nxd_jax.training.lightning_modules.data.megatron import test_runs as runs

pytestmark = [*jobs.MARKS, pytest.mark.usefixtures("ranks", "variables"), pytest.mark.core(keep=0)]

S = "distributed_strategy"
QUIET = ("exp_manager.create_checkpoint_callback=False", "trainer.max_steps=3", "trainer.limit_val_batches=0")
ONE = (f"{S}.tensor_model_parallel_size=1", f"{S}.pipeline_model_parallel_size=1", f"{S}.sequence_parallel=False")
TP2, PP2, SP = f"{S}.tensor_model_parallel_size=2", f"{S}.pipeline_model_parallel_size=2", f"{S}.sequence_parallel=True"
EXPERTS = ("model.moe.num_experts=4", "data.micro_batch_size=1")
FIXTURES = {
    "19 llama 70b: grouped queries, whole layers again, a pipeline": (
        "megatron_llama_70b",
        ("model.num_kv_heads=2",),
        ("trainer.devices=4", TP2, PP2, SP),
    ),
    "19 interleaved": (
        "megatron_llama_70b",
        ("model.num_kv_heads=2", "model.num_layers=4"),
        ("trainer.devices=2", PP2, f"{S}.virtual_pipeline_model_parallel_size=2"),
    ),
    "20 mistral: a window": ("megatron_mistral", ("model.sliding_window_size=8", "model.num_kv_heads=2"), ("trainer.devices=4", TP2, SP)),
    "21 mixtral: experts in parallel, a pipeline": (
        "megatron_mixtral_8x7b",
        (*EXPERTS, "model.moe.capacity_factor=2.0"),
        ("trainer.devices=8", TP2, PP2, SP, f"{S}.expert_model_parallel_size=2"),
    ),
    "21 mixtral dropless: tokens of two ranks shuffled": (
        "megatron_mixtral_8x7b_dropless",
        (*EXPERTS, "model.moe.output_router_logits=False"),
        ("trainer.devices=2", f"{S}.token_shuffle_group_size=2"),
    ),
}


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(("conf", "changes", "layout"), FIXTURES.values(), ids=FIXTURES)
def test_losses_do_not_depend_on_the_layout(conf: str, changes: tuple[str, ...], layout: tuple[str, ...], tmp_path: Path) -> None:
    file = runs.write(tmp_path, conf)
    one = yaml_runs.train(file, *QUIET, *ONE, *changes, "exp_manager.name=one")
    many = yaml_runs.train(file, *QUIET, *ONE, *changes, *layout, "exp_manager.name=many")
    assert many == pytest.approx(one, rel=1e-4)
    assert len(one) == 3 and one[-1] < one[0]


@pytest.mark.thorough
def test_a_window_as_long_as_the_sequence_is_causal_attention(tmp_path: Path) -> None:
    """20: and a shorter one is not."""
    file = runs.write(tmp_path, "megatron_mistral")
    found = [
        yaml_runs.train(file, *QUIET, *ONE, f"model.sliding_window_size={size}", f"exp_manager.name=w{size}")
        for size in ("null", runs.SEQ, 4)
    ]
    assert found[1] == found[0] and found[2] != found[0]


@pytest.mark.thorough
@pytest.mark.parametrize("conf", ["megatron_mixtral_8x7b_dropless", "megatron_llama_7B"])
def test_a_run_goes_on_at_another_layout(conf: str, tmp_path: Path) -> None:
    """18: weights, and the optimizer's state of ZeRO-1, of a checkpoint that was written with TP 2."""
    file = runs.write(tmp_path, conf)
    quiet = ("trainer.max_steps=6", "trainer.limit_val_batches=0", *(EXPERTS if "mixtral" in conf else ()))
    tp = ("trainer.devices=4", TP2, SP)
    whole = yaml_runs.train(file, *quiet, *ONE, *tp, "exp_manager.name=whole")
    kept = next((tmp_path / "experiments" / "whole").rglob("*step=3-consumed_samples=12.0*.ckpt"))
    other = ("trainer.devices=2", PP2, f"exp_manager.resume_from_checkpoint='{kept}'", "exp_manager.name=other")
    assert yaml_runs.train(file, *quiet, *ONE, *other) == pytest.approx(whole[3:], rel=1e-4)
