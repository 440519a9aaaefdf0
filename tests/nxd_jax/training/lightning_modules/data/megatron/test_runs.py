"""Whole trainings of the original's Megatron files, shrunk, on sets that `nxdt-data megatron` makes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from nxd_jax.training.config import checking
from nxd_jax.training.data.megatron import making, tokenizers
from tests.nxd_jax.lightning import jobs
from tests.nxd_jax.training import yaml_runs
from tests.nxd_jax.training.config import conf_files
from tests.nxd_jax.training.data import corpus
from tests.nxd_jax.training.data.megatron.test_tokenizers import gpt2_files

pytestmark = [*jobs.MARKS, pytest.mark.usefixtures("variables")]

SEQ = 32
SMALL: dict[str, Any] = {
    **{key: value for key, value in yaml_runs.SMALL.items() if not key.startswith(("data.", "model.")) and "kv_replicator" not in key},
    "exp_manager.checkpoint_callback_params.filename": "megatron--{step}-{consumed_samples}",
    "exp_manager.checkpoint_callback_params.save_top_k": -1,
    "trainer.val_check_interval": 3,
    "data.global_batch_size": 4,
    "data.splits_string": "90,10,0",
    "model.optim": yaml_runs.SMALL["model.optim"],
    "model.encoder_seq_length": SEQ,
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.ffn_hidden_size": 64,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 4,
    "model.hidden_dropout": 0,
    "model.attention_dropout": 0,
    "model.ffn_dropout": 0,
}


def write(folder: Path, conf: str, more: dict[str, Any] | None = None) -> Path:
    """A conf file with its set and tokenizer beside it. more: values that it changes besides."""
    values = conf_files.configuration(conf)
    conf_files.change(values, SMALL | (more or {}))
    write_set(values, conf, folder)
    values["exp_manager"]["exp_dir"] = str(folder / "experiments")
    file = folder / "conf.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file


def write_set(values: dict[str, Any], conf: str, folder: Path) -> None:
    """A set and a tokenizer, which the values name then."""
    if conf == "megatron_gpt":
        section = {"library": "megatron", "type": "GPT2BPETokenizer", **gpt2_files(folder)}
    else:
        corpus.tokenizer().save_pretrained(str(folder / "tokenizer"))
        section = {"library": "huggingface", "type": str(folder / "tokenizer"), "use_fast": False}
    values["data"]["tokenizer"] = {**values["data"]["tokenizer"], "vocab_file": None, "merge_file": None, **section}
    made = making.make(corpus.TEXTS * 2, tokenizers.load(section), folder / "book_text_document", append_eod=True)
    values["data"]["data_prefix"] = [1.0, made.prefix]


@pytest.mark.slow
@pytest.mark.core(keep=0)
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("conf", ["megatron_llama_7B", "megatron_gpt"])
def test_a_training_from_text(conf: str, tmp_path: Path) -> None:
    """Its losses do not depend on how ranks share the samples; one that goes on reads what comes next."""
    file = write(tmp_path, conf, {"model.num_layers": 1})
    assert not checking.check_file(file).errors, checking.check_file(file).problems()
    whole = yaml_runs.train(file, "exp_manager.name=whole")
    assert len(whole) == 6 and whole[-1] < whole[0] and abs(whole[0] - math.log(300)) < 1
    kept = next((tmp_path / "experiments" / "whole").rglob("*step=3-consumed_samples=12.0*.ckpt"))
    then = yaml_runs.train(file, "exp_manager.name=then", f"exp_manager.resume_from_checkpoint='{kept}'")
    assert then == whole[3:]
    ranks = ("trainer.devices=4", "distributed_strategy.tensor_model_parallel_size=2", "distributed_strategy.sequence_parallel=True")
    assert yaml_runs.train(file, "exp_manager.name=ranks", *ranks) == pytest.approx(whole, rel=1e-4)
    validated = [yaml_runs.losses(tmp_path / "experiments" / name, "val_loss") for name in ("whole", "ranks")]
    assert len(validated[0]) == 2 and validated[1] == pytest.approx(validated[0], rel=1e-4)
