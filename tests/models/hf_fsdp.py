"""transformers' Trainer with FSDP for XLA, as its users configure it, beside plain data parallelism; prints what both logged.

Arguments: a folder for checkpoints, the optimizer, what gradients are clipped to.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
FSDP = {"fsdp": True, "fsdp_config": {"xla": True, "xla_fsdp_v2": False, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}


class LateOptimizer(Trainer):
    """The Trainer makes the optimizer before it wraps the model in FSDP for XLA: here of the wrapped model. Batches in order."""

    def _wrap_model(self, *args: Any, **kwargs: Any) -> Any:
        self.wrapped = super()._wrap_model(*args, **kwargs)
        return self.wrapped

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        if self.optimizer is None:
            self.optimizer = self.accelerator.prepare(self.create_optimizer(self.wrapped))
        return super().create_scheduler(*args, **kwargs)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trained(folder: str, **options: Any) -> dict[str, Any]:
    """The losses and norms of gradients of a run."""
    torch.manual_seed(0)
    words = torch.randint(0, 64, (32, 8), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=3,
        save_steps=3,
        per_device_train_batch_size=4,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    model = LlamaForCausalLM(LlamaConfig(**SIZES))  # type: ignore[arg-type]
    trainer = LateOptimizer(model, arguments, train_dataset=[{"input_ids": w, "labels": w} for w in words])
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    wrapped = isinstance(trainer.wrapped, XlaFullyShardedDataParallel)
    return {"losses": [row["loss"] for row in rows], "norms": [row["grad_norm"] for row in rows], "wrapped": wrapped}


if __name__ == "__main__":
    options: dict[str, Any] = {
        "optim": sys.argv[2],
        "max_grad_norm": float(sys.argv[3]),
        "learning_rate": 20.0 if sys.argv[2] == "sgd" else 1e-2,
    }
    found = {kind: trained(f"{sys.argv[1]}/{kind}", **options, **more) for kind, more in (("plain", {}), ("fsdp", FSDP))}
    print("FOUND", json.dumps(found))  # noqa: T201
