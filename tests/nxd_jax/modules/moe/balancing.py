"""A small language model on words of very unequal frequency, whose experts crowd unless something keeps them apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import neuronx_distributed as nxd_api
import torch
import torch_xla
from neuronx_distributed.modules.moe import ExpertMLPs, MoE, RouterTopK
from neuronx_distributed.modules.rms_norm import RMSNorm
from torch import nn

from nxd_jax.modules.moe import load

HIDDEN, WORDS, EXPERTS, SEQUENCE, ROWS, STEPS = 32, 256, 8, 32, 32, 100
RATE, LEARNING_RATE = 0.005, 0.001
COMMON = 2.0
"""What the embeddings of all words have in common, as hidden states of trained models do: every token looks alike to a router that has not learned yet."""


class Block(nn.Module):
    """Attention, then experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(HIDDEN) for _ in range(2))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        router = RouterTopK(EXPERTS, 2, HIDDEN, act_fn="sigmoid", balancing_bias=True)
        self.mlp = MoE(router, ExpertMLPs(EXPERTS, 2, HIDDEN, 64, "silu", True, 1.5, normalize_top_k_affinities=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        mixed: torch.Tensor = x + self.mlp(self.norms[1](x))[0]
        return mixed


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        nn.init.normal_(self.embedding.weight, mean=COMMON)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batches() -> Iterator[torch.Tensor]:
    """Sequences in which a word says much about the next one, and some words come much more often than others."""
    draw = torch.Generator().manual_seed(1)
    often = 1.0 / torch.arange(1, WORDS + 1)
    follows = torch.rand(WORDS, WORDS, generator=draw).pow(8) * often
    for _ in range(STEPS):
        rows = [torch.multinomial(often, ROWS, replacement=True, generator=draw)]
        for _ in range(SEQUENCE):
            rows.append(torch.multinomial(follows[rows[-1]], 1, generator=draw).squeeze(1))
        yield torch.stack(rows, 1)


def train(balanced: bool) -> tuple[load.LoadLog, list[float]]:
    """What experts got in each step, and losses."""
    torch.manual_seed(0)
    config = nxd_api.neuronx_distributed_config()
    model = nxd_api.initialize_parallel_model(config, Model)
    optimizer: Any = nxd_api.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=LEARNING_RATE)
    log = load.LoadLog(model)
    if balanced:
        load.ExpertBalancer(model, RATE).attach(optimizer)
    losses = []
    for rows in batches():
        loss = model(rows[:, :-1].to("xla"), rows[:, 1:].to("xla"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.step(by_layer=False)
        losses.append(loss.detach())
        torch_xla.sync()
    return log, [float(loss) for loss in losses]
