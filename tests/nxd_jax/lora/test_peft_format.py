"""Adapters in Hugging Face PEFT's format: loaded by PEFT, and PEFT's loaded here, also into fused layers."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from nxd_jax.modules.lora import LoraConfig, LoraModel, get_lora_model, peft_format
from nxd_jax.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_jax.parallel_layers.layers import ColumnParallelLinear
from nxd_jax.utils.full_weights import scatter_full
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.lora.models import PROJECTIONS, full, llama, logits, parallel, stir

sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "examples" / "llama"))
import hf_weights
from modeling_llama_nxd import LlamaForCausalLM, NxDLlamaOptions

EVERY: dict[str, Any] = {"target_modules": [*PROJECTIONS, "embed_tokens"], "bias": "lora_only", "modules_to_save": ["lm_head"]}
FUSED_TARGETS = ["qkv_proj", "o_proj", "gate_up_proj"]


def separate(tp_model: Any, **options: Any) -> LoraModel:
    model = LoraModel(parallel(tp_model), LoraConfig(lora_rank=2, lora_alpha=6, **options))
    stir(model)
    return model


def fused(base: transformers.LlamaForCausalLM, rank: int = 2, **options: Any) -> LoraModel:
    """The example's model, with fused projections, and the weights of Hugging Face's."""
    model = LlamaForCausalLM(base.config, NxDLlamaOptions())
    hf_weights.from_full(model, base.state_dict())
    options = {"target_modules": FUSED_TARGETS} | options
    return LoraModel(model.to("xla"), LoraConfig(lora_rank=rank, lora_alpha=6, **options))


def fused_logits(model: LoraModel) -> torch.Tensor:
    from nxd_jax.parallel_layers import mappings
    from tests.nxd_jax.lora.models import batch

    with torch.no_grad():
        return mappings._gather_along_dim(model(input_ids=batch().to("xla"))[1], -1).cpu()


def theirs(base: Any, **options: Any) -> Any:
    """A PEFT model with adapters that are not zero."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=6, **options))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


# -- out ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
def test_peft_loads_ours(nxd: Nxd, tmp_path: pathlib.Path, tp: int) -> None:
    peft = pytest.importorskip("peft")
    nxd(2, tp=tp)
    base = llama(attention_bias=True)
    model = separate(base, **EVERY)
    with torch.no_grad():
        for name, t in model.tensors().items():
            if t.requires_grad and ".lora_" not in name:
                t.add_(0.25)
    peft_format.save_pretrained(model, tmp_path / "adapter", base_model_name_or_path="tiny")
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny" and sorted(config["target_modules"]) == sorted(EVERY["target_modules"])
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(loaded.merge_and_unload()), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tp", [1, 2])
def test_fused_layers_come_apart_and_together(nxd: Nxd, tmp_path: pathlib.Path, tp: int) -> None:
    peft = pytest.importorskip("peft")
    nxd(2, tp=tp)
    base = llama(attention_bias=True)
    model = fused(base, bias="lora_only")
    stir(model)
    want = fused_logits(model)
    peft_format.save_pretrained(model, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == sorted(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"])
    again = fused(base, bias="lora_only")
    peft_format.load_pretrained(again, tmp_path)
    for name, t in again.tensors().items():
        assert torch.equal(full(t), full(model.tensors()[name])), name
    torch.testing.assert_close(logits(peft.PeftModel.from_pretrained(base, tmp_path)), want, rtol=1e-4, atol=1e-5)


def test_whole_names_where_last_names_would_mean_others(nxd: Nxd) -> None:
    nxd(1)
    model = LoraModel(llama(layers=2), LoraConfig(lora_rank=2, target_modules=r".*1\.self_attn\.q_proj"))
    assert peft_format.to_peft(model)[0]["target_modules"] == ["model.layers.1.self_attn.q_proj"]


# -- in ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
def test_peft_loads_here(nxd: Nxd, tmp_path: pathlib.Path, tp: int) -> None:
    nxd(2, tp=tp)
    base = llama(attention_bias=True)
    sharded = parallel(base)
    model = theirs(base, **EVERY)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_" not in name:
                parameter.add_(0.25)
    model.save_pretrained(tmp_path)
    ours = get_lora_model(sharded, LoraConfig(load_lora_from_ckpt=True, lora_save_dir=str(tmp_path)))
    assert isinstance(ours, LoraModel) and (ours.lora_config.lora_rank, ours.lora_config.lora_alpha) == (2, 6)
    torch.testing.assert_close(logits(ours), logits(model), rtol=1e-4, atol=1e-5)
    ours.load_lora()
    torch.testing.assert_close(logits(ours), logits(model), rtol=1e-4, atol=1e-5)


def test_patterns_scalings_and_higher_ranks(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(2, tp=2)
    base = llama()
    sharded = parallel(base)
    model = theirs(
        base, target_modules=["q_proj", "down_proj"], rank_pattern={"down_proj": 5}, alpha_pattern={"q_proj": 3}, use_rslora=True
    )
    model.save_pretrained(tmp_path)
    ours = LoraModel(sharded, LoraConfig(load_lora_from_ckpt=True, lora_save_dir=str(tmp_path)))
    assert ours.lora_config.lora_rank == 5 and ours.lora_config.use_rslora
    torch.testing.assert_close(logits(ours), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rslora", [False, True])
def test_separate_adapters_are_stacked_in_fused_layers(nxd: Nxd, tmp_path: pathlib.Path, rslora: bool) -> None:
    nxd(2, tp=2)
    base = llama()
    plain = LlamaForCausalLM(base.config, NxDLlamaOptions())
    hf_weights.from_full(plain, base.state_dict())
    model = theirs(base, target_modules=["q_proj", "v_proj", "o_proj", "up_proj"], use_rslora=rslora)
    model.save_pretrained(tmp_path)
    config = LoraConfig(load_lora_from_ckpt=True, lora_save_dir=str(tmp_path))
    ours = LoraModel(plain.to("xla"), config)
    assert sorted(ours._layers) == sorted(f"model.layers.0.{n}" for n in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj"))
    assert ours.lora_config.lora_rank == 4
    torch.testing.assert_close(fused_logits(ours), logits(model), rtol=1e-4, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"qkv_proj has rank 2, but .* 2 adapters, whose ranks add up to one, of 4: use LoraConfig\(lora_rank=4\)"
    ):
        peft_format.load_pretrained(fused(llama()), tmp_path)


def test_convolutions(nxd: Nxd) -> None:
    peft = pytest.importorskip("peft")
    nxd(1)
    net = nn.Sequential(nn.Conv2d(3, 6, (3, 2), stride=2, padding=1))
    plain = nn.Sequential(nn.Conv2d(3, 6, (3, 2), stride=2, padding=1))
    plain.load_state_dict(net.state_dict())
    model = LoraModel(net, LoraConfig(lora_rank=2, target_modules=["0"]))
    stir(model)
    config, tensors = peft_format.to_peft(model)
    other = peft.get_peft_model(plain, peft.LoraConfig(r=2, lora_alpha=8, target_modules=["0"]))
    assert not peft.set_peft_model_state_dict(other, tensors).unexpected_keys
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(other(x), model(x), rtol=1e-4, atol=1e-5)
    before = model(x).detach()
    stir(model, 9)
    model.load_state_dict(peft_format.from_peft(model, config, tensors))
    torch.testing.assert_close(model(x), before)


def test_names_of_layers_can_be_given_and_tensors_changed(nxd: Nxd) -> None:
    nxd(2, tp=2)
    made = nn.ModuleDict(
        {"Wqkv": GQAQKVColumnParallelLinear(4, [8, 4], bias=False, fuse_qkv=False), "wide": ColumnParallelLinear(4, 8, stride=2)}
    )
    model = LoraModel(made.to("xla"), LoraConfig(lora_rank=2, target_modules=["Wqkv", "wide"]))
    stir(model)
    with pytest.raises(
        ValueError, match=r"Wqkv consists of 3 layers fused: say in fused=\{'Wqkv': \(...\)\} what Hugging Face's model calls them"
    ):
        peft_format.to_peft(model)
    names = {"Wqkv": ("a", "b", "c")}
    config, tensors = peft_format.to_peft(model, names, lambda name, t: t.flip(0) if ".a.lora_B" in name else t)
    assert config["target_modules"] == ["a", "b", "c", "wide"]
    assert tensors["base_model.model.wide.lora_B.weight"].shape == (8, 2) and tensors["base_model.model.c.lora_B.weight"].shape == (4, 2)
    assert torch.equal(tensors["base_model.model.a.lora_B.weight"].flip(0), full(model.tensors()["Wqkv.lora_B.weight_q"]))
    before = {n: full(t) for n, t in model.tensors().items()}
    stir(model, 9)
    model.load_state_dict(peft_format.from_peft(model, config, tensors, names, lambda name, t: t.flip(0) if ".a.lora_B" in name else t))
    assert all(torch.equal(full(t), before[n]) for n, t in model.tensors().items())


# -- what does not load --------------------------------------------------------------------------------


def test_errors(nxd: Nxd, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nxd(1)
    model = LoraModel(llama(), LoraConfig(lora_rank=2, target_modules=["q_proj"]))
    config, tensors = peft_format.to_peft(model)
    with pytest.raises(ValueError, match="of type 'IA3': only 'LORA' can be loaded"):
        peft_format.from_peft(model, config | {"peft_type": "IA3"}, tensors)
    with pytest.raises(ValueError, match="use use_dora, which LoRA layers here do not have: merge them in PEFT"):
        peft_format.config_from_peft(config | {"use_dora": True})
    with pytest.raises(ValueError, match="use alora_invocation_tokens, which LoRA layers here do not have"):
        peft_format.from_peft(model, config | {"alora_invocation_tokens": [1]}, tensors)
    with pytest.raises(
        ValueError, match="init_lora_weights='pissa', a start that changes the base model's weights, too, .* save them with PEFT's"
    ):
        peft_format.from_peft(model, config | {"init_lora_weights": "pissa"}, tensors)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    with pytest.raises(
        ValueError, match="no place, such as model.layers.0.self_attn.v_proj.lora_A.weight: its target_modules must cover theirs"
    ):
        peft_format.from_peft(model, config, tensors | {f"{name[:-6]}v_proj.lora_A.weight": torch.ones(2, 16)})
    with pytest.raises(
        ValueError, match="adapter of model.layers.0.self_attn.q_proj is incomplete: it needs lora_A.weight and lora_B.weight"
    ):
        peft_format.from_peft(model, config, {f"{name}.lora_A.weight": torch.ones(2, 16)})
    with pytest.raises(ValueError, match=r"has rank 2, but the PEFT adapter has a rank of 3: use LoraConfig\(lora_rank=3\)"):
        peft_format.from_peft(model, config, {f"{name}.lora_A.weight": torch.ones(3, 16), f"{name}.lora_B.weight": torch.ones(16, 3)})
    with pytest.raises(ValueError, match="lora_B of the PEFT adapter has 8 rows, the layer 16 outputs"):
        peft_format.from_peft(model, config, {f"{name}.lora_A.weight": torch.ones(2, 16), f"{name}.lora_B.weight": torch.ones(8, 2)})
    with pytest.raises(FileNotFoundError, match="adapter_model.safetensors: save adapters with PEFT's save_pretrained"):
        peft_format.load_pretrained(model, tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        peft_format.save_pretrained(model, tmp_path)


def test_parts_of_fused_biases(nxd: Nxd) -> None:
    nxd(1)
    made = nn.ModuleDict({"qkv_proj": GQAQKVColumnParallelLinear(4, [8, 4])})
    model = LoraModel(made.to("xla"), LoraConfig(lora_rank=2, target_modules=["qkv_proj"], bias="lora_only"))
    scatter_full(model.qkv_proj.bias_qkv, torch.arange(16.0))
    config, tensors = peft_format.to_peft(model)
    assert tensors["base_model.model.v_proj.base_layer.bias"].tolist() == [12.0, 13.0, 14.0, 15.0]
    assert torch.equal(peft_format.from_peft(model, config, tensors)["qkv_proj.bias_qkv"], torch.arange(16.0))
    del tensors["base_model.model.v_proj.base_layer.bias"]
    with pytest.raises(ValueError, match="bias of only some of q_proj, k_proj, v_proj, which are one layer here"):
        peft_format.from_peft(model, config, tensors)
