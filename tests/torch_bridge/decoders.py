"""Tiny decoders of transformers, with their default configurations but for their sizes."""

from __future__ import annotations

from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

WORDS = 32


def gpt2() -> nn.Module:
    config = GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"
    )
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, bos_token_id=0, eos_token_id=0
    )
    return LlamaForCausalLM(config)
