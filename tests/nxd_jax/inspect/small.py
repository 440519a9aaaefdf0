"""A small model with an embedding, equal blocks, dropout and a head, and steps of its training."""

from __future__ import annotations

import torch
import torch_xla
from torch import nn

from nxd_jax import inspect

WORDS, WIDTH, INNER, BATCH, LENGTH = 11, 8, 16, 2, 5


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks, dropout, head."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.drop(x))


def train(blocks: int = 2, steps: int = 2) -> tuple[tuple[nn.Module, torch.optim.Optimizer], inspect.Inspection]:
    """A model with its optimizer, and the last step. Inputs of the step are named after them as long as they live."""
    model = Model(blocks).to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        ids = torch.randint(0, WORDS, (BATCH, LENGTH)).to("xla")
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
    return (model, optimizer), inspect.look()
