"""Runs in the shape of the original's files, each shrunk by overrides: losses are those of transformers' model in a plain loop on one device.

The numbers are those of a table of code paths: one run for each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.nxd_jax.training import reference, yaml_runs

pytestmark = pytest.mark.usefixtures("ranks", "variables")

S = "distributed_strategy"
QUIET = ("exp_manager.create_checkpoint_callback=False", "trainer.max_steps=4")
ONE_LAYER = "model.num_layers=1"
TP2, PP2 = f"{S}.tensor_model_parallel_size=2", f"{S}.pipeline_model_parallel_size=2"
SP = f"{S}.sequence_parallel=True"
FLASH = "model.fusions.flash_attention=True"
FOUR = ("model.num_layers=4", "data.global_batch_size=8")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
COSINE = (
    "model.optim.name=adamw",
    "~model.optim.sched",
    "+model.optim.sched={name: CosineAnnealing, warmup_steps: 1, constant_steps: 0, min_lr: 1e-4}",
)
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
MOE = "num_experts: 4, frequency: 1, dropout: 0.0, top_k: 2, output_router_logits: True, router_aux_loss_coef: 0.02, normalize_top_k_affinities: True"


def moe(more: str) -> tuple[str, ...]:
    return (
        "name=hf_mixtral",
        f"+model.moe={{{MOE}, {more}}}",
        "model.activations_checkpoint_granularity=full",
        "model.activations_checkpoint_recompute=null",
    )


@dataclass(frozen=True)
class Run:
    """changes: of the file. model: of config.json."""

    changes: tuple[str, ...]
    model: dict[str, Any] = field(default_factory=dict)


RUNS = {
    "1 llama 7B: fused q, k and v of one weight": Run(("trainer.devices=2", TP2, SP, "model.qkv_linear=False"), {"num_key_value_heads": 4}),
    "2 llama3 8B: grouped queries": Run(("trainer.devices=4", TP2, SP, FLASH)),
    "2 llama3 8B: K/V heads twice": Run(("trainer.devices=2", TP2, SP, FLASH, f"{S}.kv_replicator=2"), {"num_key_value_heads": 1}),
    "3 llama3 8B on trn2": Run(("trainer.devices=2", "+trainer.lnc=2", TP2, SP, FLASH, "model.activations_checkpoint_granularity=null")),
    "4 llama3.1 8B: rope scaling, cosine": Run(("trainer.devices=2", TP2, SP, *COSINE), {"rope_scaling": LLAMA3}),
    "5 llama3 70B: pipeline": Run(
        ("trainer.devices=8", TP2, PP2, SP, *FOUR, "model.activations_checkpoint_recompute=[CoreAttention, LlamaMLP]")
    ),
    "6 interleaved": Run(("trainer.devices=4", TP2, PP2, SP, *FOUR, f"{S}.virtual_pipeline_model_parallel_size=2")),
    "7 llama3 70B on trn2: cuts by hand": Run(
        ("trainer.devices=2", PP2, *FOUR, "+model.pipeline_cuts=[model.layers.0]", "model.activations_checkpoint_recompute=[LlamaRMSNorm]")
    ),
    "8 llama3 70B CP: ring attention": Run(("trainer.devices=4", f"+{S}.context_parallel_size=2", "+model.fusions.ring_attention=True")),
    "9 llama3.1 405B: whole layers again": Run(
        ("trainer.devices=2", PP2, "model.activations_checkpoint_granularity=full", "model.activations_checkpoint_recompute=null")
    ),
    "14 mixtral: capacity for all": Run(("trainer.devices=2", TP2, SP, *moe("capacity_factor: 2.0")), MIXTRAL),
    "15 mixtral dropless": Run(("trainer.devices=2", TP2, SP, *moe("dropless: True, capacity_factor: 0.0")), MIXTRAL),
    "16 mixtral: experts in parallel": Run(
        ("trainer.devices=4", TP2, SP, f"+{S}.expert_model_parallel_size=2", *moe("capacity_factor: 2.0")), MIXTRAL
    ),
}


@pytest.mark.thorough(keep=3)
@pytest.mark.core(keep=1)
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_losses_are_those_of_a_plain_loop(run: Run, tmp_path: Path) -> None:
    file = yaml_runs.write(tmp_path, run.model)
    plain = reference.losses(file, *QUIET, *run.changes)
    found = yaml_runs.train(file, *QUIET, *run.changes)
    assert found == pytest.approx(plain, rel=1e-4)
    assert len(found) == 4 and found[-1] < found[0]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_capacity_drops_the_same_tokens_with_experts_in_parallel(tmp_path: Path) -> None:
    file = yaml_runs.write(tmp_path, MIXTRAL)
    changes = (*QUIET, "data.global_batch_size=8", TP2, SP, *moe("capacity_factor: 1.0"))
    one = yaml_runs.train(file, "trainer.devices=4", "exp_manager.name=one", *changes)
    two = yaml_runs.train(file, "trainer.devices=4", "exp_manager.name=two", f"+{S}.expert_model_parallel_size=2", *changes)
    assert two == pytest.approx(one, rel=1e-5)
    dropped = [yaml_runs.losses(tmp_path / "experiments" / name, "moe/dropped_share") for name in ("one", "two")]
    assert dropped[0] == pytest.approx(dropped[1]) and len(dropped[0]) == 4 and all(0 < share < 1 for share in dropped[0])


def test_parameter_norms_do_not_count_copies_of_context_parallel_ranks(tmp_path: Path) -> None:
    """(q) The original's is larger by the root of cp."""
    file = yaml_runs.write(tmp_path)
    ring = (f"+{S}.context_parallel_size=2", "+model.fusions.ring_attention=True", "trainer.devices=2")
    norms = []
    for name, changes in (("one", ()), ("two", ring)):
        yaml_runs.train(file, *QUIET, ONE_LAYER, "trainer.max_steps=2", f"exp_manager.name={name}", *changes)
        norms.append(yaml_runs.losses(tmp_path / "experiments" / name, "parameter_norm"))
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


PRECISIONS = {
    "mixed_precision": (),
    "mixed_precisionSR": (),
    "bf16SR": (),
    "autocast": (),
    "manual": (
        "+precision.master_weights=True",
        "+precision.fp32_grad_acc=True",
        "+precision.xla_downcast_bf16='1'",
        "+precision.neuron_rt_stochastic_rounding_en='0'",
    ),
}


@pytest.mark.thorough(keep=1)
@pytest.mark.core(keep=0)
@pytest.mark.parametrize("kind", PRECISIONS)
def test_precisions(kind: str, tmp_path: Path) -> None:
    """24: every kind learns about what float32 learns; (q) the documented spelling mixed_precisionSR is refused by the original."""
    file = yaml_runs.write(tmp_path)
    changes = (*QUIET, ONE_LAYER, "trainer.devices=2", TP2)
    found = yaml_runs.train(file, *changes, f"precision.type={kind}", *PRECISIONS[kind])
    plain = reference.losses(file, *changes)
    assert found == pytest.approx(plain, rel=0.02)
    assert found != plain


def test_the_second_validation_is_of_its_own_batches(tmp_path: Path) -> None:
    """25; (q) the original's val_loss is the mean over all validations so far."""
    file = yaml_runs.write(tmp_path)
    changes = ("trainer.val_check_interval=2", "trainer.limit_val_batches=2", "trainer.devices=2", ONE_LAYER)
    yaml_runs.train(file, *QUIET, *changes)
    found = yaml_runs.losses(tmp_path / "experiments", "val_loss")
    assert len(found) == 2
    yaml_runs.train(file, *QUIET, *changes, "trainer.val_check_interval=4", "exp_manager.name=once")
    assert yaml_runs.losses(tmp_path / "experiments" / "once", "val_loss") == pytest.approx(found[1:], rel=1e-5)
