"""Steps on shapes alone: files at small and at their original sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxd_jax.training.config import loading
from tests.nxd_jax.training import yaml_runs
from tests.nxd_jax.training.config import conf_files
from tests.nxd_jax.training.lightning_modules import megatron_jobs

S = "distributed_strategy"


def test_memory_is_that_of_the_parts(tmp_path: Path) -> None:
    """TP 2 x DP 2: weights, and shards of the optimizer's moments."""
    from nxd_jax.training.abstract_step import abstract_step

    file = yaml_runs.write(tmp_path)
    changes = ["trainer.devices=4", f"{S}.tensor_model_parallel_size=2"]
    report = abstract_step(loading.load(file, changes))
    m = yaml_runs.MODEL
    hidden, heads = int(m["hidden_size"]), int(m["num_attention_heads"])  # type: ignore[call-overload]
    kv = hidden // heads * int(m["num_key_value_heads"])  # type: ignore[call-overload]
    layer = (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * int(m["intermediate_size"])) // 2 + 2 * hidden  # type: ignore[call-overload]
    count = 2 * layer + 2 * yaml_runs.VOCAB * hidden // 2 + hidden
    assert report.axes["tp"] == 2 and report.axes["dp"] == 2
    assert report.kinds["parameter"] == 4 * count
    assert report.kinds["optimizer state"] == pytest.approx(8 * count / 2, rel=0.01)


def test_megatron() -> None:
    """TP 2 x DP 2, without data and its tokenizer: the vocabulary is the usual one."""
    from nxd_jax.training.abstract_step import abstract_step

    report = abstract_step(megatron_jobs.config("llama", "trainer.devices=4", megatron_jobs.SP, f"{megatron_jobs.TP}=2"))
    hidden, kv, ffn = 32, 16, 64
    layer = (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn) // 2 + 2 * hidden
    assert report.kinds["parameter"] == 4 * (2 * layer + 2 * 32000 * hidden // 2 + hidden)
    assert report.axes["tp"] == 2 and report.axes["dp"] == 2


FULL = [name for name in conf_files.DIFFERENCES if name.startswith("hf_") and not any(k in name for k in ("SFT", "DPO", "ORPO"))]


@pytest.mark.thorough
@pytest.mark.parametrize("name", FULL)
def test_files_at_their_original_size(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nxd_jax.training.abstract_step import abstract_step

    monkeypatch.chdir(tmp_path)
    file = conf_files.write(conf_files.with_files(name, tmp_path), name, tmp_path)
    report = abstract_step(loading.load(file))
    assert 0 < report.kept < 2 * report.hbm_bytes  # arrays here are twice as wide as on a core (`abstract_step`)
