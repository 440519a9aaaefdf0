"""A Hugging Face folder as our model on tensor-parallel ranks."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from nxd_jax.trainer import building, neuronx_distributed_config
from nxd_jax.training.converters import sources
from nxd_jax.training.models.hf_models import hf_weights, kinds


def load(folder: Path, tp: int, dtype: torch.dtype | None = None) -> nn.Module:
    """Llama or Mixtral with the weights of a folder, on xla, in evaluation mode. dtype: of the weights; None: as config.json says, else float32.

    Lays out tp ranks. Raises FileNotFoundError and ValueError for a folder without a model, and for heads that cannot be shared out.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} is no Hugging Face model: there is no config.json. A run's checkpoint becomes one with nxdt-convert --convert_to_full_state"
        )
    said = json.loads(file.read_text())
    known = {"llama": kinds.llama, "mixtral": kinds.mixtral}
    if said.get("model_type") not in known:
        raise ValueError(f"{file}: model_type is {said.get('model_type')!r}, and must be {' or '.join(known)}")
    kind = known[said["model_type"]]()
    config = kind.read(said)
    config.params_dtype = dtype or getattr(torch, str(said.get("torch_dtype") or said.get("dtype") or "float32"))
    building.lay_out(neuronx_distributed_config(tensor_parallel_size=tp))
    model: nn.Module = kind.ours(config)
    source = sources.open_source(folder, "model", trust=False)
    hf_weights.load_hf_weights(model, {name: source.read(name) for name in source.shapes})
    return model.to("xla").eval()
