"""Small models for adapters: Hugging Face's Llama, the same with parallel layers, and losses while training."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import nn

from nxd_jax.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_jax.utils.full_weights import gather_full, scatter_full

VOCAB, SEQ, ROWS = 32, 8, 2
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ROW = ("o_proj", "down_proj")


def llama(seed: int = 0, layers: int = 1, **options: Any) -> transformers.LlamaForCausalLM:
    """An unsharded Llama on the CPU."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        attn_implementation="eager",
        **options,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2) if not name.endswith("norm.weight") else None
    return model


def parallel(model: transformers.LlamaForCausalLM) -> transformers.LlamaForCausalLM:
    """The same model on xla with its weights shared out among tensor parallel ranks: each has some of the heads."""
    model = copy.deepcopy(model)
    for path, module in list(model.named_modules()):
        parent, _, last = path.rpartition(".")
        new: Any = None
        if last == "embed_tokens":
            new = ParallelEmbedding(module.num_embeddings, module.embedding_dim)
        elif isinstance(module, nn.Linear):
            sizes = (module.in_features, module.out_features, module.bias is not None)
            new = (
                RowParallelLinear(*sizes, input_is_parallel=True)
                if last in ROW
                else ColumnParallelLinear(*sizes, gather_output=last == "lm_head")
            )
        if new is not None:
            for (_, own), (_, full) in zip(new.named_parameters(), module.named_parameters(), strict=True):
                scatter_full(own, full.detach())
            setattr(model.get_submodule(parent) if parent else model, last, new)
    return model.to("xla")


def batch(seed: int = 7) -> torch.Tensor:
    return torch.randint(0, VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(seed))


def losses(model: Any, steps: int, device: str, lr: float = 1e-2) -> list[float]:
    """Train what requires a gradient with AdamW."""
    ids = batch().to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    found = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def logits(model: Any) -> torch.Tensor:
    device = next(model.parameters()).device
    with torch.no_grad():
        return model(input_ids=batch().to(device)).logits.cpu()


def full(t: torch.Tensor) -> torch.Tensor:
    value = gather_full(t)
    return value if isinstance(value, torch.Tensor) else torch.cat(value)


def stir(model: Any, seed: int = 3) -> None:
    """Give adapters values as if they had been trained, the same for any number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.tensors().items():
        if ".lora_" in name:
            value = full(parameter)
            new = torch.randn(value.shape, generator=generator) * 0.2
            scatter_full(parameter, new)
