"""`neuronx_distributed_training.lightning_modules.model.megatron.megatron_gpt_model`: Megatron's GPT from a YAML file."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from nxd_jax.modules.moe import load
from nxd_jax.modules.moe.moe_config_validator import MoeConfigValidator
from nxd_jax.trainer import initialize_parallel_model
from nxd_jax.training.config.facts import Facts
from nxd_jax.training.config.loading import plain
from nxd_jax.training.lightning_modules.model.hf_models.base_model import reduce_dtype
from nxd_jax.training.lightning_modules.model.megatron.megatron_base_model import MegatronBaseModel
from nxd_jax.training.models.hf_models.modeling_mixtral import BalanceLoss
from nxd_jax.training.models.megatron.gpt_model import GPTModel, MaskedLoss
from nxd_jax.training.models.megatron.language_model import Embedding
from nxd_jax.training.models.megatron.options import GPTOptions
from nxd_jax.training.models.megatron.transformer import ParallelTransformerLayer
from nxd_jax.training.utils.mfu import flops_per_token

__all__ = ["MegatronGPTModel"]

RENAMED = {
    "has_bias": "bias",
    "sliding_window_size": "sliding_window",
    "positition_interpolation_factor": "position_interpolation_factor",
}
"""Keys of `model` that `GPTModel` has other names for."""
SAME = (
    *("hidden_size", "max_position_embeddings", "num_layers", "num_attention_heads", "ffn_hidden_size", "kv_channels", "num_kv_heads"),
    *("init_method_std", "use_scaled_init_method", "hidden_dropout", "attention_dropout", "ffn_dropout", "fp32_residual_connection"),
    *("fp16_lm_cross_entropy", "normalization", "layernorm_epsilon", "activation", "transformer_block_type", "position_embedding_type"),
    *("rotary_percentage", "position_freq_base", "position_abf_factor", "share_embeddings_and_output_weights", "save_logits"),
)
"""Keys of `model` that `GPTModel` has the same names for."""
MOE = {
    "num_experts": "num_moe_experts",
    "frequency": "moe_frequency",
    "dropout": "moe_dropout",
    "routing_algorithm": "moe_routing_algorithm",
    "router_activation": "moe_router_activation",
    "sinkhorn_iterations": "moe_sinkhorn_iterations",
    "top_k": "moe_top_k",
}
"""Keys of `model.moe` that `GPTModel` has other names for."""
NUMBERS = [field.name for field in dataclasses.fields(GPTOptions) if "float" in str(field.type).split(" | ")]
"""Arguments of `GPTModel` that are numbers, which files may have as text: "1e-5"."""


class MegatronGPTModel(MegatronBaseModel):
    """Trains `GPTModel`. The data module says the size of the vocabulary (`padded_vocab_size`).

    `gpt_arguments()` are those of the model. With experts the log has moe/imbalance, moe/dropped_share and moe/idle_experts.
    """

    load_log: Any = None
    _moe: dict[str, Any]

    def _validate_and_override_config(self) -> None:
        super()._validate_and_override_config()
        self._moe = self._moe_arguments()

    def gpt_arguments(self) -> dict[str, Any]:
        """The arguments of `GPTModel` that the file says; null means the default."""
        model = plain(self.config.model)
        found = {name: model[name] for name in SAME if model.get(name) is not None}
        found |= {new: model[old] for old, new in RENAMED.items() if model.get(old) is not None}
        found["sequence_parallel"] = bool(self.config.distributed_strategy.get("sequence_parallel", False))
        found["reduce_dtype"] = reduce_dtype(self.config)
        found["vocab_size"] = self._padded_vocab_size()
        return {
            name: float(value) if isinstance(value, str) and name in NUMBERS else value for name, value in {**found, **self._moe}.items()
        }

    def _moe_arguments(self) -> dict[str, Any]:
        """Raises ValueError for what does not go together."""
        moe: dict[str, Any] = dict(plain(self.config.model.get("moe")) or {})
        if not moe:
            return {}
        if not moe.get("glu_mlp", True):
            raise ValueError("model.moe.glu_mlp=False: the experts of Megatron models are gated; leave it True")
        if moe.get("dropless", False) and moe.get("capacity_factor") is None:
            moe["capacity_factor"] = 0.0
        moe.setdefault("capacity_factor", 1.0)
        activation = self.config.model.get("activation", "gelu")
        MoeConfigValidator({"model_source": "megatron", "model": {"moe": moe, "activation": activation}}).validate_moe_config()
        found = {new: moe[old] for old, new in MOE.items() if moe.get(old) is not None}
        top_k = int(found.get("moe_top_k", 1))
        tol = moe.get("sinkhorn_tol")
        return {
            **found,
            "moe_capacity_factor": moe["capacity_factor"],
            "moe_sinkhorn_tol": None if tol in (None, "None") else float(tol),
            "output_router_logits": bool(moe.get("output_router_logits", False)),
            "router_aux_loss_coef": float(moe.get("router_aux_loss_coef", 0.0)),
            "normalize_top_k_affinities": bool(moe.get("normalize_top_k_affinities", top_k > 1)),
            "token_shuffle_group_size": self._size("token_shuffle_group_size"),
        }

    def _padded_vocab_size(self) -> int:
        """Of the data module; without one, for estimates, the usual one of the tokenizer that the file names."""
        data = getattr(self.trainer, "datamodule", None)
        if data is None:
            return Facts(plain(self.config)).vocabulary
        found = getattr(data, "padded_vocab_size", None)
        if found is None:
            raise ValueError(
                f"{type(data).__name__} has no padded_vocab_size, the rows of the embedding: set self.tokenizer and call self._build_vocab() in its setup()"
            )
        return int(found)

    # -- the model ------------------------------------------------------------------------------------

    def build_model(self) -> Any:
        """The model, whose experts count what they get from now on (`load_log`)."""
        assert self.nxd_config is not None
        self.nxd_config["activation_checkpoint_config"] = self._recomputed()
        self.nxd_config["pipeline_config"].update(
            {
                "transformer_layer_cls": ParallelTransformerLayer,
                "output_loss_value_spec": (True, False) if self.save_logits else True,
                "input_names": ["input_ids", "position_ids", "labels", "loss_mask"],
                "leaf_module_cls": [kind.__name__ for kind in (Embedding, MaskedLoss, BalanceLoss)],
            }
        )
        made = initialize_parallel_model(self.nxd_config, self.model_provider_func, include_buffers=False)
        if self._has_experts():
            self.load_log = load.LoadLog(made)
        return made

    def model_provider_func(self) -> nn.Module:
        """The model of the configuration."""
        return GPTModel(**self.gpt_arguments())

    def step_metrics(self) -> dict[str, Any]:
        """See `modules.moe.load.LoadLog`. (The original logs nothing of the kind.)"""
        return {} if self.load_log is None else self.load_log.step(by_layer=False)

    def flops_per_token(self) -> float | None:
        """Of the matrices that a token meets (of experts, the `top_k` that it goes to; of the embedding none) and of attention."""
        known = Facts(plain(self.config)).transformer()
        if known is None:
            return None
        sizes = dataclasses.replace(known, vocabulary=self._padded_vocab_size())
        matrices = sizes.active_parameters - (0 if sizes.tied else sizes.vocabulary * sizes.hidden)
        return flops_per_token(matrices, sizes.layers, sizes.q_size, self._tokens_per_sample())
