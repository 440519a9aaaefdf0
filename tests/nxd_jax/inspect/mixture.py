"""A small model of examples/moe and one training step of it, and what it does on a core by arithmetic."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd
import torch
import torch_xla
from neuronx_distributed.utils.batch_utils import shift_labels
from transformers import Glm4MoeConfig, MixtralConfig

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "moe"))
from modeling_moe_nxd import DeepseekForCausalLM, ExpertDecoderLayer, MixtralForCausalLM, NxDMoEOptions


@dataclass(frozen=True)
class Job:
    """Sizes and layout of a training step. batch: sequences per data-parallel rank. dense: layers without experts; with it, there are shared experts, too."""

    tp: int = 4
    ep: int = 1
    layers: int = 2
    hidden: int = 64
    ffn: int = 48
    experts: int = 8
    heads: int = 8
    vocabulary: int = 256
    seq: int = 32
    batch: int = 2
    sequence_parallel: bool = False
    zero1: bool = False
    factor: float | None = None
    dense: int | None = None
    dtype: torch.dtype = torch.float32
    checkpoints: bool = False

    def model(self) -> Any:
        """On the CPU."""
        sizes: dict[str, Any] = dict(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.seq,
            tie_word_embeddings=False,
            pad_token_id=None,
        )
        options = NxDMoEOptions(sequence_parallel=self.sequence_parallel, dtype=self.dtype, capacity_factor=self.factor, balance="none")
        if self.dense is None:
            return MixtralForCausalLM(MixtralConfig(**sizes, intermediate_size=self.ffn, num_local_experts=self.experts), options)
        config = Glm4MoeConfig(
            **sizes,
            head_dim=self.hidden // self.heads,
            intermediate_size=2 * self.ffn,
            moe_intermediate_size=self.ffn,
            n_routed_experts=self.experts,
            num_experts_per_tok=2,
            n_shared_experts=1,
            first_k_dense_replace=self.dense,
            num_mtp_layers=0,
        )
        return DeepseekForCausalLM(config, options)

    def config(self) -> dict[str, Any]:
        """NxD's configuration."""
        return nxd.neuronx_distributed_config(
            tensor_parallel_size=self.tp,
            expert_parallel_size=self.ep,
            optimizer_config={"zero_one_enabled": self.zero1, "grad_clipping": True, "max_grad_norm": 1.0},
            sequence_parallel=self.sequence_parallel,
            activation_checkpoint_config=ExpertDecoderLayer if self.checkpoints else None,
        )

    def build(self) -> tuple[Any, Any]:
        """Model and optimizer on xla."""
        config = self.config()
        model = nxd.initialize_parallel_model(config, self.model)
        return model, nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=3e-4)

    def step(self, model: Any, optimizer: Any) -> None:
        """Forward, backward, optimizer, mark_step."""
        ids = torch.randint(self.vocabulary, (self.batch, self.seq))
        inputs = {name: t.to("xla") for name, t in shift_labels({"input_ids": ids, "labels": ids}).items()}
        loss = model(**inputs)[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
