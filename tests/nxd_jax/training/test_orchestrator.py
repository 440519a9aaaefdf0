"""Users' copies of the original's training.py: every choice that it makes. (As programs: `test_command`.)"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from nxd_jax.training import environment
from nxd_jax.training.config import loading
from tests.nxd_jax.training import orchestrator, test_every_file, yaml_runs
from tests.nxd_jax.training.data import corpus

pytestmark = [pytest.mark.usefixtures("ranks", "variables"), *corpus.MARKS, pytest.mark.core(keep=0)]

QUICK = {
    "distributed_strategy": {"tensor_model_parallel_size": 1, "sequence_parallel": False},
    "trainer": {"devices": 1, "log_every_n_steps": 1},
    "model": {"num_layers": 1},
    "precision": {"type": "fp32"},
}


def loaded(conf: str, folder: Path, changes: dict[str, Any]) -> Any:
    """A file of the original's, with small sizes, and changes by section."""
    file = test_every_file.written(conf, folder)
    values = yaml.safe_load(file.read_text())
    for part in (QUICK, changes):
        for name, section in part.items():
            values[name].update(section)
    file.write_text(yaml.safe_dump(values))
    return loading.load(file, [])


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("conf", "changes"),
    [
        ("megatron_gpt", {"distributed_strategy": {"tensor_model_parallel_size": 2}, "trainer": {"devices": 2}}),
        ("hf_mixtral_8x7b", {"distributed_strategy": {"pipeline_model_parallel_size": 1}}),
        ("hf_llama3_8B_SFT", {}),
        ("hf_llama3_8B_SFT", {"data": {"use_sft_style_data_module": True}}),
        ("hf_llama3_8B_DPO", {}),
    ],
)
def test_each_choice_trains(conf: str, changes: dict[str, Any], tmp_path: Path) -> None:
    cfg = loaded(conf, tmp_path, changes)
    environment.process_config(cfg)
    trainer = orchestrator.train(cfg)
    assert trainer.global_step == 2
    losses = yaml_runs.losses(tmp_path / "experiments")
    first = math.log(2) if "DPO" in conf else math.log(300)
    assert len(losses) == 2 and all(abs(loss - first) < 0.6 for loss in losses), losses
