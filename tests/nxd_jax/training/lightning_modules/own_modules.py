"""A module as the original's users write it: what it adds to `BaseHfModel` are the model, and how it is made."""

from __future__ import annotations

from typing import Any

import neuronx_distributed as nxd
import torch

from nxd_jax.training.lightning_modules.model.hf_models.base_model import BaseHfModel
from tests.nxd_jax.training import small


class Plain(small.Net):
    """Takes the columns of Hugging Face's data module."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        return super().forward(input_ids, labels)


class OfUpstream(small.Module, BaseHfModel):
    """A module in the original's style: what it adds to `BaseHfModel` are the model and how it is made."""

    build_model = BaseHfModel.build_model
    setup_optimizer_param_groups = BaseHfModel.setup_optimizer_param_groups

    def _get_model(self) -> Any:
        assert self.nxd_config is not None
        self.nxd_config["pipeline_config"].update(
            transformer_layer_cls=small.Layer,
            output_loss_value_spec=(True, False),
            input_names=["input_ids", "attention_mask", "labels"],
        )
        return nxd.initialize_parallel_model(self.nxd_config, self.model_provider_func, True, {"layers": small.LAYERS})

    def model_provider_func(self, config: Any) -> Any:
        assert config == {"layers": small.LAYERS}
        return Plain()
