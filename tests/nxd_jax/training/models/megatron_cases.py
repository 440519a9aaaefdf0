"""Small models of transformers, and Megatron GPTs with the same weights: losses and every gradient side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
import torch_xla.core.xla_model as xm
import transformers
from torch import nn

from nxd_jax.parallel_layers import parallel_state
from nxd_jax.tensor_parallel import grads
from nxd_jax.tensor_parallel.full_weights import gather_full, scatter_full
from nxd_jax.training.models.megatron.gpt_model import GPTModel

VOCAB, SEQ, ROWS, HIDDEN, HEADS = 64, 16, 2, 32, 4
State = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """world, tp, ep: ranks. kv: K/V heads. options: arguments of GPTModel besides those of the kind. config: of transformers' configuration."""

    kind: str
    world: int = 1
    tp: int = 1
    ep: int = 1
    kv: int = HEADS
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        said = [f"{k}={v if isinstance(v, (int, float, str)) else '..'}" for k, v in (self.options | self.config).items()]
        return f"{self.kind}-{self.world}:tp{self.tp}-ep{self.ep}-kv{self.kv}-{'-'.join(said)}"


def reference(case: Case) -> Any:
    """The model of transformers, with biases and norms that are not what they begin with."""
    made = KINDS[case.kind].model(case)
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
        elif "norm" in name or ".ln_" in name:
            nn.init.normal_(parameter, mean=1.0, std=0.1)
        elif name.endswith("gate.weight"):
            nn.init.normal_(parameter, std=0.5)  # uneven
    return made


def ours(case: Case, weights: nn.Module) -> GPTModel:
    """Megatron GPT with the same weights, on the device."""
    made = GPTModel(**arguments(case))
    full = KINDS[case.kind].mapped(dict(weights.named_parameters()), case.kv)
    assert full.keys() == dict(made.named_parameters()).keys()
    for name, parameter in made.named_parameters():
        scatter_full(parameter, full[name].detach())
    found: GPTModel = made.to("xla")
    return found


def arguments(case: Case) -> dict[str, Any]:
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "max_position_embeddings": SEQ, "num_layers": 2, "num_attention_heads": HEADS}
    no_dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "ffn_dropout": 0.0}
    return {**sizes, "ffn_hidden_size": 64, "num_kv_heads": case.kv, **no_dropout, **KINDS[case.kind].arguments, **case.options}


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, labels, loss mask) of all data-parallel ranks; a mask leaves out some tokens."""
    ids = torch.randint(0, VOCAB, (parallel_state.get_data_parallel_size() * ROWS, SEQ + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), (torch.rand(len(ids), SEQ) < 0.7).float()


def expected(model: Any, ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, more: Callable[[Any], Any] = lambda _: 0.0) -> float:
    """The mean of each data-parallel rank's masked mean, with gradients. more: what a rank's loss has besides, of the model's output."""
    parts, total = len(ids) // ROWS, 0.0
    for some, target, counted in zip(ids.split(ROWS), labels.split(ROWS), mask.split(ROWS), strict=True):
        out = model(input_ids=some)
        losses = F.cross_entropy(out.logits.float().flatten(0, 1), target.flatten(), reduction="none")
        loss = ((losses * counted.flatten()).sum() / counted.sum() + more(out)) / parts
        loss.backward()
        total += float(loss.detach())
    return total


def step(model: nn.Module, sequence_parallel: bool, *columns: torch.Tensor) -> float:
    """Forward and backward of each data-parallel rank's own rows, gradients reduced; returns the mean loss."""
    dp, rank = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    ids, labels, mask = (x.to("xla")[rank * ROWS : (rank + 1) * ROWS] for x in columns)
    places = torch.arange(SEQ, device="xla").expand(ROWS, SEQ)
    loss = model(ids, places, labels, mask)
    loss.backward()
    if sequence_parallel:
        grads.allreduce_sequence_parallel_gradients(torch.optim.SGD(model.parameters(), lr=0.0))
    grads.average_over_data_parallel_ranks(model.parameters())
    return xm.all_reduce("sum", loss.detach(), 1 / dp, groups=parallel_state.get_data_parallel_group(as_list=True)).item()


def check_gradients(case: Case, model: nn.Module, want: nn.Module, rtol: float = 1e-4) -> None:
    """Every gradient is that of transformers' model."""
    wanted = KINDS[case.kind].mapped({name: p.grad for name, p in want.named_parameters()}, case.kv)
    for name, parameter in model.named_parameters():
        found, grad = gather_full(parameter.grad, like=parameter), wanted[name]
        scale = grad.abs().max().item()
        torch.testing.assert_close(found, grad, rtol=rtol, atol=1e-6 + 1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")


# -- names and rows of weights ---------------------------------------------------------------------------


def by_head(heads: int, *parts: torch.Tensor) -> torch.Tensor:
    """Rows of several projections, those of each head side by side."""
    return torch.cat([x.unflatten(0, (heads, -1)) for x in parts], dim=1).flatten(0, 1)


def of_gpt2(state: Mapping[str, torch.Tensor], kv: int) -> State:
    """A layer of transformers computes x W + b, Megatron's x W^T + b."""
    found: State = {}
    for name, value in state.items():
        turned = value.t() if name.split(".")[-2] in ("c_attn", "c_proj", "c_fc") and name.endswith("weight") else value
        if ".c_attn." in name:
            turned = by_head(HEADS, *turned.chunk(3))
        found[_renamed(name, GPT2_NAMES)] = turned
    return found


def of_llama(state: Mapping[str, torch.Tensor], kv: int) -> State:
    found: State = {}
    for name, value in state.items():
        layer, _, part = name.rpartition(".self_attn.") if ".self_attn." in name else name.rpartition(".mlp.")
        to = layer.replace("model.", "language_model.encoder.")
        if part in ("k_proj.weight", "v_proj.weight", "up_proj.weight"):
            continue
        if part == "q_proj.weight":
            q, k, v = (state[f"{layer}.self_attn.{letter}_proj.weight"] for letter in "qkv")
            if kv == HEADS:
                found[f"{to}.self_attention.query_key_value.weight"] = by_head(HEADS, q, k, v)
            else:
                found[f"{to}.self_attention.query.weight"] = q
                found[f"{to}.self_attention.key_value.weight"] = by_head(kv, k, v)
        elif part == "gate_proj.weight":
            found[f"{to}.mlp.dense_h_to_4h.weight"] = torch.cat([value, state[f"{layer}.mlp.up_proj.weight"]])
        elif ".experts." in name:
            found[_renamed(name, LLAMA_NAMES)] = value.transpose(1, 2)
        else:
            found[_renamed(name, LLAMA_NAMES)] = value
    return found


def _renamed(name: str, table: dict[str, str]) -> str:
    for old, new in table.items():
        name = name.replace(old, new)
    return name


GPT2_NAMES = {
    "transformer.wte.": "language_model.embedding.word_embeddings.",
    "transformer.wpe.": "language_model.embedding.position_embeddings.",
    "transformer.h.": "language_model.encoder.layers.",
    "transformer.ln_f.": "language_model.encoder.final_layernorm.",
    ".ln_1.": ".input_layernorm.",
    ".ln_2.": ".post_attention_layernorm.",
    ".attn.c_attn.": ".self_attention.query_key_value.",
    ".attn.c_proj.": ".self_attention.dense.",
    ".mlp.c_fc.": ".mlp.dense_h_to_4h.",
    ".mlp.c_proj.": ".mlp.dense_4h_to_h.",
}
LLAMA_NAMES = {
    "model.embed_tokens.": "language_model.embedding.word_embeddings.",
    "model.layers.": "language_model.encoder.layers.",
    "model.norm.": "language_model.encoder.final_layernorm.",
    "lm_head.": "language_model.output_layer.",
    ".self_attn.o_proj.": ".self_attention.dense.",
    ".mlp.down_proj.": ".mlp.dense_4h_to_h.",
    ".mlp.gate.": ".mlp.moe.router.linear_router.",
    ".mlp.experts.gate_up_proj": ".mlp.moe.expert_mlps.mlp_op.gate_up_proj.weight",
    ".mlp.experts.down_proj": ".mlp.moe.expert_mlps.mlp_op.down_proj.weight",
}


@dataclasses.dataclass(frozen=True)
class Kind:
    model: Callable[[Case], Any]
    mapped: Callable[[Mapping[str, Any], int], State]
    arguments: dict[str, Any]


def _gpt2(case: Case) -> Any:
    sizes = {"n_embd": HIDDEN, "n_head": HEADS, "n_layer": 2, "n_inner": 64, "n_positions": SEQ, "vocab_size": VOCAB}
    plain = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "activation_function": "gelu", "attn_implementation": "eager"}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **plain, **case.config}))


def _llama_like(model: Any, config: Any, case: Case, **more: Any) -> Any:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": VOCAB, "num_attention_heads": HEADS}
    plain = {"num_key_value_heads": case.kv, "pad_token_id": None, "rms_norm_eps": 1e-5, "attn_implementation": "eager"}
    return model(config(**{**sizes, **plain, "max_position_embeddings": SEQ, **more, **case.config}))


def _llama(case: Case) -> Any:
    return _llama_like(transformers.LlamaForCausalLM, transformers.LlamaConfig, case)


def _mistral(case: Case) -> Any:
    return _llama_like(transformers.MistralForCausalLM, transformers.MistralConfig, case, sliding_window=5)


def _every_second(case: Case) -> Any:
    """Mixtral whose first layer has an MLP: Megatron counts layers from 1."""
    made = _mixtral(case)
    mlp = transformers.models.llama.modeling_llama.LlamaMLP(transformers.LlamaConfig(hidden_size=HIDDEN, intermediate_size=64))
    for parameter in mlp.parameters():
        nn.init.normal_(parameter, std=0.02)
    made.model.layers[0].mlp = mlp
    return made


def _mixtral(case: Case) -> Any:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "sliding_window": None}
    return _llama_like(transformers.MixtralForCausalLM, transformers.MixtralConfig, case, **experts)


LLAMA = {
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False,
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_top_k": 2,
    "moe_capacity_factor": None,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}
KINDS = {
    "gpt2": Kind(_gpt2, of_gpt2, {}),
    "llama": Kind(_llama, of_llama, LLAMA),
    "mistral": Kind(_mistral, of_llama, {**LLAMA, "sliding_window": 5}),
    "mixtral": Kind(_mixtral, of_llama, {**LLAMA, **EXPERTS, "position_freq_base": 1e6}),
    "every second": Kind(_every_second, of_llama, {**LLAMA, **EXPERTS, "position_freq_base": 1e6, "moe_frequency": 2}),
}
