"""Small models of transformers as Hugging Face folders, and conversions of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from nxd_jax.checkpoint import original_files
from nxd_jax.checkpoint.original_files import Rank
from nxd_jax.checkpoint.safetensors_files import Hub
from nxd_jax.training.converters.base import CheckpointConverterBase

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "initializer_range": 0.1,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def model(**sizes: Any) -> Any:
    """A model with weights, norms and biases that are all different. half: in bfloat16."""
    merged = {**SIZES, **sizes}
    half = merged.pop("half", False)
    mixtral = "num_local_experts" in merged
    kind = transformers.MixtralForCausalLM if mixtral else transformers.LlamaForCausalLM
    config = (transformers.MixtralConfig if mixtral else transformers.LlamaConfig)(**merged)
    torch.manual_seed(0)
    found = kind(config)
    for name, p in found.named_parameters():
        if p.dim() == 1:
            torch.nn.init.normal_(p, float("norm" in name), 0.1)
    return found.bfloat16() if half else found


def hub(folder: Path, **sizes: Any) -> Path:
    """Its folder: config.json and model.safetensors."""
    made = model(**sizes)
    folder.mkdir(parents=True, exist_ok=True)
    config = made.config.to_dict()
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")}, default=str))
    made.save_pretrained(folder)
    return folder


def run(words: str, converter: CheckpointConverterBase | None = None) -> str:
    """A conversion from a command line."""
    found = CheckpointConverterBase() if converter is None else converter
    return found.run(found.get_arg_parser().parse_args(words.split()))


def into(source: Path, target: Path, flags: str = "", converter: CheckpointConverterBase | None = None) -> Path:
    """Hugging Face's to NxD Training's."""
    run(f"--convert_from_full_state --input_dir {source} --output_dir {target} {flags}", converter)
    return target


def back(source: Path, target: Path, flags: str = "", converter: CheckpointConverterBase | None = None) -> Path:
    """NxD Training's to Hugging Face's."""
    run(f"--convert_to_full_state --input_dir {source} --output_dir {target} {flags}", converter)
    return target


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """A Hugging Face folder's tensors."""
    found = Hub(folder)
    return {name: found.read(name).clone() for name in found.entries}


def rank(folder: Path, tp: int = 0, pp: int = 0, ep: int = 0, experts: bool = False) -> dict[str, torch.Tensor]:
    """What the file of a rank holds."""
    return original_files.File(folder / "model" / Rank(0, tp, pp, ep).file_name(experts)).whole()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Names, shapes, dtypes and bits are those of the other."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    for name, value in one.items():
        assert value.shape == other[name].shape and value.dtype == other[name].dtype and torch.equal(value, other[name]), name
