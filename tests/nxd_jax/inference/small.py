"""Small models of transformers with random weights, eager on the CPU: what ours are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 259
"""No multiple of any number of ranks; the tests' tokenizer has 256."""
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_LLAMAS = ("intermediate_size", "num_key_value_heads", "head_dim")
_MORE: dict[str, dict[str, Any]] = {
    "gpt2": {"n_inner": 90},
    "llama": {},
    "mistral": {"sliding_window": 5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    "qwen2": {"tie_word_embeddings": True},
}


def model(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A model; biases are random, too."""
    torch.manual_seed(seed)
    sizes = {name: size for name, size in _SIZES.items() if kind != "gpt2" or name not in _LLAMAS}
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **_MORE[kind], **changes})
    config._attn_implementation = "eager"
    found = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in found.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    return found


def folder(place: Path, kind: str, seed: int = 0, **changes: Any) -> Any:
    """Write a model to a folder; returns it."""
    found = model(kind, seed, **changes)
    found.save_pretrained(place)
    return found


def logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """[tokens, vocabulary] of one text."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([list(ids)])).logits[0]
    return found


def answers(model: Any, prompts: Sequence[Sequence[int]], length: int, new: int | None = None, end: int = 1) -> list[list[int]]:
    """Greedy answers by transformers' `generate`, one prompt at a time, without the token that ends them."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        most = {"max_length": length} if new is None else {"max_new_tokens": new}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, eos_token_id=end, **most)
        answer = out[0, len(prompt) :].tolist()
        found.append(answer[: answer.index(end)] if end in answer else answer)
    return found


def prompts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    """Random token ids."""
    source = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (n,), generator=source).tolist() for n in lengths]
