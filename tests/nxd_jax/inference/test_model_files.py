"""Language models in files: a process without the model's code goes on where this one would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_jax.inference import generation, model_files
from nxd_jax.inference.config import InferenceConfig
from nxd_jax.inference.language_model import LanguageModel
from nxd_jax.trace.model_builder_v2 import ModelBuilder
from tests.nxd_jax.inference import small
from tests.nxd_jax.training.data import corpus

ROOT = Path(__file__).resolve().parents[3]
OPTIONS = InferenceConfig(tp_degree=2, batch_size=2, seq_len=24, max_context_length=8)
FAR = """
import json, sys
from nxd_jax.inference import generation, model_files
sys.modules["nxd_jax.inference.decoder"] = sys.modules["nxd_jax.inference.attention"] = sys.modules["nxd_jax.trace.functions"] = None
model = model_files.load(sys.argv[1])
print(json.dumps(generation.generate(model, json.loads(sys.argv[2]), 6)))
"""
"""A module that is None cannot be imported."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]], list[list[int]]]:
    """A file, prompts and the answers of the model that is in it."""
    place = tmp_path_factory.mktemp("model")
    small.folder(place, "llama")
    corpus.tokenizer().save_pretrained(place)
    model = LanguageModel.from_pretrained(place, OPTIONS)
    prompts = small.prompts([5, 3])
    model_files.save(model, place / "llama.pt", place)
    return place / "llama.pt", prompts, generation.generate(model, prompts, 6)


def test_in_this_process(saved: tuple[Path, Any, Any]) -> None:
    path, prompts, answers = saved
    model = model_files.load(path)
    assert (model.options, model.about.kind, model.about.end) == (OPTIONS, "llama", (1,))
    assert generation.generate(model, prompts, 6) == answers
    with model_files.tokenizer_folder(path) as folder:
        assert folder is not None and (folder / "tokenizer.json").read_bytes() == (path.parent / "tokenizer.json").read_bytes()
    assert not folder.exists()


def test_in_another_process(saved: tuple[Path, Any, Any], tmp_path: Path) -> None:
    path, prompts, answers = saved
    command = [sys.executable, "-c", FAR, str(path), json.dumps(prompts)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == answers


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("ranks", [{"ep_degree": 2}, {"tp_degree": 2}, {"tp_degree": 2, "ep_degree": 2}])
def test_experts_on_one_device(ranks: dict[str, int], tmp_path: Path) -> None:
    """In another process, where all ranks run on one device."""
    theirs = small.folder(tmp_path, "mixtral", num_hidden_layers=1)
    model = LanguageModel.from_pretrained(tmp_path, InferenceConfig(batch_size=2, seq_len=24, max_context_length=8, **ranks))
    model_files.save(model, tmp_path / "mixtral.pt")
    prompts = small.prompts([5, 3])
    command = [sys.executable, "-c", FAR, str(tmp_path / "mixtral.pt"), json.dumps(prompts)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == small.answers(theirs, prompts, 24, 6)


def test_files_that_are_no_language_models(tmp_path: Path) -> None:
    plain = ModelBuilder(torch.nn.Linear(2, 2)).trace(args=torch.zeros(1, 2)).compile()
    plain.save(str(tmp_path / "linear.pt"))
    with pytest.raises(ValueError, match=r"linear.pt holds a traced model that is no language model: nxd-generate --save writes those"):
        model_files.load(tmp_path / "linear.pt")
    with zipfile.ZipFile(tmp_path / "linear.pt", "a") as archive:
        archive.writestr("nxd_generate/model.json", '{"options": {}}')
    with pytest.raises(ValueError, match=r"linear.pt cannot be opened as a language model"):
        model_files.load(tmp_path / "linear.pt")
    (tmp_path / "text.pt").write_text("no model")
    with pytest.raises(ValueError, match=r"text.pt cannot be opened as a model file"):
        model_files.load(tmp_path / "text.pt")
    with pytest.raises(FileNotFoundError, match=r"none.pt does not exist"):
        model_files.load(tmp_path / "none.pt")
    with model_files.tokenizer_folder(tmp_path / "linear.pt") as folder:
        assert folder is None


def test_nothing_is_left_where_it_cannot_be_written(saved: tuple[Path, Any, Any], tmp_path: Path) -> None:
    model = model_files.load(saved[0])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        model_files.save(model, tmp_path / "nowhere" / "llama.pt")
    model_files.save(model, tmp_path / "again.pt")
    assert [p.name for p in tmp_path.iterdir()] == ["again.pt"]
