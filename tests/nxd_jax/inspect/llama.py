"""A small Llama and one training step of it, as a script on Trainium has it: what the tests of `nxd_jax.inspect` look into."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd
import torch
import torch_xla
from neuronx_distributed.utils.batch_utils import shift_labels
from transformers import LlamaConfig

sys.path.append(str(Path(__file__).parents[3] / "examples" / "llama"))
from modeling_llama_nxd import DecoderLayer, LlamaForCausalLM, NxDLlamaOptions


@dataclass(frozen=True)
class Job:
    """Sizes and layout of a training step. batch: sequences per data-parallel rank."""

    tp: int = 8
    layers: int = 2
    hidden: int = 64
    ffn: int = 128
    heads: int = 8
    kv_heads: int = 8
    vocabulary: int = 256
    seq: int = 32
    batch: int = 2
    sequence_parallel: bool = False
    zero1: bool = False
    checkpoints: bool = False
    dtype: torch.dtype = torch.bfloat16

    def build(self) -> tuple[Any, Any]:
        """Model and optimizer on xla."""
        config = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.seq,
            tie_word_embeddings=False,
        )
        nxd_config = nxd.neuronx_distributed_config(
            tensor_parallel_size=self.tp,
            optimizer_config={"zero_one_enabled": self.zero1, "grad_clipping": True, "max_grad_norm": 1.0},
            sequence_parallel=self.sequence_parallel,
            activation_checkpoint_config=DecoderLayer if self.checkpoints else None,
        )
        options = NxDLlamaOptions(sequence_parallel=self.sequence_parallel, dtype=self.dtype)
        model = nxd.initialize_parallel_model(nxd_config, lambda: LlamaForCausalLM(config, options))
        return model, nxd.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, model.parameters(), lr=3e-4)

    def step(self, model: Any, optimizer: Any, batch: int | None = None) -> None:
        """Forward, backward, optimizer, mark_step."""
        ids = torch.randint(self.vocabulary, (batch or self.batch, self.seq))
        inputs = {name: t.to("xla") for name, t in shift_labels({"input_ids": ids, "labels": ids}).items()}
        loss = model(**inputs)[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter on a tensor-parallel rank."""
        h, t = self.hidden, self.tp
        head = h // self.heads
        found: dict[str, tuple[int, ...]] = {
            "model.embed_tokens": (self.vocabulary // t, h),
            "lm_head": (self.vocabulary // t, h),
            "model.norm": (h,),
        }
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            found |= {
                f"{layer}.input_layernorm": (h,),
                f"{layer}.post_attention_layernorm": (h,),
                f"{layer}.self_attn.qkv_proj": ((self.heads + 2 * self.kv_heads) * head // t, h),
                f"{layer}.self_attn.o_proj": (h, self.heads * head // t),
                f"{layer}.mlp.gate_up_proj": (2 * self.ffn // t, h),
                f"{layer}.mlp.down_proj": (h, self.ffn // t),
            }
        return found
