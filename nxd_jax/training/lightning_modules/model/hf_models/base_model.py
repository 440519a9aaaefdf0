"""`neuronx_distributed_training.lightning_modules.model.hf_models.base_model`: what the modules of Hugging Face's configurations have in common."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from nxd_jax.tensor_parallel.casting import wide_dtype
from nxd_jax.trainer import initialize_parallel_model
from nxd_jax.training import environment
from nxd_jax.training.lightning_modules.data.model_alignment_data_module import strategy_of
from nxd_jax.training.lightning_modules.model.base import BaseModelModule
from nxd_jax.training.lightning_modules.model.base_dpo import DPOBaseModel
from nxd_jax.training.lightning_modules.model.base_orpo import ORPOBaseModel
from nxd_jax.training.lightning_modules.model.recompute import recomputed
from nxd_jax.training.models.hf_models.layers import LlamaRMSNorm
from nxd_jax.training.models.hf_models.loss import CausalLMLoss
from nxd_jax.training.models.hf_models.rotary import LlamaRotaryEmbedding, set_theta
from nxd_jax.training.utils.mfu import flops_per_token
from nxd_jax.training.utils.model_utils import get_param_groups_by_weight_decay
from nxd_jax.training.utils.utils import get_attribute_from_cfg, value_at
from nxd_jax.utils.batch_utils import get_batch_on_this_context_parallel_rank

INPUTS = ("input_ids", "attention_mask", "labels")
"""Columns of a data set that models take; others are left out."""


class BaseHfModel(BaseModelModule):
    """A module whose model is made of a Hugging Face config.json and of what the YAML file says besides.

    Subclasses set `config_class` (of transformers), `model_types` (what `model_type` in config.json may be), `layer_class`, `recompute_classes` (what
    `activations_checkpoint_recompute` may name) and `output_loss_value_spec`, and write `model_provider_func(config)`. They may extend `_hf_config`.

    `model_config` is the configuration with the attributes of `models.hf_models.options.Options`.

    A subclass may instead leave `config_class` None and write `_get_model()`, which returns `initialize_parallel_model(self.nxd_config,
    self.model_provider_func, ...)` with whatever configuration it makes, after it has completed `nxd_config`. Then no config.json is read.
    """

    config_class: Any = None
    model_types: tuple[str, ...] = ()
    layer_class: type[nn.Module] | None = None
    recompute_classes: tuple[type[nn.Module], ...] = ()
    output_loss_value_spec: Any = (True, False)
    model_config: Any = None
    preferences: DPOBaseModel | None = None
    """What is learned in the place of next tokens, with `model_alignment_strategy.dpo` or `orpo`."""

    # -- configuration --------------------------------------------------------------------------------

    def _validate_and_override_config(self) -> None:
        super()._validate_and_override_config()
        self._check_fusions()
        if self.config_class is not None:
            self.model_config = self._hf_config()
            self._recomputed()
        if (kind := _PREFERENCES.get(strategy_of(self.config) or "")) is not None:
            self.preferences = kind(self)

    def _fusion(self, name: str) -> bool:
        return bool((self.config.model.get("fusions") or {}).get(name, False))

    def _ring_attention(self) -> bool:
        return bool(get_attribute_from_cfg(self.config, "model.fusions.ring_attention", False))

    def _check_fusions(self) -> None:
        cp = self._size("context_parallel_size")
        if self._ring_attention() and self._fusion("flash_attention"):
            raise ValueError(
                "model.fusions.flash_attention and ring_attention are both True: ring attention is blockwise itself. Set flash_attention=False"
                + ("" if cp > 1 else ", or, as context_parallel_size is 1, ring_attention=False")
            )
        if cp > 1 and not self._ring_attention():
            raise ValueError(
                f"distributed_strategy.context_parallel_size={cp} needs model.fusions.ring_attention=True (and flash_attention=False): a rank holds "
                "a part of each sequence"
            )

    def _separate_documents(self) -> bool:
        """Whether rows hold several examples that do not attend to each other."""
        sft = value_at(self.config, "model_alignment_strategy.sft") or {}
        return bool(sft.get("packing", False) and sft.get("separate_documents", False))

    def _hf_config(self) -> Any:
        """The configuration that the model is made of."""
        config = read_config(self.config_class, self.config.model.model_config, self.model_types)
        strategy, model = self.config.distributed_strategy, self.config.model
        config.use_cache = False
        config.sequence_parallel_enabled = bool(strategy.get("sequence_parallel", False))
        config.qkv_linear = bool(model.get("qkv_linear", False))
        config.fuse_qkv = bool(model.get("fuse_qkv", True))
        config.kv_shared_group_size = int(strategy.get("kv_replicator", 1) or 1)
        config.use_flash_attention = self._fusion("flash_attention")
        config.use_ring_attention = self._ring_attention()
        config.transpose_nki_inputs = bool(model.get("transpose_nki_inputs", True))
        config.separate_documents = self._separate_documents()
        config.reduce_dtype = name_of(reduce_dtype(self.config))
        config.params_dtype = name_of(params_dtype(self.config, config))
        self._override(config)
        return config

    def _override(self, config: Any) -> None:
        """Sizes that the YAML file gives in place of config.json; -1: as there."""
        model = self.config.model
        config.num_hidden_layers = _given(model, "num_layers", config.num_hidden_layers)
        hidden = _given(model, "hidden_size", config.hidden_size)
        if hidden != config.hidden_size:
            config.hidden_size, config.head_dim = hidden, None
        if getattr(config, "head_dim", None) is None:
            config.head_dim = _head_dim(config)
        theta = _given(model, "rope_theta", None)
        if theta is not None:
            set_theta(config, float(theta))
        config.max_position_embeddings = self._max_positions(config)

    def _max_positions(self, config: Any) -> int:
        return int(_given(self.config.model, "max_position_embeddings", config.max_position_embeddings))

    def _recomputed(self) -> Any:
        """What `activation_checkpoint_config` is to be: classes, or None. Raises ValueError for other words than those that are known."""
        if self.layer_class is None:
            raise NotImplementedError(
                f"{type(self).__name__} has a config_class and no layer_class: set it to the class of the model's layers"
            )
        core = tuple(kind for kind in self.recompute_classes if kind.__name__ == "CoreAttention")
        return recomputed(self.config.model, self.recompute_classes, self.layer_class, core, self._recomputed_by_default())

    def _recomputed_by_default(self) -> Any:
        """With granularity null."""
        return None

    # -- the model ------------------------------------------------------------------------------------

    def build_model(self) -> Any:
        return self._get_model()

    def _get_model(self) -> Any:
        if self.config_class is None or self.layer_class is None:
            raise NotImplementedError(
                f"{type(self).__name__} must override _get_model(): return initialize_parallel_model(self.nxd_config, self.model_provider_func, ...); or set "
                "config_class and layer_class, and override model_provider_func(config)"
            )
        assert self.nxd_config is not None
        self.nxd_config["activation_checkpoint_config"] = self._recomputed()
        self.nxd_config["pipeline_config"].update(
            {
                "transformer_layer_cls": self.layer_class,
                "output_loss_value_spec": self.output_loss_value_spec,
                "input_names": list(self._inputs()),
                "leaf_module_cls": self._leaves(),
            }
        )
        return initialize_parallel_model(self.nxd_config, self.model_provider_func, self.model_config, include_buffers=False)

    def _leaves(self) -> list[str]:
        """Classes of modules that pipelines do not look into."""
        return [CausalLMLoss.__name__, *(kind.__name__ for kind in self.recompute_classes)]

    def model_provider_func(self, config: Any) -> nn.Module:
        """The model of a configuration."""
        raise NotImplementedError(f"{type(self).__name__} must override model_provider_func(config): return the model")

    def init_weights(self, module: nn.Module, device: Any = None) -> None:
        if isinstance(module, LlamaRotaryEmbedding):
            module.reset(device)
        elif isinstance(module, LlamaRMSNorm):
            module.reset_parameters()
        else:
            super().init_weights(module, device)

    def setup_optimizer_param_groups(self) -> None:
        self._optimizer_param_groups = weight_decay_groups(self.model, self.config.model)

    # -- batches --------------------------------------------------------------------------------------

    def get_batch_length(self, batch: Any) -> int:
        return len(batch["input_ids" if self.preferences is None else "chosen_input_ids"])

    def flops_per_token(self) -> float | None:
        """Of the matrices that a token meets (of experts, the `top_k` that it goes to; of the embedding none) and of attention; None without a config.json."""
        c = self.model_config
        if self.config_class is None or c is None:
            return None
        heads = c.num_attention_heads * c.head_dim
        attention = c.hidden_size * 2 * (heads + c.num_key_value_heads * c.head_dim)
        mlp = 3 * c.hidden_size * c.intermediate_size * (c.num_experts_per_tok if getattr(c, "num_local_experts", 0) else 1)
        matrices = c.num_hidden_layers * (attention + mlp) + c.vocab_size * c.hidden_size
        return flops_per_token(matrices, c.num_hidden_layers, heads, self._tokens_per_sample())

    def process_global_batch(self, global_batch: Any, global_batch_size: int | None = None) -> dict[str, torch.Tensor]:
        """The columns that the model takes; with context parallelism this rank's run of each sequence, labels shifted. A missing attention_mask is all ones.

        Raises ValueError for sequences of another length than `model.encoder_seq_length`.
        """
        if self.preferences is not None:
            return self.preferences.process_global_batch(global_batch)
        ids = global_batch["input_ids"]
        given = {"attention_mask": torch.ones_like(ids), **global_batch}
        batch = {name: given[name] for name in self._inputs() if name in given}
        self._check_length(ids.shape[1])
        return get_batch_on_this_context_parallel_rank(batch)

    def _inputs(self) -> tuple[str, ...]:
        return (*INPUTS, "position_ids") if self._separate_documents() else INPUTS

    # -- preferences ----------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        if self.preferences is not None:
            self.preferences.on_train_start()
        super().on_train_start()

    def model_fwd_calc_loss(self, batch: Mapping[str, Any]) -> Any:
        return super().model_fwd_calc_loss(batch) if self.preferences is None else self.preferences.model_fwd_calc_loss(batch)

    def logits(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The model's, [rows, length, vocabulary / tp]."""
        found: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask)[0]
        return found


_PREFERENCES = {"dpo": DPOBaseModel, "orpo": ORPOBaseModel}


def weight_decay_groups(model: nn.Module, section: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Groups of parameters: those that `optim.weight_decay` (0.01) makes smaller; and biases, and without `do_layer_norm_weight_decay` the weights of norms,
    which nothing does. section: `model` of a configuration."""
    decay = section["optim"].get("weight_decay")
    spared = ["bias"] if section.get("do_layer_norm_weight_decay", False) else ["bias", "norm"]
    return get_param_groups_by_weight_decay(model, spared, 0.01 if decay is None else float(decay))


# -- what a configuration says -------------------------------------------------------------------------


def read_config(kind: Any, path: Any, model_types: tuple[str, ...]) -> Any:
    """A transformers configuration from a config.json, its folder, or the name of a model that was downloaded before.

    Raises ValueError where there is none, and for other kinds of models.
    """
    if path is None:
        raise ValueError("model.model_config is missing: the path of the model's Hugging Face config.json")
    where = Path(os.path.expandvars(os.path.expanduser(str(path))))
    try:
        raw, _ = kind.get_config_dict(str(where) if where.exists() else str(path), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.model_config: {str(path)!r} is no config.json of Hugging Face, and no folder with one, nor a model that was downloaded before ({error})"
        ) from error
    said = raw.get("model_type")
    if said not in (None, "", *model_types):
        hint = "; name: must have mixtral in it for Mixtral" if said == "mixtral" else ""
        raise ValueError(
            f"model.model_config: {str(path)!r} has model_type {said!r}, and {kind.__name__} takes {', '.join(model_types)}{hint}"
        )
    return kind.from_dict({name: value for name, value in raw.items() if name != "model_type"})


def _given(section: Mapping[str, Any], name: str, default: Any) -> Any:
    value = section.get(name)
    return default if value is None or value == -1 else value


def _head_dim(config: Any) -> int:
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"model.hidden_size={config.hidden_size} must be a multiple of the {config.num_attention_heads} attention heads of config.json "
            "(num_attention_heads), or give head_dim there"
        )
    return int(config.hidden_size // config.num_attention_heads)


def reduce_dtype(cfg: DictConfig) -> torch.dtype:
    """In which dtype tensor-parallel ranks add up: `precision.parallel_layers_reduce_dtype`, "bf16" (default) or "fp32"; float32 for `type: fp32`.

    float32 of the device is torch's float64 with XLA_DOWNCAST_BF16=1.
    """
    whole = environment.precision_type(cfg) == "fp32"
    said = str(cfg.precision.get("parallel_layers_reduce_dtype") or ("fp32" if whole else "bf16"))
    return wide_dtype() if said in ("fp32", "float32") else torch.bfloat16


def params_dtype(cfg: DictConfig, config: Any) -> torch.dtype:
    """Of parameters: bfloat16 if config.json says so and the device does not take float32 for it anyway (`precision.type` autocast, bf16SR, manual)."""
    said = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    narrow = name_of(said) == "bfloat16" and os.environ.get("XLA_DOWNCAST_BF16") != "1" and environment.precision_type(cfg) != "fp32"
    return torch.bfloat16 if narrow else torch.float32


def name_of(dtype: Any) -> str:
    """The name of a dtype: float32 of torch.float32."""
    return str(dtype).removeprefix("torch.")
