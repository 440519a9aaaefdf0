"""What `test_torchrun` runs in two processes: python -m torch.distributed.run --nproc_per_node=2 two_processes.py <folder>. Each writes its answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

import torch_bridge.torch_xla.distributed.xla_backend  # noqa: F401
from nxd_jax.inference import InferenceConfig, LanguageModel, LoraServingConfig, generate
from tests.nxd_jax.inference import small

ADAPTERS = [None, "one", None]
PROMPTS = small.prompts([5, 8, 2])

if __name__ == "__main__":
    dist.init_process_group("xla")
    place = Path(sys.argv[1])
    room = LoraServingConfig.of_folders({"one": str(place / "adapter")})
    model = LanguageModel.from_pretrained(
        place, InferenceConfig(tp_degree=2, batch_size=2, seq_len=32, max_context_length=8, lora_config=room)
    )
    (place / f"answers_{dist.get_rank()}.json").write_text(json.dumps(generate(model, PROMPTS, 6, adapters=ADAPTERS)))
