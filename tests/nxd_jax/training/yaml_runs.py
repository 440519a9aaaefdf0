"""Whole runs from YAML files in the original's shape: a small config.json, an Arrow folder of rows, and the file itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml

from nxd_jax.training.example import curves
from tests.nxd_jax.training.config import conf_files

LENGTH, ROWS, VOCAB = 32, 64, 256

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


SMALL: dict[str, Any] = {
    "trainer.devices": 1,
    "trainer.num_nodes": 1,
    "trainer.val_check_interval": 30001,
    "trainer.max_steps": 6,
    "trainer.log_every_n_steps": 1,
    "exp_manager.checkpoint_callback_params.filename": "hf_llama--{step}-{consumed_samples}",
    "exp_manager.checkpoint_callback_params.every_n_train_steps": 3,
    "distributed_strategy.tensor_model_parallel_size": 1,
    "distributed_strategy.sequence_parallel": False,
    "distributed_strategy.kv_replicator": 1,
    "data.global_batch_size": 4,
    "data.val_dir": None,
    "model.encoder_seq_length": LENGTH,
    "model.max_position_embeddings": LENGTH,
    "model.num_layers": 2,
    "model.hidden_size": MODEL["hidden_size"],
    "model.rope_theta": 10000.0,
    "model.activations_checkpoint_granularity": "selective",
    "model.activations_checkpoint_recompute": ["CoreAttention"],
    "model.fusions": {"softmax": True, "flash_attention": False},
    "model.do_layer_norm_weight_decay": False,
    "model.optim": {
        "name": "adamw_fp32OptState",
        "lr": 0.003,
        "weight_decay": 0.01,
        "capturable": False,
        "betas": [0.9, 0.999],
        "sched": {"name": "LinearAnnealingWithWarmUp", "warmup_steps": 2, "max_steps": "${trainer.max_steps}"},
    },
    "precision": {"type": "fp32"},
    "compiler_cache_url": None,
}
"""What runs here change in the original's files for HF Llama."""


def base(conf: str = "hf_llama3_8B") -> dict[str, Any]:
    """What a file of the original for HF Llama says, for small sizes."""
    found = conf_files.configuration(conf)
    conf_files.change(found, SMALL)
    return found


def rows(count: int = ROWS, length: int = LENGTH) -> torch.Tensor:
    """Tokens with a pattern to learn: each is the one before plus a step of the row's."""
    starts = torch.randint(0, VOCAB, (count, 1), generator=torch.Generator().manual_seed(0))
    steps = torch.randint(1, 4, (count, 1), generator=torch.Generator().manual_seed(1))
    return (starts + steps * torch.arange(length)) % VOCAB


def write(folder: Path, model: dict[str, Any] | None = None, count: int = ROWS) -> Path:
    """A YAML file with all that it names beside it; returns its path."""
    import datasets

    folder.mkdir(parents=True, exist_ok=True)
    ids = rows(count)
    columns = {"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist(), "labels": ids.tolist()}
    if not (folder / "data").exists():
        datasets.Dataset.from_dict(columns).save_to_disk(str(folder / "data"))
    conf = base()
    conf["data"]["train_dir"] = conf["data"]["val_dir"] = str(folder / "data")
    return _written(conf, folder, model)


def write_aligned(folder: Path, conf: str, texts: list[dict[str, Any]], model: dict[str, Any] | None = None) -> Path:
    """A conf file for fine-tuning or preferences, with rows of text, a tokenizer of 256 ids and config.json beside it; returns its path."""
    from tests.nxd_jax.training.data import corpus

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    corpus.tokenizer().save_pretrained(str(folder / "tokenizer"))
    values = base(conf)
    conf_files.change(
        values, {"exp_manager.resume_from_checkpoint": None, "model.weight_init_only": False, "data.dev_choose_samples": None}
    )
    values["data"] |= {"train_dir": str(folder / "rows.jsonl"), "seq_length": LENGTH, "tokenizer": {"type": str(folder / "tokenizer")}}
    return _written(values, folder, model)


def _written(conf: dict[str, Any], folder: Path, model: dict[str, Any] | None) -> Path:
    (folder / "config.json").write_text(json.dumps(MODEL | (model or {})))
    conf["model"]["model_config"] = str(folder / "config.json")
    conf["exp_manager"]["exp_dir"] = str(folder / "experiments")
    file = folder / "conf.yaml"
    file.write_text(yaml.safe_dump(conf, sort_keys=False))
    return file


def train(file: Path, *changes: str) -> list[float]:
    """Train in this process; returns the losses, from TensorBoard's file."""
    from nxd_jax.training import environment, workflow
    from nxd_jax.training.config import loading

    cfg = loading.load(file, list(changes))
    environment.process_config(cfg)
    trainer = workflow.train(cfg)
    return losses(Path(trainer.log_dir))


def losses(folder: Path, tag: str = "reduced_train_loss") -> list[float]:
    """A metric of every step, from TensorBoard's files below a folder; of a step that was done twice, the last."""
    return list(curves.losses(folder, tag).values())
