"""Modules of Hugging Face's configurations: what they read, what they refuse, and steps that are those of transformers' model with the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd
import pytest
import torch
import transformers

from nxd_jax.tensor_parallel import grads
from nxd_jax.training.lightning_modules.model.hf_models.base_model import BaseHfModel, reduce_dtype
from nxd_jax.training.lightning_modules.model.hf_models.llama_model import CoreAttention, HFLLamaModule, LlamaDecoderLayer, LlamaMLP
from nxd_jax.training.lightning_modules.model.hf_models.mixtral_model import HFMixtralModule
from nxd_jax.training.models.hf_models import hf_weights
from nxd_jax.training.models.hf_models.rotary import theta_of
from nxd_jax.utils.activation_checkpoint import NxDCheckpointWrapper
from tests.nxd_jax.training import small
from tests.nxd_jax.training.lightning_modules import hf_jobs
from tests.nxd_jax.training.lightning_modules.hf_jobs import CP, DEVICES, EP, MOE, PP, SP, TP, VPP
from tests.nxd_jax.training.lightning_modules.own_modules import OfUpstream
from tests.nxd_jax.training.models import cases

FOUR = "model.num_layers=4"
RECOMPUTE = "model.activations_checkpoint_granularity=selective", "model.activations_checkpoint_recompute="
DROPLESS = "model.moe.dropless=True"
CASES: list[tuple[Any, tuple[str, ...], dict[str, Any]]] = [
    (HFLLamaModule, (f"{DEVICES}=4", f"{TP}=2", f"{PP}=2", SP), {"attention_bias": True}),
    (HFLLamaModule, (f"{DEVICES}=2", f"{PP}=2", f"{VPP}=2", FOUR), {}),
    (HFLLamaModule, (f"{DEVICES}=2", f"{CP}=2", "model.fusions.ring_attention=True", "data.micro_batch_size=1"), {}),
    (
        HFLLamaModule,
        (f"{DEVICES}=2", f"{PP}=2", "model.num_layers=3", "model.pipeline_cuts=[model.layers.0]"),
        {"tie_word_embeddings": True},
    ),
    (HFMixtralModule, (f"{DEVICES}=4", f"{EP}=2", f"{PP}=2", DROPLESS), MOE),
    (HFLLamaModule, (RECOMPUTE[0], f"{RECOMPUTE[1]}[LlamaRMSNorm,LlamaMLP,ActivationMultiplyMLP,LlamaRotaryEmbedding]"), {}),
    (HFLLamaModule, ("model.activations_checkpoint_granularity=full", "model.fusions.flash_attention=True"), {}),
    (
        HFMixtralModule,
        (f"{DEVICES}=2", f"{TP}=2", SP, "model.moe.capacity_factor=null", RECOMPUTE[0], f"{RECOMPUTE[1]}[MoE,CoreAttention]"),
        MOE,
    ),
    (HFMixtralModule, (f"{DEVICES}=2", f"{PP}=2", "model.moe.frequency=2", "model.moe.capacity_factor=2.0"), {**MOE, "sliding_window": 3}),
]


def transformers_model(module: Any) -> Any:
    """transformers' model of the same configuration, with the weights of the module's."""
    llama = isinstance(module, HFLLamaModule)
    config = module.model_config
    if not llama:
        config.router_aux_loss_coef /= config.num_experts_per_tok
    config._attn_implementation = "eager"
    found = (transformers.LlamaForCausalLM if llama else transformers.MixtralForCausalLM)(config)
    missing, unexpected = found.load_state_dict(hf_weights.to_hf_weights(inner(module)), strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    return found


def inner(module: Any) -> Any:
    """The model itself."""
    found = module.model
    while not hasattr(found, "lm_head"):
        found = found.original_torch_module if hasattr(found, "original_torch_module") else found.module
    return found


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(("kind", "changes", "sizes"), CASES, ids=lambda x: "-".join(x) if isinstance(x, tuple) else "")
def test_a_step_equals_transformers(
    kind: Any, changes: tuple[str, ...], sizes: dict[str, Any], ranks: None, variables: None, tmp_path: Path
) -> None:
    loss, module = hf_jobs.stepped(tmp_path, *changes, module=kind, sizes=sizes)
    parameters = list(module.model.parameters())
    if SP in changes:
        grads.allreduce_sequence_parallel_gradients(torch.optim.SGD(parameters))
    if f"{CP}=2" in changes:
        grads.allreduce_context_parallel_gradients(torch.optim.SGD(parameters))
    grads.average_over_data_parallel_ranks(parameters)
    if "frequency" in str(changes):
        assert "mlp.gate_up_proj.weight" in str(inner(module).state_dict().keys())
        return
    want = transformers_model(module)
    ids = hf_jobs.rows()
    total = 0.0
    for part in ids.split(len(ids) // 2):
        found = (
            want(input_ids=part, labels=part, output_router_logits=True) if kind is HFMixtralModule else want(input_ids=part, labels=part)
        )
        (found.loss / 2).backward()
        total += found.loss.item() / 2
    torch.testing.assert_close(loss, total, rtol=1e-5, atol=1e-5)
    cases.check_gradients(inner(module), want, rtol=2e-4)


class WithBuffers(HFLLamaModule):
    """A user's module that makes buffers on the meta device, too, as upstream's does."""

    def _get_model(self) -> Any:
        assert self.nxd_config is not None
        self.nxd_config["pipeline_config"].update(
            transformer_layer_cls=LlamaDecoderLayer,
            output_loss_value_spec=(True, False),
            input_names=["input_ids", "attention_mask", "labels"],
        )
        return nxd.initialize_parallel_model(self.nxd_config, self.model_provider_func, True, self.model_config)


@pytest.mark.parametrize("kind", [WithBuffers, HFMixtralModule])
def test_the_same_model_in_a_pipeline(kind: Any, ranks: None, variables: None, tmp_path: Path) -> None:
    sizes = {**(MOE if kind is HFMixtralModule else {}), "tie_word_embeddings": kind is WithBuffers}
    found = []
    for changes in ((), (f"{DEVICES}=4", f"{TP}=2", f"{PP}=2", SP)):
        module = hf_jobs.made(hf_jobs.config(tmp_path, *changes, sizes=sizes), kind)
        found.append(hf_weights.to_hf_weights(inner(module)))
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name
    frequencies = [m.inv_freq for m in inner(module).modules() if hasattr(m, "inv_freq")]
    assert len(frequencies) == 2 and all(f.device.type == "xla" for f in frequencies)


def test_what_a_configuration_says(ranks: None, variables: None, tmp_path: Path) -> None:
    cfg = hf_jobs.config(
        tmp_path,
        *("model.num_layers=3", "model.hidden_size=64", "model.rope_theta=5e5", "model.max_position_embeddings=8", "model.qkv_linear=True"),
        *("distributed_strategy.kv_replicator=2", "precision.type=mixed_precision", "precision.parallel_layers_reduce_dtype=fp32"),
        *("model.activations_checkpoint_granularity=selective", "model.activations_checkpoint_recompute=[CoreAttention,LlamaMLP]"),
        sizes={"head_dim": 8},
    )
    module = hf_jobs.module_of(cfg)
    found = module.model_config
    assert (found.num_hidden_layers, found.hidden_size, found.head_dim, found.max_position_embeddings) == (3, 64, 16, 8)
    assert (theta_of(found), found.kv_shared_group_size, found.qkv_linear, found.fuse_qkv) == (5e5, 2, True, True)
    assert (found.reduce_dtype, found.params_dtype, found.use_cache) == ("float64", "float32", False)
    assert module._recomputed() == (CoreAttention, LlamaMLP)
    cfg.precision = {"type": "autocast"}
    cfg.model.activations_checkpoint_granularity = "full"
    module = hf_jobs.module_of(cfg)
    assert (module.model_config.reduce_dtype, module.model_config.params_dtype) == ("bfloat16", "bfloat16")
    assert module._recomputed() is LlamaDecoderLayer
    cfg.precision = {"type": "fp32"}
    assert reduce_dtype(cfg) is torch.float32
    kept = hf_jobs.module_of(hf_jobs.config(tmp_path, "model.hidden_size=-1", "model.fusions.flash_attention=True", sizes={"head_dim": 16}))
    assert kept.model_config.head_dim == 16 and kept._recomputed() is None


def test_what_a_configuration_says_of_experts(ranks: None, variables: None, tmp_path: Path) -> None:
    changes = (
        "model.moe.num_experts=6",
        "model.moe.top_k=1",
        "model.moe.dropless=True",
        "model.max_position_embeddings=8",
        "model.moe.dropout=0.1",
    )
    found = hf_jobs.module_of(hf_jobs.config(tmp_path, *changes, sizes=MOE), HFMixtralModule).model_config
    assert (found.num_local_experts, found.num_experts_per_tok, found.capacity_factor, found.normalize_top_k_affinities) == (
        6,
        1,
        0.0,
        False,
    )
    assert (found.max_position_embeddings, found.router_aux_loss_coef, found.moe_frequency, found.attention_dropout) == (64, 0.02, 1, 0.1)
    module = hf_jobs.module_of(hf_jobs.config(tmp_path, "model.moe.output_router_logits=False", sizes=MOE), HFMixtralModule)
    assert (module.model_config.capacity_factor, module.output_loss_value_spec) == (1.0, (True, False))
    whole = hf_jobs.config(tmp_path, "model.moe.top_k=2", sizes=MOE)
    whole.model.moe.capacity_factor = None  # (q) the original compares it with a number
    assert hf_jobs.module_of(whole, HFMixtralModule).model_config.capacity_factor is None


NO_CONFIG = r"no config.json of Hugging Face, and no folder with one"
MISTAKES: list[tuple[Any, tuple[str, ...], dict[str, Any], str]] = [
    (HFLLamaModule, ("model.model_config=nowhere",), {}, f"model.model_config: 'nowhere' is {NO_CONFIG}"),
    (HFLLamaModule, ("model.model_config=null",), {}, "model.model_config is missing"),
    (HFLLamaModule, (), MOE, "has model_type 'mixtral', and LlamaConfig takes llama, mistral; name: must have mixtral in it for Mixtral"),
    (HFLLamaModule, ("model.hidden_size=30",), {}, "model.hidden_size=30 must be a multiple of the 4 attention heads"),
    (HFLLamaModule, ("model.fusions.flash_attention=True", "model.fusions.ring_attention=True"), {}, "are both True: ring attention"),
    (HFLLamaModule, (f"{DEVICES}=2", f"{CP}=2"), {}, "context_parallel_size=2 needs model.fusions.ring_attention=True"),
    (HFLLamaModule, ("model.activations_checkpoint_granularity=some",), {}, "'some' must be null, selective or full"),
    (
        HFLLamaModule,
        (RECOMPUTE[0], f"{RECOMPUTE[1]}[CoreAttention,MLP]"),
        {},
        "unknown MLP; it takes CoreAttention, LlamaDecoderLayer, LlamaRMSNorm, LlamaMLP, ActivationMultiplyMLP, LlamaRotaryEmbedding",
    ),
    (
        HFMixtralModule,
        (DROPLESS,),
        {**MOE, "hidden_act": "gelu"},
        "model.moe.dropless=True needs hidden_act silu in config.json, got 'gelu'",
    ),
    (HFMixtralModule, ("model.moe.capacity_factor=0.0",), MOE, "capacity_factor=0.0 with dropless=False"),
    (HFMixtralModule, ("model.moe.glu_mlp=False",), MOE, "model.moe.glu_mlp=False: Mixtral's experts are gated"),
    (HFMixtralModule, ("model.moe.routing_algorithm=sinkhorn",), MOE, "routing_algorithm='sinkhorn': Mixtral's router takes the best"),
    (HFMixtralModule, ("model.moe.frequency=0",), MOE, "model.moe.frequency=0 must be 1 or more"),
    (HFMixtralModule, ("model.moe.top_k=5",), MOE, r"model.moe.top_k=5 must be in 1..4, the number of experts"),
]


@pytest.mark.parametrize(("kind", "changes", "sizes", "text"), MISTAKES, ids=lambda x: x[:40] if isinstance(x, str) else "")
def test_mistakes(
    kind: Any, changes: tuple[str, ...], sizes: dict[str, Any], text: str, ranks: None, variables: None, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=text):
        hf_jobs.module_of(hf_jobs.config(tmp_path, *changes, sizes=sizes), kind)


def test_a_folder_with_config_json(ranks: None, variables: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = hf_jobs.config(tmp_path)
    monkeypatch.setenv("MODELS", str(tmp_path))
    for path in ("$MODELS", str(tmp_path), "$MODELS/config.json"):
        cfg.model.model_config = path
        assert hf_jobs.module_of(cfg).model_config.vocab_size == json.loads((tmp_path / "config.json").read_text())["vocab_size"]


def test_batches_and_weight_decay(ranks: None, variables: None, tmp_path: Path) -> None:
    cfg = hf_jobs.config(tmp_path, "model.num_layers=1", "model.optim.weight_decay=0.3", sizes={"attention_bias": True})
    module = hf_jobs.made(cfg)
    ids = hf_jobs.rows()
    batch = module.process_global_batch({"input_ids": ids, "labels": ids, "text": ["a"] * len(ids)})
    assert (
        list(batch) == ["input_ids", "attention_mask", "labels"]
        and batch["attention_mask"].all()
        and module.get_batch_length(batch) == len(ids)
    )
    with pytest.raises(ValueError, match=r"sequences of 7 tokens, and model.encoder_seq_length is 8: set it to 7"):
        module.process_global_batch({"input_ids": ids[:, :7], "labels": ids[:, :7]})

    assert any(isinstance(m, NxDCheckpointWrapper) for m in inner(module).modules())
    names = {id(p): name for name, p in inner(module).named_parameters()}
    for decays_norms in (False, True):
        cfg.model.do_layer_norm_weight_decay = decays_norms
        module.setup_optimizer_param_groups()
        groups = {group["weight_decay"]: {names[id(p)] for p in group["params"]} for group in module._optimizer_param_groups}
        assert groups.keys() == {0.3, 0.0} and groups[0.3] | groups[0.0] == set(names.values())
        spared = ("bias",) if decays_norms else ("bias", "norm")
        assert groups[0.0] == {name for name in names.values() if any(part in name for part in spared)}


def test_a_module_of_its_own_model() -> None:
    """Without `model_config`, with and without a pipeline: it trains as the same model does that is made in `build_model`."""
    wanted = [seen["loss"] for seen in small.train("trainer.max_steps=2")[1].seen]
    for changes in ((), ("trainer.devices=2", "distributed_strategy.pipeline_model_parallel_size=2")):
        _, module = small.train("trainer.max_steps=2", *changes, module=OfUpstream)
        assert [seen["loss"] for seen in module.seen] == pytest.approx(wanted, rel=1e-5)
        assert module.flops_per_token() is None


def test_a_module_without_a_model() -> None:
    with pytest.raises(NotImplementedError, match=r"Nothing must override _get_model\(\).*or set config_class and layer_class"):

        class Nothing(BaseHfModel):
            pass

        small.train(module=Nothing)
    no_layer: Any = object.__new__(type("NoLayer", (BaseHfModel,), {"config_class": transformers.LlamaConfig}))
    with pytest.raises(NotImplementedError, match="NoLayer has a config_class and no layer_class"):
        no_layer._recomputed()
