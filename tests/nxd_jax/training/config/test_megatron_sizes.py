"""What memory and time of Megatron models are estimated from, against the models themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nxd_jax.training.config import checking, memory, plans, setup
from nxd_jax.training.models.megatron.gpt_model import GPTModel
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.training.config import conf_files
from tests.nxd_jax.training.lightning_modules import megatron_jobs

KINDS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "gpt2": ("gpt2", (), {}),
    "geglu": ("gpt2", ("model.activation=geglu", "model.kv_channels=16"), {"activation": "geglu", "kv_channels": 16}),
    "llama": ("llama", (), {}),
    "mixtral": ("mixtral", (), {}),
    "mixtral, every second layer": ("mixtral", ("model.moe.frequency=2",), {"moe_frequency": 2}),
    "mixtral with one expert": ("mixtral", ("model.moe.num_experts=1", "model.moe.top_k=1"), {"num_moe_experts": 1}),
}


@pytest.mark.parametrize(("kind", "changes", "more"), KINDS.values(), ids=KINDS)
def test_sizes_are_those_of_the_model(kind: str, changes: tuple[str, ...], more: dict[str, Any], nxd: Nxd) -> None:
    nxd(1)
    facts = checking.facts_of(megatron_jobs.config(kind, *changes))
    sizes, made = facts.transformer(), setup.of(facts)
    assert sizes is not None and made is not None
    arguments = {**megatron_jobs.arguments(kind), "vocab_size": facts.vocabulary, **more}
    matrices = {name: p.numel() for name, p in GPTModel(**arguments).named_parameters() if p.dim() > 1}
    assert sizes.parameters + facts.positions * sizes.hidden == sum(matrices.values())
    norms = (2 * sizes.layers + 1) * sizes.hidden
    assert sum(memory.parameters(made, 0)) == sum(matrices.values()) + norms
    experts = sum(count for name, count in matrices.items() if "expert_mlps" in name)
    assert memory.parameters(made, 0)[0] == experts
    idle = experts * (1 - sizes.top_k / sizes.experts) if sizes.experts else 0
    assert sizes.active_parameters + facts.positions * sizes.hidden == sum(matrices.values()) - idle


def test_what_is_computed_again() -> None:
    for kind, words, names in (
        ("gpt2", (megatron_jobs.SELECTIVE,), ("CoreAttention",)),
        ("mixtral", (megatron_jobs.SELECTIVE,), ("CoreAttention", "NeuronSwitchMLP")),
        ("mixtral", (megatron_jobs.SELECTIVE, "model.activations_checkpoint_recompute=[CoreAttention]"), ("CoreAttention",)),
        ("mixtral", (megatron_jobs.FULL,), ("full",)),
        ("gpt2", (), ()),
    ):
        assert checking.facts_of(OmegaConf.create(OmegaConf.to_container(megatron_jobs.config(kind, *words)))).recomputed == names


@pytest.mark.parametrize("tied", [True, False])
def test_plans_do_not_share_an_embedding_between_stages(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values = conf_files.with_files("megatron_gpt", tmp_path)
    values["model"]["share_embeddings_and_output_weights"] = tied
    facts = checking.facts_of(OmegaConf.create(values))
    found, topology = setup.of(facts), facts.topology()
    assert found is not None and topology is not None
    stages = {p.setup.pp for p in plans.plans(facts, found, topology)}
    assert stages == {1} if tied else max(stages) > 1
