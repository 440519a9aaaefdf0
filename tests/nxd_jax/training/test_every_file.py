"""Each of the original's files trains when its sizes are made small: layouts keep their kind, precision, recompute, fusions and optimizer are the file's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml

from tests.nxd_jax.training import yaml_runs
from tests.nxd_jax.training.config import conf_files
from tests.nxd_jax.training.data import corpus
from tests.nxd_jax.training.lightning_modules.data.megatron import test_runs as megatron
from tests.nxd_jax.training.test_alignment import PAIRS, SFT
from tests.nxd_jax.training.test_fixtures import MIXTRAL

pytestmark = [pytest.mark.usefixtures("ranks", "variables"), *corpus.MARKS, pytest.mark.core(keep=0)]

LENGTH = 32
STALE = "megatron_llama2_7B_SFT"
"""Lacks keys that the original needs, too."""
FILES = [name for name in conf_files.DIFFERENCES if name != STALE]


def shrunk(conf: str) -> dict[str, Any]:
    """The file's values with small sizes."""
    values = conf_files.configuration(conf)
    strategy, model = values["distributed_strategy"], values["model"]
    ranks = 1
    for key, most in (("tensor_model_parallel_size", 2), ("pipeline_model_parallel_size", 2), ("context_parallel_size", 2)):
        if key in strategy:
            strategy[key] = min(strategy[key], most)
            ranks *= strategy[key]
    changes: dict[str, Any] = {
        "trainer.devices": ranks,
        "trainer.num_nodes": 1,
        "trainer.max_steps": 2,
        "trainer.val_check_interval": 2,
        "trainer.limit_val_batches": 0,
        "exp_manager.create_checkpoint_callback": False,
        "exp_manager.resume_from_checkpoint": None,
        "data.global_batch_size": 4,
        "model.encoder_seq_length": LENGTH,
        "model.max_position_embeddings": LENGTH,
        "model.num_layers": 4 if strategy["pipeline_model_parallel_size"] > 1 else 2,
        "model.hidden_size": 64,
        "model.optim.sched.warmup_steps": 1,
        "compiler_cache_url": None,
    }
    if strategy.get("kv_replicator"):
        changes["distributed_strategy.kv_replicator"] = 1
    if model.get("pipeline_cuts"):
        changes["model.pipeline_cuts"] = ["model.layers.1"]
    if "moe" in model:
        changes["model.moe.num_experts"] = 4
    conf_files.change(values, changes)
    return values


def written(conf: str, folder: Path) -> Path:
    """The file with what it names beside it."""
    values = shrunk(conf)
    corpus.tokenizer().save_pretrained(str(folder / "tokenizer"))
    values["exp_manager"]["exp_dir"] = str(folder / "experiments")
    if values["model_source"] == "megatron":
        conf_files.change(
            values, {key: megatron.SMALL[key] for key in megatron.SMALL if key.startswith(("model.num_", "model.ffn", "data.splits"))}
        )
        conf_files.change(values, {"model.num_layers": 4, "data.seq_length": LENGTH})
        megatron.write_set(values, conf, folder)
    else:
        sizes = MIXTRAL if "mixtral" in conf else {}
        json_file = folder / "config.json"
        json_file.write_text(json.dumps(yaml_runs.MODEL | {"num_key_value_heads": 4 if conf == "hf_llama_7B" else 2} | sizes))
        values["model"]["model_config"] = str(json_file)
        _rows(values, folder)
    file = folder / f"{conf}_config.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file


def _rows(values: dict[str, Any], folder: Path) -> None:
    strategy = values.get("model_alignment_strategy")
    if strategy is None:
        ids = yaml_runs.rows(16)
        columns = {"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist(), "labels": ids.tolist()}
        datasets.disable_progress_bars()
        datasets.Dataset.from_dict(columns).save_to_disk(str(folder / "data"))
        values["data"] |= {"train_dir": str(folder / "data"), "val_dir": None}
        return
    texts = SFT if "sft" in strategy else PAIRS
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    values["data"] |= {
        "train_dir": str(folder / "rows.jsonl"),
        "val_dir": None,
        "seq_length": LENGTH,
        "tokenizer": {"type": str(folder / "tokenizer")},
    }


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("conf", FILES)
def test_it_trains(conf: str, tmp_path: Path) -> None:
    losses = yaml_runs.train(written(conf, tmp_path), "trainer.log_every_n_steps=1")
    assert len(losses) == 2
    first = {"hf_llama3_8B_DPO": math.log(2), "hf_llama3_8B_ORPO": math.log(256) + 0.1 * math.log(2)}.get(conf)
    if conf == "hf_llama3_8B_DPO":
        assert losses[0] == pytest.approx(first, rel=1e-4)
    else:
        assert all(abs(loss - (first or math.log(300))) < 0.6 for loss in losses), losses


def test_there_are_all_of_them() -> None:
    assert len(FILES) == 21
