"""A decoder of one layer with a cache, traced for prefill and decode, and the same in plain torch over whole sequences."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from nxd_jax.parallel_layers import layers, parallel_state
from nxd_jax.trace.functions import shard_checkpoint
from nxd_jax.trace.model_builder_v2 import ModelBuilder
from nxd_jax.trace.nxd_model import NxDModel
from nxd_jax.trace.parallel_context import NxDParallelState
from torch_bridge.aot import devices

VOCAB, WIDTH, HEADS, LENGTH, BATCH, PROMPT = 32, 16, 4, 12, 2, 3
HEAD = WIDTH // HEADS


class Decoder(nn.Module):
    """Attention over a cache that forward assigns anew; `calls` is updated in place and begins with 5."""

    def __init__(self) -> None:
        super().__init__()
        local = HEADS // parallel_state.get_tensor_model_parallel_size()
        self.embed = layers.ParallelEmbedding(VOCAB, WIDTH)
        for name in "qkv":
            setattr(self, name, layers.ColumnParallelLinear(WIDTH, WIDTH, gather_output=False, bias=False))
        self.o = layers.RowParallelLinear(WIDTH, WIDTH, input_is_parallel=True)
        self.head = layers.ColumnParallelLinear(WIDTH, VOCAB, gather_output=True, bias=False)
        self.register_buffer("cache_k", torch.zeros(BATCH, LENGTH, local, HEAD), persistent=False)
        self.register_buffer("cache_v", torch.zeros(BATCH, LENGTH, local, HEAD), persistent=False)
        self.register_buffer("calls", torch.full((1,), 5.0))

    def forward(self, ids: torch.Tensor, pos: torch.Tensor, scale: torch.Tensor | None = None) -> dict[str, Any]:
        x = self.embed(ids)
        q, k, v = (self._heads(layer(x)) for layer in (self.q, self.k, self.v))
        self.cache_k = torch.index_copy(self.cache_k, 1, pos, k)
        self.cache_v = torch.index_copy(self.cache_v, 1, pos, v)
        self.calls += 1
        scores = torch.einsum("bqhd,bkhd->bhqk", q, self.cache_k) / HEAD**0.5
        seen = torch.arange(LENGTH, device=ids.device)[None, :] <= pos[:, None]
        shares = torch.softmax(scores.masked_fill(~seen, -1e9), -1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", shares, self.cache_v).flatten(2)
        logits = self.head(x + self.o(mixed))
        return {"logits": logits if scale is None else logits * scale, "calls": self.calls}

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, HEAD)


@functools.cache
def full_weights() -> dict[str, torch.Tensor]:
    """The decoder's full state dict, but for `calls`."""
    g = torch.Generator().manual_seed(3)
    shapes = {"embed": (VOCAB, WIDTH), "q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "o": (WIDTH, WIDTH)}
    found = {f"{n}.weight": 0.5 * torch.randn(s, generator=g) for n, s in (shapes | {"head": (VOCAB, WIDTH)}).items()}
    return found | {"o.bias": torch.randn(WIDTH, generator=g)}


def reference(ids: torch.Tensor, w: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    """Logits of whole sequences [B, S], in plain torch."""
    w = w or full_weights()
    x = F.embedding(ids, w["embed.weight"])
    q, k, v = (F.linear(x, w[f"{n}.weight"]).unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for n in "qkv")
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    return F.linear(x + F.linear(mixed, w["o.weight"], w["o.bias"]), w["head.weight"])


def tokens(length: int = PROMPT + 8) -> torch.Tensor:
    return torch.randint(0, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(4))


@dataclasses.dataclass(frozen=True)
class Built:
    """A builder with the traces "prefill" and "decode", and each rank's weights."""

    tp: int
    builder: ModelBuilder
    weights: list[dict[str, torch.Tensor]]

    def model(self, form: str = "mesh", weights: list[dict[str, torch.Tensor]] | None = None, workdir: Any = None) -> NxDModel:
        """A new model, on a device for each rank or on one, ready to be called."""
        found = self.builder.compile(compiler_workdir=workdir)
        put_on(found, form)
        found.set_weights(weights or self.weights)
        found.to_neuron()
        return found


def put_on(model: NxDModel, form: str) -> None:
    """Where a model will be: on a device for each rank, or all ranks on one device."""
    import jax

    if form == "one":
        model._model._where = devices.Placement(model._model.ranks, "one", None, jax.devices()[0])


@functools.cache
def built(tp: int) -> Built:
    """Traced once for each number of ranks."""
    ids = tokens()
    with NxDParallelState(world_size=tp, tensor_model_parallel_size=tp):
        module = Decoder()
        builder = ModelBuilder(module).trace(args=(ids[:, :PROMPT], torch.arange(PROMPT)), tag="prefill")
        builder.trace(kwargs={"pos": torch.tensor([PROMPT]), "ids": ids[:, :1]}, tag="decode")
        return Built(tp, builder, shard_checkpoint(full_weights(), module))
