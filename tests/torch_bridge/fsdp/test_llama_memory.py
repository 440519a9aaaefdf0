"""transformers' Llama on 32 devices: parameters, gradients and optimizer state take what arithmetic says on each, and losses are those of one device."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP
from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel as FSDPv2
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import torch_bridge.device.startup  # noqa: F401
from torch_bridge.mesh import spmd, world
from torch_bridge.recorder import sharded

RANKS = 32
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
POLICY = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})


@pytest.fixture
def devices() -> Iterator[None]:
    world.configure(world.World(RANKS))
    yield
    if spmd.active():
        spmd.stop()
        xs.meshes._GLOBAL.clear()
    world.configure(None)


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False))  # type: ignore[arg-type]


def ranks(model: nn.Module, batches: torch.Tensor) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Among ranks: each with its own row of the batch. Parts are not padded to 128 entries, which is a lot of a small model."""
    return (
        FSDP(model, auto_wrap_policy=POLICY, flatten_parameters=True, disable_reshard_on_root=False, _shard_size_multiple=1),
        lambda: sharded.from_ranks(lambda rank: batches[rank : rank + 1], ("dp",)),
    )


def annotated(model: nn.Module, batches: torch.Tensor) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """By annotations: all rows in one batch."""
    xr.use_spmd()
    mesh = xs.Mesh(range(RANKS), (RANKS, 1), ("fsdp", "model"))
    xs.set_global_mesh(mesh)

    def batch() -> torch.Tensor:
        made = batches.to("xla")
        xs.mark_sharding(made, mesh, ("fsdp", None))
        return made

    return FSDPv2(model, auto_wrap_policy=POLICY, shard_output=lambda out, on: _logits(out, on)), batch


def _logits(out: Any, mesh: xs.Mesh) -> None:
    """As transformers' own: of layers the tensor, of the model its logits."""
    xs.mark_sharding(out if isinstance(out, torch.Tensor) else out.logits, mesh, ("fsdp", None, None))


def bytes_on_a_device(tensors: list[torch.Tensor]) -> int:
    """Of the arrays of these tensors."""
    found = 0
    for t in tensors:
        array: Any = t._storage.array  # type: ignore[attr-defined]
        found += array.addressable_shards[0].data.nbytes
    return found


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("divide", [ranks, annotated])
def test_memory_of_a_core(divide: Any, devices: None) -> None:
    reference = llama()
    batches = torch.randint(0, 256, (RANKS, 8), generator=torch.Generator().manual_seed(0))
    model, batch = divide(copy.deepcopy(reference), batches)
    losses = []
    for m, given in ((reference, lambda: batches), (model, batch)):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            ids = given()
            logits = m(ids).logits
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            torch_xla.sync()
            losses.append(sum(t.item() for t in sharded.shards(loss.detach())) / RANKS if divide is ranks and m is model else loss.item())
    assert losses[2:] == pytest.approx(losses[:2], rel=1e-4)
    params = list(model.parameters())
    states = [optimizer.state[p][key] for p in params for key in ("exp_avg", "exp_avg_sq")]
    numbers = sum(p.numel() for p in reference.parameters())
    expected = numbers * 4 / RANKS
    assert bytes_on_a_device(params) == pytest.approx(expected, rel=0.05)
    assert bytes_on_a_device([p.grad for p in params if p.grad is not None]) == pytest.approx(expected, rel=0.05)
    assert bytes_on_a_device(states) == pytest.approx(2 * expected, rel=0.05)
