"""Language models that generate text: Hugging Face's folders, traced with `ModelBuilder` for tensor-parallel ranks, with a KV cache that stays on the device.

| module | what it has |
|---|---|
| `config` | `InferenceConfig`: ranks, batch, lengths, sampling |
| `language_model` | `LanguageModel`: a model on its devices, `prefill`, `decode`, `score` |
| `generation`, `token_ids` | `generate` and `stream`: texts of any number of prompts; token ids as users have them |
| `speculation` | a draft model that guesses ahead |
| `model_files` | `save`, `load` |
| `lora_serving`, `adapter_slots`, `adapted_linear` | LoRA adapters beside each other: `LoraServingConfig`, what is loaded, layers |
| `building` | from a folder to traced programs with weights |
| `decoder`, `attention`, `flash_decoding`, `mixture`, `gpt2`, `step`, `kv_cache`, `token_choice` | the model of one rank |
| `command`, `printing`, `dtype_names` | `nxd-generate` |
| `evaluate` | `nxdt-evaluate` |

Not part of the original, whose examples/inference has most of these names in files beside its scripts.
"""

from __future__ import annotations

import importlib
from typing import Any

_FROM = {
    "CausalLM": "decoder",
    "InferenceConfig": "config",
    "KVCacheManager": "kv_cache",
    "LanguageModel": "language_model",
    "LoraServingConfig": "lora_serving",
    "generate": "generation",
    "generate_buckets": "buckets",
    "load": "model_files",
    "save": "model_files",
    "stream": "generation",
}


def __getattr__(name: str) -> Any:
    if name in _FROM:
        return getattr(importlib.import_module(f"{__name__}.{_FROM[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FROM])
