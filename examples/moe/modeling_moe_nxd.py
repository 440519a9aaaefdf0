"""The Llama of examples/llama with experts in place of its MLPs, in two shapes: Mixtral's, and DeepSeek-V3's.

    Mixtral     every layer: softmax over all experts, the k best, weights that add up to 1; an auxiliary loss, or a bias, keeps experts equally busy
    DeepSeek    after the first, dense layers: sigmoid, groups of experts, weights that add up to `routed_scaling_factor`, experts that all tokens take;
                a bias that follows the load (`load.ExpertBalancer`) keeps the others equally busy

Attention is Llama's in both (DeepSeek-V3 itself has latent attention). So the second is what transformers calls Glm4Moe, whose configuration it takes.
Legend: T tokens of a rank, H hidden, E experts, k experts of a token, I their width.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch
from neuronx_distributed.modules.moe import ExpertMLPs, GroupLimitedRouter, MoE, RouterTopK, SharedExperts, load_balancing_loss_func
from torch import nn
from transformers import Glm4MoeConfig, MixtralConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "llama"))

from modeling_llama_nxd import DecoderLayer, LlamaForCausalLM, LlamaModel, NxDLlamaOptions

BALANCE = ("loss", "bias", "none")


@dataclasses.dataclass(frozen=True)
class NxDMoEOptions(NxDLlamaOptions):
    """How the model lies on the ranks, and which tokens experts take.

    capacity_factor: an expert takes at most so many times the tokens that each would get if all were equally busy, and drops later ones; None: all tokens.
    balance: what keeps experts equally busy: "loss" (added to the model's; Mixtral), "bias" of the router, which `load.ExpertBalancer` moves, or "none".
    """

    capacity_factor: float | None = None
    balance: str = "loss"


def experts(config: MixtralConfig | Glm4MoeConfig, width: int, normalize: bool, options: NxDMoEOptions, init) -> ExpertMLPs:
    """The experts that tokens are routed to. width: I. normalize: their weights are made to add up to 1, whatever was dropped."""
    return ExpertMLPs(
        num_experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        hidden_size=config.hidden_size,
        intermediate_size=width,
        hidden_act=config.hidden_act,
        glu_mlp=True,
        capacity_factor=options.capacity_factor,
        normalize_top_k_affinities=normalize,
        init_method=init,
        output_layer_init_method=init,
        dtype=options.dtype,
        sequence_parallel_enabled=options.sequence_parallel,
    )


def joined(router: nn.Module, routed: ExpertMLPs, shared: SharedExperts | None, options: NxDMoEOptions, init) -> MoE:
    """The layer in place of an MLP. It gives (output, the router's logits [T, E])."""
    init(router.linear_router.weight)
    return MoE(
        router,
        routed,
        shared,
        sequence_parallel_enabled=options.sequence_parallel,
        sequence_dimension=0 if options.sequence_parallel else None,
        return_router_logits=True,
    )


def mixtral_experts(config: MixtralConfig, options: NxDMoEOptions, init) -> MoE:
    size = config.num_local_experts, config.num_experts_per_tok, config.hidden_size
    router = RouterTopK(*size, jitter_eps=config.router_jitter_noise, balancing_bias=options.balance == "bias")
    return joined(router, experts(config, config.intermediate_size, size[1] > 1, options, init), None, options, init)


def deepseek_experts(config: Glm4MoeConfig, options: NxDMoEOptions, init) -> MoE:
    router = GroupLimitedRouter(
        config.num_local_experts,
        config.num_experts_per_tok,
        config.hidden_size,
        n_group=config.n_group,
        topk_group=config.topk_group,
        norm_topk_prob=config.norm_topk_prob,
        routed_scaling_factor=config.routed_scaling_factor,
    )
    shared = SharedExperts(
        config.hidden_size, config.moe_intermediate_size, config.n_shared_experts, config.hidden_act, dtype=options.dtype
    )
    return joined(router, experts(config, config.moe_intermediate_size, False, options, init), shared, options, init)


class ExpertDecoderLayer(DecoderLayer):
    """Llama's layer with experts; dense if `mlp` is None. Gives hidden states, and with experts the router's logits [T, E] besides."""

    def __init__(self, config, options: NxDMoEOptions, init, mlp: MoE | None):
        super().__init__(config, options, init, mlp)
        self.dense = mlp is None

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if self.dense:
            return super().forward(hidden, cos, sin)
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        out, logits = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + out, logits


class MixtralModel(LlamaModel):
    """Gives hidden states, and the router's logits of every layer."""

    def make_layer(self, index: int, config: MixtralConfig, options: NxDMoEOptions, init) -> ExpertDecoderLayer:
        return ExpertDecoderLayer(config, options, init, mixtral_experts(config, options, init))

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        hidden = self.embed_tokens(input_ids)
        cos, sin = self.rotary(input_ids.shape[1])
        routed = []
        for layer in self.layers:
            if layer.dense:
                hidden = layer(hidden, cos, sin)
            else:
                hidden, logits = layer(hidden, cos, sin)
                routed.append(logits)
        return self.norm(hidden), routed


class DeepseekModel(MixtralModel):
    def make_layer(self, index: int, config: Glm4MoeConfig, options: NxDMoEOptions, init) -> ExpertDecoderLayer:
        dense = index < config.first_k_dense_replace
        return ExpertDecoderLayer(config, options, init, None if dense else deepseek_experts(config, options, init))


class BalanceLoss(nn.Module):
    """What uneven use of experts costs, of the logits [T, E] of all layers together: `router_aux_loss_coef` times what transformers means by it, which is
    top_k times NxD's function.
    """

    def __init__(self, config: MixtralConfig):
        super().__init__()
        self.experts, self.top_k = config.num_local_experts, config.num_experts_per_tok
        self.factor = config.router_aux_loss_coef * self.top_k

    def forward(self, routed: list[torch.Tensor]) -> torch.Tensor:
        return self.factor * load_balancing_loss_func(torch.cat(routed), self.experts, self.top_k)


class MixtralForCausalLM(LlamaForCausalLM):
    """forward(input_ids [batch, seq], labels) returns (loss, logits [batch, seq, vocab / tp]), as `LlamaForCausalLM` does.

    With `balance="loss"` the auxiliary loss of this rank's tokens is in it. Raises ValueError for a `balance` that does not exist.
    """

    model_class = MixtralModel

    def __init__(self, config: MixtralConfig | Glm4MoeConfig, options: NxDMoEOptions | None = None):
        options = options or NxDMoEOptions()
        if options.balance not in BALANCE:
            raise ValueError(f"balance={options.balance!r} is not one of {', '.join(BALANCE)}")
        super().__init__(config, options)
        self.balance_loss = BalanceLoss(config) if options.balance == "loss" else None

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor | None, torch.Tensor]:
        hidden, routed = self.model(input_ids)
        logits = self.logits(hidden)
        if labels is None:
            return None, logits
        loss = self.loss(logits, labels)
        return loss if self.balance_loss is None else loss + self.balance_loss(routed), logits


class DeepseekForCausalLM(MixtralForCausalLM):
    """The same in DeepSeek's shape, which has no auxiliary loss. Raises ValueError for `balance="loss"`, too."""

    model_class = DeepseekModel

    def __init__(self, config: Glm4MoeConfig, options: NxDMoEOptions | None = None):
        options = options or NxDMoEOptions(balance="bias")
        if options.balance == "loss":
            raise ValueError('balance="loss" is Mixtral\'s; here routers have a bias: use "bias", with a `load.ExpertBalancer`, or "none"')
        super().__init__(config, options)
