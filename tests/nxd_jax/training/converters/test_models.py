"""Models that are filled from converted files compute what transformers' models compute, and training begins with their loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import neuronx_distributed as nxd_api
import pytest
import torch
import transformers

from nxd_jax.checkpoint import original
from nxd_jax.training.converters import logits
from nxd_jax.training.converters.rank_files import open_files
from nxd_jax.training.models.hf_models.modeling_llama import LlamaForCausalLM
from nxd_jax.training.models.hf_models.modeling_mixtral import MixtralForCausalLM
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.lightning.jobs import MARKS
from tests.nxd_jax.training import yaml_runs
from tests.nxd_jax.training.converters import jobs

LAYERS = {"num_hidden_layers": 2}
MHA = {"num_key_value_heads": 8}
CASES: list[tuple[dict[str, Any], str, int]] = [
    ({"attention_bias": True}, "--tp_size 4 --pp_size 2 --kv_size_multiplier 2 --fuse_qkv True", 2),
    ({**jobs.EXPERTS}, "--tp_size 4 --ep_size 2 --kv_size_multiplier 2 --qkv_linear True --save_xser True", 2),
    (MHA, "--tp_size 4 --pp_size 2 --fuse_qkv True", 1),
    (MHA, "--tp_size 2", 1),
    (MHA, "--tp_size 2 --qkv_linear True --fuse_qkv True", 1),
    ({"num_key_value_heads": 4}, "--tp_size 4 --kv_size_multiplier 2 --hw_backend trn2", 2),
    ({**jobs.EXPERTS, **MHA}, "--tp_size 2 --pp_size 2 --fuse_qkv True", 1),
    ({"tie_word_embeddings": True}, "--tp_size 2 --pp_size 2 --qkv_linear True", 1),
    ({"num_key_value_heads": 4}, "--tp_size 2 --pp_size 2 --model_style megatron", 1),
    ({**jobs.EXPERTS, **MHA}, "--tp_size 4 --ep_size 2 --model_style megatron", 1),
    ({**MHA, "tie_word_embeddings": True}, "--tp_size 2 --model_style megatron", 1),
]


@pytest.mark.thorough(keep=6)
@pytest.mark.core(keep=2)
@pytest.mark.parametrize(("sizes", "flags", "copies"), CASES, ids=lambda x: "-".join(x.split()) if isinstance(x, str) else "")
def test_logits(sizes: dict[str, Any], flags: str, copies: int, nxd: Nxd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = jobs.hub(tmp_path / "hub", **LAYERS, **sizes)
    nxdt = jobs.into(hub, tmp_path / "nxdt", flags)
    if "trn2" in flags:
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    tp = open_files(nxdt).files.sizes["tp"]
    nxd(tp, tp=tp)
    difference, largest = logits.difference(hub, nxdt, jobs.model(**LAYERS, **sizes).config.to_dict(), copies)
    assert difference < 1e-5 and largest > 0.5 and logits.equal(difference, largest)


def test_a_difference_is_seen(nxd: Nxd, tmp_path: Path) -> None:
    """Two query heads that change places, as a converter with another order would have them."""
    hub = jobs.hub(tmp_path / "hub", **LAYERS, **MHA)
    nxdt = jobs.into(hub, tmp_path / "nxdt", "--qkv_linear True --fuse_qkv False")
    path = nxdt / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt"
    data = torch.load(path)
    q = data["model.layers.0.self_attn.qkv_proj.weight_q"]
    data["model.layers.0.self_attn.qkv_proj.weight_q"] = torch.cat([q[8:16], q[:8], q[16:]])
    torch.save(data, path)
    nxd(1)
    difference, largest = logits.difference(hub, nxdt, jobs.model(**LAYERS, **MHA).config.to_dict(), 1)
    assert difference > 1e-3 and not logits.equal(difference, largest) and not logits.equal(float("nan"), largest)


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("sizes", [MHA, jobs.EXPERTS], ids=["llama", "mixtral"])
def test_transformers_reads_what_is_written(sizes: dict[str, Any], tmp_path: Path) -> None:
    """Of files that hold what older models computed once and kept, too."""
    hub = jobs.hub(tmp_path / "hub", **LAYERS, **sizes)
    nxdt = jobs.into(hub, tmp_path / "nxdt", "--tp_size 2 --fuse_qkv True")
    for path in (nxdt / "model").iterdir():
        torch.save(torch.load(path) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, path)
    back = jobs.back(nxdt, tmp_path / "back", f"--config {hub}/config.json")
    found, want = transformers.AutoModelForCausalLM.from_pretrained(back), jobs.model(**LAYERS, **sizes)
    jobs.same(dict(found.state_dict()), dict(want.state_dict()))


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("sizes", [{}, {**jobs.EXPERTS, "tie_word_embeddings": True}], ids=["llama", "mixtral"])
def test_what_nxdt_train_saves(sizes: dict[str, Any], nxd: Nxd, tmp_path: Path) -> None:
    """Arrays of any layout, query heads in the model's order."""
    hub = jobs.hub(tmp_path / "hub", **LAYERS, **sizes)
    nxdt = jobs.into(hub, tmp_path / "nxdt", "--tp_size 4 --kv_size_multiplier 2 --fuse_qkv True")
    nxd(4, tp=4)
    config = jobs.model(**LAYERS, **sizes).config
    config.kv_shared_group_size = 2
    model = (MixtralForCausalLM if sizes else LlamaForCausalLM)(config)
    original.load(nxdt, model, None, None, True)
    nxd_api.save_checkpoint(tmp_path / "own", "tag", model=model.to("xla"))
    for place in ("own/tag", "own/tag/model"):
        back = jobs.back(tmp_path / place, tmp_path / "back", f"--config {hub}/config.json --force")
        jobs.same(jobs.weights(back), jobs.weights(hub))
    difference, largest = logits.difference(hub, tmp_path / "own" / "tag", config.to_dict(), 2)
    assert logits.equal(difference, largest)
    with pytest.raises(ValueError, match="holds a model of --model_style hf: give that"):
        jobs.back(tmp_path / "own" / "tag", tmp_path / "no", f"--config {hub}/config.json --model_style megatron")


def test_weights_that_master_weights_stand_for(nxd: Nxd, tmp_path: Path) -> None:
    """`use_master_weights_in_ckpt`: bfloat16 weights are left out, and their float32 master weights are what is converted."""
    hub = jobs.hub(tmp_path / "hub", **LAYERS, half=True)
    nxdt = jobs.into(hub, tmp_path / "nxdt", "--tp_size 2 --qkv_linear True")
    nxd(4, tp=2)
    setup = nxd_api.neuronx_distributed_config(tensor_parallel_size=2, optimizer_config={"zero_one_enabled": True, "grad_clipping": False})
    config = jobs.model(**LAYERS).config
    config.qkv_linear, config.params_dtype = True, "bfloat16"
    model = nxd_api.initialize_parallel_model(setup, lambda: LlamaForCausalLM(config))
    original.load(nxdt, model, None, None, True)
    optimizer = nxd_api.initialize_parallel_optimizer(setup, torch.optim.AdamW, model.parameters(), lr=0.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    nxd_api.save_checkpoint(tmp_path / "own", "tag", model, optimizer, avoid_saving_lower_precision_weights=True)
    back = jobs.back(tmp_path / "own" / "tag", tmp_path / "back", f"--config {hub}/config.json")
    jobs.same(jobs.weights(back), {name: t.float() for name, t in jobs.weights(hub).items()})


class TestTraining:
    pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:.*is not resumable")]

    @pytest.mark.core(keep=0)
    def test_begins_with_the_loss_of_transformers(self, ranks: None, variables: None, tmp_path: Path) -> None:
        """tp 4, pp 2, K/V heads twice, everything from one YAML file."""
        file = yaml_runs.write(tmp_path)
        sizes = {k: v for k, v in yaml_runs.MODEL.items() if k != "torch_dtype"}
        made = jobs.model(**{**sizes, "initializer_range": 0.1, "pad_token_id": None})
        torch.save(made.state_dict(), tmp_path / "model.pt")
        words = ("trainer.devices=8", "model.qkv_linear=True", "distributed_strategy.kv_replicator=2", "trainer.max_steps=1")
        words += ("distributed_strategy.tensor_model_parallel_size=4", "distributed_strategy.pipeline_model_parallel_size=2")
        changed = tmp_path / "changed.yaml"
        changed.write_text(_with(file, *words))
        jobs.into(tmp_path / "model.pt", tmp_path / "nxdt", f"--nxdt_yaml_config {changed}")
        assert len(list((tmp_path / "nxdt" / "model").glob("*.pt"))) == 8
        start = ("exp_manager.resume_from_checkpoint=" + str(tmp_path / "nxdt"), "+model.weight_init_only=True")
        found = yaml_runs.train(changed, *start)
        ids = yaml_runs.rows()[:4]
        want = made.float()(input_ids=ids, labels=ids).loss.item()
        assert found == pytest.approx([want], rel=1e-5)


def _with(file: Path, *words: str) -> str:
    """A file with keys changed."""
    from omegaconf import OmegaConf

    from nxd_jax.training.config import loading

    return OmegaConf.to_yaml(loading.load(file, list(words)))
