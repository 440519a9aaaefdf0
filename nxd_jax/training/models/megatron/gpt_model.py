"""`neuronx_distributed_training.models.megatron.gpt_model`: Megatron's GPT, with the choices that make it Llama, Mistral or Mixtral."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nxd_jax.tensor_parallel.casting import wide_dtype
from nxd_jax.tensor_parallel.cross_entropy import parallel_cross_entropy
from nxd_jax.training.models.hf_models.modeling_mixtral import BalanceLoss
from nxd_jax.training.models.megatron.language_model import TransformerLanguageModel
from nxd_jax.training.models.megatron.module import MegatronModule
from nxd_jax.training.models.megatron.options import GPTOptions

__all__ = ["GPTModel", "MaskedLoss"]


class MaskedLoss(nn.Module):
    """sum(loss * mask) / sum(mask) of logits [batch, length, vocabulary / tp], labels [batch, length] and a mask [batch, length]; 0 if the mask is."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
        losses = parallel_cross_entropy(logits.to(wide_dtype()), labels)
        mask = loss_mask.to(losses.dtype)
        total = mask.sum()
        return (losses * mask).sum() / torch.where(total > 0, total, torch.ones_like(total))


class GPTModel(MegatronModule):
    """`GPTModel(vocab_size=..., hidden_size=..., ...)`: arguments are the fields of `options.GPTOptions`, and others that have no effect.

    forward(input_ids, position_ids, labels, loss_mask, attention_mask), each [batch, length] (attention_mask is ignored: attention is causal), returns the
    mean loss over the tokens of the mask, with save_logits (loss, logits [batch, length, vocabulary / tp]); without labels the logits. labels: the next
    tokens. With experts and output_router_logits the loss has router_aux_loss_coef times `BalanceLoss` of this rank's tokens in it.

    Raises TypeError for unknown arguments, ValueError for those that are not supported or do not go together.
    """

    def __init__(self, **arguments: Any):
        options = GPTOptions.of(arguments)
        super().__init__(options.share_embeddings_and_output_weights)
        self.options = options
        self.language_model = TransformerLanguageModel(options)
        self.masked_loss = MaskedLoss()
        self.balance_loss = BalanceLoss(options.num_moe_experts, options.moe_top_k)
        self.adds_balance = options.output_router_logits and options.num_moe_experts > 1
        if options.share_embeddings_and_output_weights:
            self.language_model.output_layer.weight = self.word_embeddings_weight()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> Any:
        found, routed = self.language_model(input_ids, position_ids, attention_mask)
        logits = found.transpose(0, 1).contiguous()
        if labels is None:
            return logits
        loss = self.masked_loss(logits, labels, torch.ones_like(labels) if loss_mask is None else loss_mask)
        if self.adds_balance:
            loss = loss + self.options.router_aux_loss_coef * self.balance_loss(torch.cat(routed))
        return (loss, logits) if self.options.save_logits else loss
