"""Kinds of layers, norms, activations and positions of Megatron GPT against plain torch: the masked loss and every gradient."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nxd_jax.tensor_parallel.full_weights import gather_full, scatter_full
from nxd_jax.training.models.megatron.gpt_model import GPTModel
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.training.models import megatron_cases
from tests.nxd_jax.training.models.megatron_cases import HEADS, SEQ, Case, State

SP = {"sequence_parallel": True}
ROPE = {"position_embedding_type": "rope"}
CASES = [
    Case("gpt2", 2, 2, options={"transformer_block_type": "gpt_j", **ROPE, "rotary_percentage": 0.5, "activation": "geglu", **SP}),
    Case("gpt2", 2, 2, options={"transformer_block_type": "post_ln", "normalization": "layernorm1p", **SP}),
    Case("gpt2", options={"transformer_block_type": "normformer", "activation": "reglu"}),
    Case("gpt2", options={"transformer_block_type": "normformer", "normalization": "rmsnorm", "fp32_residual_connection": True}),
    Case("gpt2", 2, 2, options={"transformer_block_type": "post_ln", "activation": "swiglu", "fp32_residual_connection": True}),
    Case("gpt2", 2, 2, options={"normalization": "layernorm1p", "activation": "reglu", **ROPE, "rotary_percentage": 0.25}),
    Case("gpt2", 2, 2, kv=2, options={**ROPE, "sliding_window": SEQ, "kv_channels": 4, **SP}),
]


def plain(w: State, o: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
    """Logits [batch, length, vocabulary] of full weights, one formula after the other."""
    block = o.get("transformer_block_type", "pre_ln")
    x = w["language_model.embedding.word_embeddings.weight"][ids]
    if o.get("position_embedding_type") != "rope":
        x = x + w["language_model.embedding.position_embeddings.weight"]
    for k in range(o["num_layers"]):
        layer = {name.split(".", 4)[4]: value for name, value in w.items() if name.startswith(f"language_model.encoder.layers.{k}.")}
        first, second = (functools.partial(normed, w=layer, name=n, o=o) for n in ("input_layernorm", "post_attention_layernorm"))
        if block == "post_ln":
            x = first(x + attention(x, layer, o))
            x = second(x + mlp(x, layer, o))
        elif block == "gpt_j":
            x = x + attention(first(x), layer, o) + mlp(second(x), layer, o)
        else:
            attended = attention(first(x), layer, o)
            x = x + (normed(attended, layer, "post_attention_normformer_norm", o) if block == "normformer" else attended)
            x = x + mlp(second(x), layer, o)
    if block != "post_ln":
        x = normed(x, {name.split(".", 2)[2]: v for name, v in w.items() if "final" in name}, "final_layernorm", o)
    return x @ w["language_model.embedding.word_embeddings.weight"].t()


def normed(x: torch.Tensor, w: State, name: str, o: dict[str, Any]) -> torch.Tensor:
    weight, kind = w[f"{name}.weight"], o.get("normalization", "layernorm")
    if kind == "rmsnorm":
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    scaled = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    return scaled * (weight + (kind == "layernorm1p")) + w[f"{name}.bias"]


def mlp(x: torch.Tensor, w: State, o: dict[str, Any]) -> torch.Tensor:
    act = {"gelu": F.gelu, "geglu": F.gelu, "reglu": F.relu, "swiglu": F.silu}[o.get("activation", "gelu")]
    y = x @ w["mlp.dense_h_to_4h.weight"].t() + w["mlp.dense_h_to_4h.bias"]
    y = act(y) if o.get("activation", "gelu") == "gelu" else act(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1]
    if o.get("transformer_block_type") == "normformer":
        y = normed(y, w, "mlp.normalization", o)
    return y @ w["mlp.dense_4h_to_h.weight"].t() + w["mlp.dense_4h_to_h.bias"]


def attention(x: torch.Tensor, w: State, o: dict[str, Any]) -> torch.Tensor:
    def projected(name: str, heads: int, parts: int) -> tuple[torch.Tensor, ...]:
        y = x @ w[f"self_attention.{name}.weight"].t() + w[f"self_attention.{name}.bias"]
        return y.unflatten(-1, (heads, parts, -1)).unbind(-2)

    if o["num_kv_heads"] == HEADS:
        q, k, v = projected("query_key_value", HEADS, 3)
    else:
        (q,), (k, v) = projected("query", HEADS, 1), projected("key_value", o["num_kv_heads"], 2)
    if o.get("position_embedding_type") == "rope":
        q, k = turned(q, o), turned(k, o)
    seen = torch.ones(SEQ, SEQ).tril().bool()
    out = []
    for head in range(HEADS):
        at = head * o["num_kv_heads"] // HEADS
        scores = (q[:, :, head] @ k[:, :, at].transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf"))
        out.append(scores.softmax(-1) @ v[:, :, at])
    return torch.cat(out, -1) @ w["self_attention.dense.weight"].t() + w["self_attention.dense.bias"]


def turned(x: torch.Tensor, o: dict[str, Any]) -> torch.Tensor:
    """Pairs (i, i + half) of the first values of each head, as complex numbers, times e^(i position frequency)."""
    size = int(x.shape[-1] * o.get("rotary_percentage", 1.0))
    half = size // 2
    frequencies = 10000.0 ** (-torch.arange(half) * 2 / size)
    angles = torch.arange(SEQ)[:, None, None] * frequencies
    product = torch.complex(x[..., :half], x[..., half:size]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([product.real, product.imag, x[..., size:]], -1)


@pytest.mark.thorough(keep=4)
@pytest.mark.core(keep=1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_plain_torch(case: Case, nxd: Nxd) -> None:
    nxd(case.world, tp=case.tp)
    options = megatron_cases.arguments(case)
    model = GPTModel(**options)
    weights: State = {}
    for name, parameter in model.named_parameters():
        full = gather_full(parameter)
        assert isinstance(full, torch.Tensor)
        weights[name] = (nn.init.normal_(full.clone(), std=0.1) + ("norm" in name)).requires_grad_()
        scatter_full(parameter, weights[name].detach())
    columns = megatron_cases.batch()
    ids, labels, mask = columns
    losses = F.cross_entropy(plain(weights, options, ids).flatten(0, 1), labels.flatten(), reduction="none")
    loss = (losses * mask.flatten()).sum() / mask.sum()
    loss.backward()
    model = model.to("xla")
    found = megatron_cases.step(model, bool(options.get("sequence_parallel")), *columns)
    torch.testing.assert_close(found, loss.item(), rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        grad = weights[name].grad
        assert grad is not None
        atol = 1e-6 + 1e-5 * grad.abs().max().item()
        torch.testing.assert_close(
            gather_full(parameter.grad, like=parameter), grad, rtol=2e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
