"""`neuronx_distributed_training.lightning_modules.model.megatron.megatron_base_model`: what Megatron's modules read, refuse, and take from batches."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import open_dict
from torch import nn

from nxd_jax.parallel_layers.layer_norm import LayerNorm
from nxd_jax.training.config.keys.model import REJECTED
from nxd_jax.training.data.megatron.samples import COLUMNS
from nxd_jax.training.lightning_modules.data.base import BaseDataModule
from nxd_jax.training.lightning_modules.model.base import BaseModelModule
from nxd_jax.training.lightning_modules.model.hf_models.base_model import weight_decay_groups
from nxd_jax.training.lightning_modules.model.recompute import recomputed
from nxd_jax.training.models.megatron.fused_layer_norm import MixedFusedRMSNorm
from nxd_jax.training.models.megatron.language_model import PositionEmbedding
from nxd_jax.training.models.megatron.rotary_pos_embedding import RotaryEmbedding
from nxd_jax.training.models.megatron.transformer import CoreAttention, NeuronSwitchMLP, ParallelTransformerLayer

logger = logging.getLogger("nxd_jax")

__all__ = ["MegatronBaseModel"]


class MegatronBaseModel(BaseModelModule):
    """The base of Megatron's modules. Raises ValueError for what they do not train with: see `_validate_and_override_config`."""

    # -- configuration --------------------------------------------------------------------------------

    def _validate_and_override_config(self) -> None:
        """Refuse what Megatron's modules do not do; sequence parallelism needs several tensor-parallel ranks, and is off without."""
        super()._validate_and_override_config()
        model, strategy, tp = self.config.model, self.config.distributed_strategy, self._size("tensor_model_parallel_size")
        if strategy.get("sequence_parallel", False) and tp == 1:
            logger.info("distributed_strategy.sequence_parallel is off: tensor_model_parallel_size is 1")
            with open_dict(self.config):
                strategy.sequence_parallel = False
        for name, (passes, why) in REJECTED.items():
            if name in model and model[name] not in passes:
                raise ValueError(f"model.{name}={model[name]!r} is refused: {why}; take it out")
        if not strategy.get("zero1", True):
            raise ValueError("distributed_strategy.zero1=False: Megatron models train with ZeRO-1 only; set it to True")
        if model.optim.get("name") == "distributed_fused_adam":
            raise ValueError(
                "model.optim.name=distributed_fused_adam is a CUDA kernel: use adamw_fp32OptState with distributed_strategy.zero1=True"
            )
        if self.config.trainer.get("precision", 32) not in (None, 32, "32", "32-true"):
            raise ValueError(f"trainer.precision={self.config.trainer.precision!r} must be 32: precision.type says the precision")
        self._check_pipeline()
        self._check_attention()
        self._recomputed()

    def _check_pipeline(self) -> None:
        pp, vpp, layers = (
            self._size("pipeline_model_parallel_size"),
            self._size("virtual_pipeline_model_parallel_size"),
            int(self.config.model.num_layers),
        )
        if layers % (pp * vpp):
            raise ValueError(
                f"model.num_layers={layers} must be a multiple of the {pp * vpp} stages of pipeline_model_parallel_size={pp} and "
                f"virtual_pipeline_model_parallel_size={vpp}"
            )
        if pp > 1 and self.config.model.get("share_embeddings_and_output_weights", True):
            raise ValueError(
                f"model.share_embeddings_and_output_weights=True with pipeline_model_parallel_size={pp}: the embedding and the output layer are on different "
                "stages; set it to False"
            )

    def _check_attention(self) -> None:
        fusions = self.config.model.get("fusions") or {}
        for name in ("flash_attention", "ring_attention"):
            if fusions.get(name, False):
                raise ValueError(f"model.fusions.{name}=True: Megatron models have no blockwise attention; set it to False")
        if (cp := self._size("context_parallel_size")) > 1:
            raise ValueError(f"context_parallel_size={cp}: Megatron models are not for context parallelism; set it to 1")

    def _has_experts(self) -> bool:
        return int((self.config.model.get("moe") or {}).get("num_experts", 1)) > 1

    def _recomputed(self) -> Any:
        """What `activation_checkpoint_config` is to be. "selective" without a list: attention, and experts if there are some."""
        selective = (CoreAttention, NeuronSwitchMLP) if self._has_experts() else (CoreAttention,)
        return recomputed(self.config.model, selective, ParallelTransformerLayer, selective, None)

    # -- the model ------------------------------------------------------------------------------------

    def init_weights(self, module: nn.Module, device: Any = None) -> None:
        if isinstance(module, RotaryEmbedding):
            module.reset(device)
        elif isinstance(module, (MixedFusedRMSNorm, LayerNorm, PositionEmbedding, nn.Linear)):
            module.reset_parameters()  # a router's linear layer begins as torch's
        else:
            super().init_weights(module, device)

    def model_fwd_calc_loss(self, batch: Mapping[str, Any]) -> Any:
        output = self.model(**batch)
        return output[0] if isinstance(output, (tuple, list)) else output

    def setup_optimizer_param_groups(self) -> None:
        """Two groups: biases, and norms unless `do_layer_norm_weight_decay`, have no weight decay. (The original spares biases only.)"""
        self._optimizer_param_groups = weight_decay_groups(self.model, self.config.model)

    # -- batches --------------------------------------------------------------------------------------

    def get_batch_length(self, batch: Any) -> int:
        return len(_named(batch)["tokens"])

    def process_global_batch(self, global_batch: Any, global_batch_size: int | None = None) -> dict[str, torch.Tensor]:
        """The columns that `GPTModel` takes, of a batch that is a tuple or a dict of tokens, labels, loss_mask, attention_mask and position_ids, each
        [rows, length]; as the data module's own `process_global_batch` gives it, if it has one.

        A missing loss_mask is all ones, missing position_ids are 0, 1, ...; attention_mask is left out, attention is causal. Raises ValueError for
        sequences of another length than `model.encoder_seq_length`, and KeyError for a batch without tokens or labels.
        """
        data = getattr(self.trainer, "datamodule", None)
        if not getattr(data, "shifted_labels", True):
            raise ValueError(
                f"{type(data).__name__} gives the label of a token at the token's own place, and Megatron models take that of the next one: give them a "
                "MegatronDataModule. For fine-tuning convert the weights to a Hugging Face model, and use model_source: hf"
            )
        if data is not None and getattr(type(data), "process_global_batch", None) is not BaseDataModule.process_global_batch:
            global_batch = data.process_global_batch(global_batch)
        batch = _named(global_batch)
        tokens, labels = batch["tokens"], batch["labels"]
        self._check_length(tokens.shape[1])
        mask, places = batch.get("loss_mask"), batch.get("position_ids")
        return {
            "input_ids": tokens,
            "position_ids": torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens) if places is None else places,
            "labels": labels,
            "loss_mask": torch.ones_like(tokens) if mask is None else mask,
        }


def _named(batch: Any) -> dict[str, torch.Tensor]:
    """A batch by the names of its columns."""
    if isinstance(batch, (tuple, list)):
        if len(batch) != len(COLUMNS):
            raise ValueError(f"a batch that is a tuple has {', '.join(COLUMNS)}, got {len(batch)} of them")
        return dict(zip(COLUMNS, batch, strict=True))
    found = {**batch, "tokens": batch["input_ids"]} if "tokens" not in batch and "input_ids" in batch else dict(batch)
    if missing := [name for name in ("tokens", "labels") if name not in found]:
        raise KeyError(f"a batch has no {' and no '.join(missing)}; it has {', '.join(map(str, found))}")
    return found
