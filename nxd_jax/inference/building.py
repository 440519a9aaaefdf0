"""From a Hugging Face folder to traced programs with weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nxd_jax.checkpoint.safetensors_files import Hub
from nxd_jax.inference import quantized_weights
from nxd_jax.inference.adapted_linear import FACTORS
from nxd_jax.inference.attention import unfused
from nxd_jax.inference.config import InferenceConfig
from nxd_jax.inference.decoder import FAMILIES, CausalLM
from nxd_jax.trace import sharding
from nxd_jax.trace.model_builder_v2 import ModelBuilder
from nxd_jax.trace.nxd_model import NxDModel
from nxd_jax.trace.parallel_context import NxDParallelState
from nxd_jax.training.models.hf_models import hf_weights

State = dict[str, torch.Tensor]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

SPECULATION = "speculation"


def prefill_tag(tokens: int) -> str:
    """The program that reads prompts of up to so many tokens."""
    return f"prefill_{tokens}"


def decode_tag(slots: int, tag: str = "decode") -> str:
    """The program for later tokens at positions below `slots`."""
    return f"{tag}_{slots}"


def read_config(folder: Path) -> Any:
    """transformers' configuration of a folder. Raises FileNotFoundError without config.json, ValueError for a model_type that is not known."""
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} is no Hugging Face model: there is no config.json")
    try:
        said = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    kind = said.get("model_type") if isinstance(said, dict) else None
    if kind not in FAMILIES:
        raise ValueError(f"{file}: model_type is {kind!r}, and must be one of {', '.join(sorted(FAMILIES))}")
    import transformers

    return transformers.AutoConfig.for_model(**said)


def full_weights(model: CausalLM, files: Mapping[str, torch.Tensor]) -> State:
    """The tensors of a folder by our model's names: those of transformers' Llama, with the experts of a layer in one tensor as `modules.moe` has them, and
    q, k and v apart.

    Raises KeyError naming weights that are not there, NotImplementedError for quantized ones, whose scales would be left out.
    """
    full = {name.removeprefix("transformer."): t for name, t in hf_weights.stacked(files).items()}
    found, missing = {}, []
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]  # all but the cache
    for mine in (part for name in trained if name.rpartition(".")[2] not in FACTORS for part in unfused(name)):  # adapters come later
        name, made = model.family.source(mine)
        if name in full and full[name].dtype not in _FLOATS:
            kind = str(full[name].dtype).removeprefix("torch.")
            raise NotImplementedError(
                f"{name} of the model's files is {kind}, of a quantized checkpoint: save the model in float32, bfloat16 or float16, and have it quantized "
                "with quantized=True (nxd-generate --quantize)"
            )
        if name in full:
            found[mine] = made(full[name])
        elif name not in missing:
            missing.append(name)
    if missing:
        raise KeyError(
            f"the model's files have no {', '.join(missing[:8])}" + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        )
    return found


def build(hf_config: Any, options: InferenceConfig, files: Mapping[str, torch.Tensor]) -> NxDModel:
    """Trace all programs and share out the weights; the model is on its devices after `to_neuron()`.

    Tags: prefill_N for prompts of up to N tokens, decode_N for tokens that see N slots of the cache, speculation_N. files: by Hugging Face's names.
    """
    ranks = {"tensor_model_parallel_size": options.tp_degree, "expert_model_parallel_size": options.ep_degree}
    with NxDParallelState(world_size=options.world_size, **ranks):
        model = CausalLM(hf_config, options, device="meta")
        full = full_weights(model, files)
        sharding.preprocess_checkpoint(model, full)
        if options.quantized:
            quantized_weights.quantize(model, full, options.quantization_type, str(options.quantization_dtype))
        found = _traced(model, options).compile()
        weights = sharding.cut_for_ranks(model, full, range(options.world_size))
        empty = {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in model.named_parameters() if name.rpartition(".")[2] in FACTORS}
        weights = [state | empty for state in weights]
    found.set_weights(weights)
    return found


def _traced(model: CausalLM, options: InferenceConfig) -> ModelBuilder:
    builder = ModelBuilder(model)
    lines = {} if options.batch_size == 1 else {"seq_ids": _ints(options.prompts_at_once)}
    adapters = [{} if options.lora_config is None else {"adapter_ids": _ints(n)} for n in (options.prompts_at_once, options.batch_size)]
    for tokens in options.context_buckets:
        ids = _ints(options.prompts_at_once, tokens)
        builder.trace(kwargs={"input_ids": ids, "attention_mask": ids, **lines, **adapters[0]}, tag=prefill_tag(tokens))
    for slots in options.decode_buckets:
        model.cache_length = None if slots == options.seq_len else slots
        later = {"decode": 1, SPECULATION: options.speculation_length}
        for tag, tokens in later.items():
            if tokens:
                inputs = {"input_ids": _ints(options.batch_size, tokens), "position_ids": _ints(options.batch_size)}
                builder.trace(kwargs=inputs | adapters[1], tag=decode_tag(slots, tag))
    model.cache_length = None
    return builder


def _ints(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int64)


def read_files(folder: Path) -> Mapping[str, torch.Tensor]:
    """The tensors of a folder's safetensors files, mapped to memory. Raises FileNotFoundError if there are none, ValueError for damaged ones."""
    hub = Hub(folder)
    return {name: hub.read(name) for name in hub.entries}
