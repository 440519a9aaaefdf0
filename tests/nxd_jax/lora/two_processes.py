"""What `test_torchrun` runs in two processes: python -m torch.distributed.run --nproc_per_node=2 two_processes.py <directory>."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import torch
import torch.distributed as dist

from nxd_jax.modules.lora import LoraConfig, LoraModel, peft_format
from nxd_jax.parallel_layers import grads, parallel_state
from tests.nxd_jax.lora.test_model import IDS, TARGETS, Block

STEPS = 3


def made() -> LoraModel:
    torch.manual_seed(0)
    config = LoraConfig(lora_rank=2, lora_alpha=4, target_modules=TARGETS, bias="lora_only", save_lora_config_adapter=True)
    return LoraModel(Block().to("xla"), config)


def train(model: Any) -> list[float]:
    """Losses of a few steps with both ranks on the same data."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    found = []
    for _ in range(STEPS):
        loss = (model(IDS.to("xla")) ** 2).mean()
        loss.backward()
        grads.clip_grad_norm([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def main(path: pathlib.Path) -> None:
    import torch_bridge.torch_xla.distributed.xla_backend  # noqa: F401

    dist.init_process_group("xla")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = made()
    losses = train(model)
    model.save_lora(str(path / "ours"), "t")
    peft_format.save_pretrained(model, path / "peft", fused={"qkv_proj": ("q", "k", "v")})
    torch.manual_seed(0)
    again = LoraModel(Block().to("xla"), LoraConfig(load_lora_from_ckpt=True, lora_save_dir=str(path / "ours"), lora_load_tag="t"))
    assert torch.allclose(again(IDS.to("xla")).cpu(), model(IDS.to("xla")).cpu())
    model.merge_lora()
    assert torch.allclose(model(IDS.to("xla")).cpu(), again(IDS.to("xla")).cpu())
    if dist.get_rank() == 0:
        (path / "losses.json").write_text(json.dumps([losses, again.get_nb_trainable_parameters()]))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
