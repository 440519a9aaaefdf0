"""`nxdt-train --plan`: layouts that fit, fastest first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nxd_jax.training.config import checking, memory, plans, setup, steptime
from tests.nxd_jax.training.config import conf_files


def cfg(conf: str, folder: Path, **changes: Any) -> Any:
    values = conf_files.with_files(conf, folder)
    conf_files.change(values, {key.replace("__", "."): value for key, value in changes.items()})
    return OmegaConf.create(values)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_table_and_the_overrides(folder: Path) -> None:
    text = plans.plan(cfg("hf_llama3_8B", folder, trainer__num_nodes=1, data__global_batch_size=64))
    rows = [line for line in text.splitlines() if " GiB " in line and "NeuronCores" not in line]
    assert len(rows) >= 5 and sum(line.startswith("configured") for line in rows) == 1
    assert max(map(len, text.splitlines())) <= 120
    assert "as overrides" in text and "  distributed_strategy.tensor_model_parallel_size=8" in text


def test_the_overrides_lead_to_the_layout_that_was_promised(folder: Path) -> None:
    """The best of a plan, checked anew with its overrides, is free of errors and as fast."""
    ring = {"softmax": True, "flash_attention": False, "ring_attention": True}
    layout = {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 1, "context_parallel_size": 2, "zero1": True}
    made = cfg("hf_llama3_8B", folder, trainer__num_nodes=1, data__global_batch_size=64, distributed_strategy=layout, model__fusions=ring)
    text = plans.plan(made)
    assert "the configured layout does not fit" in text
    words = [line.strip() for line in text.partition("as overrides")[2].splitlines()[1:]]
    merged = OmegaConf.merge(made, OmegaConf.from_dotlist([w.lstrip("+") for w in words]))
    assert not checking.check(merged).errors
    best = next(line for line in text.splitlines() if " GiB " in line and " !" not in line and "NeuronCores" not in line)
    again = plans.plan(merged)
    own = next(line for line in again.splitlines() if line.startswith("configured"))
    assert own.removeprefix("configured").split() == best.split()
    assert "the configured layout is the fastest" in again


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("conf", ["megatron_llama_7B", "hf_llama3_70B_trn2", "hf_mixtral_8x7b"])
def test_layouts_divide_and_fit(conf: str, folder: Path) -> None:
    facts = checking.facts_of(cfg(conf, folder))
    found, topology = setup.of(facts), facts.topology()
    assert found is not None and topology is not None
    made = plans.plans(facts, found, topology)
    assert [p.time.seconds for p in made] == sorted(p.time.seconds for p in made)
    for p in made:
        s = p.setup
        assert s.tp * s.pp * s.cp * s.dp == facts.world and s.gbs % (s.dp * s.mbs) == 0 and s.model.heads % s.tp == 0
        assert p.memory.total <= memory.SLACK * p.memory.hbm and sum(s.stages) == s.model.layers and len(s.stages) == s.pp
    assert len({(p.setup.tp, p.setup.pp, p.setup.cp, p.setup.ep) for p in made}) == len(made)


def test_what_cannot_be_planned(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"nxdt-train --check says what is wrong"):
        plans.plan(cfg("hf_llama3_8B", folder, data__global_batch_size=3))
    huge = cfg("hf_llama3.1_405B_trn1", folder, trainer__num_nodes=32, model__num_layers=2000)
    assert "no layout fits" in plans.plan(huge) and "the configured layout does not fit" in plans.plan(huge)


def test_more_is_kept_where_less_is_computed_again(folder: Path) -> None:
    """Directions of the estimate: each change in the direction that everybody knows."""
    made = cfg("hf_llama_7B", folder, model__num_layers=32)
    facts = checking.facts_of(made)
    found, topology = setup.of(facts), facts.topology()
    assert found is not None and topology is not None

    def total(**changes: Any) -> float:
        import dataclasses

        return memory.of(dataclasses.replace(found, **changes), topology).total

    assert total(recomputed=()) > total() > total(recomputed=("CoreAttention", "LlamaMLP")) > total(recomputed=("full",))
    assert total(recomputed=(), flash=True) < total(recomputed=())
    assert total(zero1=False) > total() and total(sequence_parallel=False) > total() and total(mbs=2) > total()
    assert total(optimizer="sgd") < total(optimizer="adagrad") < total()


@pytest.mark.parametrize("conf", ["hf_llama3_8B", "hf_mixtral_8x7b"])
def test_parameters_are_those_of_transformers(conf: str, folder: Path) -> None:
    """On one core exactly; on several, with what all of them hold, as many."""
    import dataclasses

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    made, kind = (MixtralConfig, MixtralForCausalLM) if "mixtral" in conf else (LlamaConfig, LlamaForCausalLM)
    facts = checking.facts_of(cfg(conf, folder, data__global_batch_size=1024, distributed_strategy={"tensor_model_parallel_size": 1}))
    sizes = {k: v for k, v in conf_files.config_json(conf).items() if k not in ("model_type", "torch_dtype")}
    with torch.device("meta"):
        whole = sum(p.numel() for p in kind(made(**sizes)).parameters())  # type: ignore[arg-type]
    found = setup.of(facts)
    assert found is not None
    assert sum(memory.parameters(found, 0)) == whole
    shared = dataclasses.replace(found, tp=4, pp=4, ep=1, stages=setup.even(32, 4))
    everywhere = 32 * (2 + found.model.experts) * 4096 + 4096  # norms and routers
    assert sum(4 * sum(memory.parameters(shared, k)) for k in range(4)) == whole + 3 * everywhere


def test_one_micro_batch_stands_for_all(folder: Path) -> None:
    """The work of a step is that of `transformer_work` for all micro-batches."""
    from nxd_jax.inspect.estimate import estimate, transformer_work

    facts = checking.facts_of(cfg("hf_llama3_70B", folder, data__global_batch_size=64))
    found, topology = setup.of(facts), facts.topology()
    assert found is not None and topology is not None
    whole = transformer_work(
        found.model, seq=found.seq, global_batch=64, tp=32, pp=8, dp=2, recompute="selective", flash=True, gradient_dtype="float32"
    )
    assert steptime.of(found, topology).seconds == pytest.approx(estimate(whole, topology).seconds, rel=1e-6)
    assert 0 < steptime.of(found, topology).mfu < 1
