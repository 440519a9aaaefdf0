"""Parts of Megatron GPT: names of weights, how they begin, what is refused, experts by Sinkhorn's algorithm, losses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nxd_jax.tensor_parallel.full_weights import gather_full
from nxd_jax.training.models.megatron.gpt_model import GPTModel, MaskedLoss
from nxd_jax.training.models.megatron.mlp import NeuronSwitchMLP
from nxd_jax.training.models.megatron.options import GPTOptions
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.training.models import megatron_cases
from tests.nxd_jax.training.models.megatron_cases import HIDDEN, SEQ, VOCAB, Case


def made(case: Case) -> GPTModel:
    return GPTModel(**megatron_cases.arguments(case))


LAYER = "language_model.encoder.layers.0."
ENDS = {"language_model.embedding.word_embeddings.weight": [VOCAB // 2, HIDDEN], "language_model.encoder.final_layernorm.weight": [HIDDEN]}
NORMS = {f"{LAYER}{name}_layernorm.weight": [HIDDEN] for name in ("input", "post_attention")}
NAMES: list[tuple[Case, dict[str, list[int]]]] = [
    (
        Case("gpt2", 2, 2),
        {
            **ENDS,
            "language_model.embedding.position_embeddings.weight": [SEQ, HIDDEN],
            "language_model.encoder.final_layernorm.bias": [HIDDEN],
            "language_model.output_layer.weight": [VOCAB // 2, HIDDEN],
            **NORMS,
            **{name.replace("weight", "bias"): shape for name, shape in NORMS.items()},
            f"{LAYER}self_attention.query_key_value.weight": [48, HIDDEN],
            f"{LAYER}self_attention.query_key_value.bias": [48],
            f"{LAYER}self_attention.dense.weight": [HIDDEN, 16],
            f"{LAYER}self_attention.dense.bias": [HIDDEN],
            f"{LAYER}mlp.dense_h_to_4h.weight": [32, HIDDEN],
            f"{LAYER}mlp.dense_h_to_4h.bias": [32],
            f"{LAYER}mlp.dense_4h_to_h.weight": [HIDDEN, 32],
            f"{LAYER}mlp.dense_4h_to_h.bias": [HIDDEN],
        },
    ),
    (
        Case("mixtral", 2, 2, kv=2),
        {
            **ENDS,
            "language_model.output_layer.weight": [VOCAB // 2, HIDDEN],
            **NORMS,
            f"{LAYER}self_attention.query.weight": [16, HIDDEN],
            f"{LAYER}self_attention.key_value.weight": [16, HIDDEN],
            f"{LAYER}self_attention.dense.weight": [HIDDEN, 16],
            f"{LAYER}mlp.moe.router.linear_router.weight": [4, HIDDEN],
            f"{LAYER}mlp.moe.expert_mlps.mlp_op.gate_up_proj.weight": [4, HIDDEN, 64],
            f"{LAYER}mlp.moe.expert_mlps.mlp_op.down_proj.weight": [4, 32, HIDDEN],
        },
    ),
    (
        Case("llama", 2, 2),
        {
            **ENDS,
            "language_model.output_layer.weight": [VOCAB // 2, HIDDEN],
            **NORMS,
            f"{LAYER}self_attention.query_key_value.weight": [48, HIDDEN],
            f"{LAYER}self_attention.dense.weight": [HIDDEN, 16],
            f"{LAYER}mlp.dense_h_to_4h.weight": [64, HIDDEN],
            f"{LAYER}mlp.dense_4h_to_h.weight": [HIDDEN, 32],
        },
    ),
]


@pytest.mark.parametrize(("case", "names"), NAMES, ids=lambda x: str(x)[:12])
def test_names_and_shapes_of_weights_are_the_originals(case: Case, names: dict[str, list[int]], nxd: Nxd) -> None:
    nxd(case.world, tp=case.tp)
    model = made(Case(**{**vars(case), "options": {"num_layers": 1}}))
    assert {name: list(value.shape) for name, value in model.to("xla").state_dict().items()} == names


def test_rotary_frequencies_are_where_checkpoints_have_them(nxd: Nxd) -> None:
    nxd(1)
    model = made(Case("llama", options={"rotary_percentage": 0.5, "position_interpolation_factor": 2.0}))
    buffers = {name: value for name, value in model.named_buffers() if "inv_freq" in name}
    assert list(buffers) == [f"language_model.encoder.layers.{k}.self_attention.core_attention.rotary_emb.inv_freq" for k in range(2)]
    want = 10000.0 ** -(np.arange(0, 4, 2) / 4) / 2.0
    np.testing.assert_allclose(next(iter(buffers.values())).numpy(), want, rtol=1e-6)
    missing, unexpected = model.load_state_dict({**model.state_dict(), **buffers}, strict=False)
    assert not missing and unexpected == list(buffers)  # the original's checkpoints have them


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral"])
def test_the_same_model_for_every_layout(kind: str, nxd: Nxd) -> None:
    found = []
    for world, tp, ep in ((1, 1, 1), (2, 2, 1), (4, 2, 2) if kind == "mixtral" else (4, 4, 1)):
        nxd(world, tp=tp, ep=ep)
        torch.manual_seed(3)
        model = made(Case(kind, options={"num_layers": 8, "init_method_std": 0.1}))
        found.append({name: gather_full(value) for name, value in model.to("xla").named_parameters()})
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]) and torch.equal(value, found[2][name]), name  # type: ignore[arg-type]
    spread = {name.rpartition("layers.0.")[2]: value.std().item() for name, value in found[0].items() if value.dim() > 1}  # type: ignore[union-attr]
    plain, scaled = 0.1, 0.1 / math.sqrt(2 * 8)
    wanted = {"self_attention.query_key_value.weight": plain, "self_attention.dense.weight": scaled}
    experts = ("moe.expert_mlps.mlp_op.gate_up_proj", "moe.expert_mlps.mlp_op.down_proj")
    first, last = experts if kind == "mixtral" else ("dense_h_to_4h", "dense_4h_to_h")
    wanted |= {f"mlp.{first}.weight": plain, f"mlp.{last}.weight": scaled}
    if kind == "gpt2":
        wanted["language_model.embedding.position_embeddings.weight"] = plain
    assert {name: spread[name] for name in wanted} == {name: pytest.approx(std, rel=0.1) for name, std in wanted.items()}
    nxd(1)
    unscaled = dict(made(Case("gpt2", options={"use_scaled_init_method": False})).named_parameters())
    assert unscaled[f"{LAYER}mlp.dense_4h_to_h.weight"].std().item() == pytest.approx(0.02, rel=0.1)


EXPERTS = {"num_moe_experts": 4, "bias": False, "activation": "swiglu"}
MISTAKES: list[tuple[int, dict[str, Any], str]] = [
    (1, {"activation": "relu"}, "activation='relu' must be one of gelu, geglu, reglu, swiglu"),
    (1, {"normalization": "batch"}, "normalization='batch' must be one of layernorm, layernorm1p, rmsnorm"),
    (1, {"transformer_block_type": "x"}, "transformer_block_type='x' must be one of pre_ln, post_ln, normformer, gpt_j"),
    (1, {"position_embedding_type": "alibi"}, "position_embedding_type='alibi' must be one of learned_absolute, rope"),
    (1, {**EXPERTS, "moe_routing_algorithm": "x"}, "moe.routing_algorithm='x' must be one of top_k, sinkhorn"),
    (1, {"num_attention_heads": 5, "num_kv_heads": 5}, "hidden_size=32 must be a multiple of num_attention_heads=5, or give kv_channels"),
    (1, {"num_kv_heads": 3}, "num_attention_heads=4 must be a multiple of num_kv_heads=3"),
    (4, {"num_kv_heads": 2}, "num_kv_heads=2 must be a multiple of tensor_model_parallel_size=4: Megatron models hold no copies"),
    (8, {}, "num_attention_heads=4 must be a multiple of tensor_model_parallel_size=8"),
    (4, {"ffn_hidden_size": 66}, "ffn_hidden_size=66 must be a multiple of tensor_model_parallel_size=4"),
    (4, {"vocab_size": 66}, "the padded vocabulary=66 must be a multiple of tensor_model_parallel_size=4"),
    (1, {"rotary_percentage": 0.4}, "rotary_percentage=0.4 must be above 0, at most 1, and turn an even number of each head's 8 values"),
    (1, {"sliding_window": 0}, "sliding_window_size=0 must be 1 or more, or null"),
    (2, {"transformer_block_type": "normformer"}, "normformer with tensor_model_parallel_size=2: .* set tensor_model_parallel_size to 1"),
    (1, {"num_moe_experts": 4}, "experts .* do not go with activation='gelu' .must be 'swiglu'., has_bias=True"),
    (1, {**EXPERTS, "moe_frequency": 3}, "model.moe.frequency=3 must be in 1..2, the number of layers"),
    (1, {**EXPERTS, "moe_top_k": 5}, "model.moe.top_k=5 must be in 1..4, the number of experts"),
    (1, {**EXPERTS, "moe_routing_algorithm": "sinkhorn", "moe_top_k": 2}, "sinkhorn chooses one expert for each token, got top_k=2"),
    (
        1,
        {"headscale": True},
        r"GPTModel\(headscale=True\) is not supported: heads have no scales of their own; leave it out, or give False",
    ),
    (1, {"moe_dropout": 0.1}, r"GPTModel\(moe_dropout=0.1\) is not supported: experts have no dropout"),
]


@pytest.mark.parametrize(("tp", "options", "text"), MISTAKES, ids=lambda x: x[:40] if isinstance(x, str) else "")
def test_mistakes(tp: int, options: dict[str, Any], text: str, nxd: Nxd) -> None:
    nxd(tp, tp=tp)
    with pytest.raises(ValueError, match=text):
        made(Case("gpt2", options=options))


def test_arguments_of_the_original(nxd: Nxd) -> None:
    nxd(1)
    accepted = {"use_cpu_initialization": True, "persist_layer_norm": True, "precision": 32, "num_tokentypes": 0}
    assert made(Case("gpt2", options=accepted)).options == made(Case("gpt2")).options
    with pytest.raises(TypeError, match="GPTModel has no argument dropout, layers"):
        made(Case("gpt2", options={"layers": 3, "dropout": 0.1}))
    assert made(Case("gpt2")).position_embeddings_weight().shape == (SEQ, HIDDEN)


def test_losses(nxd: Nxd) -> None:
    nxd(1)
    model = made(Case("gpt2", options={"save_logits": True})).to("xla")
    ids, labels, mask = (x.to("xla") for x in megatron_cases.batch())
    places = torch.arange(SEQ, device="xla").expand_as(ids)
    loss, logits = model(ids, places, labels, mask)
    assert logits.shape == (2, SEQ, VOCAB) and torch.equal(model(ids, places).cpu(), logits.cpu())
    losses = nn.functional.cross_entropy(logits.cpu().flatten(0, 1), labels.cpu().flatten(), reduction="none")
    torch.testing.assert_close(loss.cpu(), (losses * mask.cpu().flatten()).sum() / mask.cpu().sum())
    torch.testing.assert_close(model(ids, places, labels)[0].cpu(), losses.mean())
    assert MaskedLoss()(logits, labels, torch.zeros_like(mask)).item() == 0.0


def test_experts_by_sinkhorn(nxd: Nxd) -> None:
    """One expert for each token, so that all are about equally busy; weighted by the sigmoid of its logit."""
    nxd(1)
    options = {**megatron_cases.LLAMA, **megatron_cases.EXPERTS, "moe_top_k": 1, "normalize_top_k_affinities": False}
    more = {"moe_routing_algorithm": "sinkhorn", "moe_sinkhorn_iterations": 50, "moe_router_activation": "sigmoid"}
    layer = NeuronSwitchMLP(GPTOptions.of(megatron_cases.arguments(Case("llama", options={**options, **more, "init_method_std": 0.3}))))
    nn.init.normal_(layer.moe.router.linear_router.weight, std=1.0)  # type: ignore[union-attr, arg-type]
    x = torch.randn(SEQ, 2, HIDDEN)
    weights = {name: value.detach().numpy() for name, value in layer.named_parameters()}
    gate_up, down = (next(v for k, v in weights.items() if part in k) for part in ("gate_up_proj", "down_proj"))
    tokens = x.flatten(0, 1).numpy()
    logits = tokens @ weights["moe.router.linear_router.weight"].T
    cost = np.exp(logits)
    for _ in range(50):
        cost /= cost.sum(1, keepdims=True) * len(cost)
        cost /= cost.sum(0, keepdims=True) * cost.shape[1]
    want = np.zeros_like(tokens)
    for t, e in enumerate(cost.argmax(1)):
        gate, up = np.split(tokens[t] @ gate_up[e], 2)
        want[t] = (gate / (1 + np.exp(-gate)) * up) @ down[e] / (1 + np.exp(-logits[t, e]))
    assert (cost.argmax(1) != logits.argmax(1)).any()
    out, found = layer.to("xla").train()(x.to("xla"))
    np.testing.assert_allclose(found.detach().cpu().numpy(), logits, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out.detach().cpu().flatten(0, 1).numpy(), want, rtol=1e-3, atol=1e-4)
