"""Checkpoints that are not what the configuration says: each tensor is named. What is there is not replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.nxd_jax.training.converters import jobs

SMALL = {"num_hidden_layers": 2}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.hub(tmp_path_factory.mktemp("model") / "hub", **SMALL)


@pytest.fixture(scope="module")
def nxdt(hub: Path) -> Path:
    return jobs.into(hub, hub.parent / "nxdt", "--tp_size 4 --kv_size_multiplier 2 --qkv_linear True")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop("model.layers.1.mlp.up_proj.weight"), "missing: model.layers.1.mlp.up_proj.weight"),
        (lambda s: s.update({"model.layers.2.odd": torch.zeros(1)}), "not of this model: model.layers.2.odd"),
        (
            lambda s: s.update({"model.norm.weight": torch.zeros(65)}),
            r"model.norm.weight has shape \[65\], and the configuration says \[64\]",
        ),
    ],
)
def test_hugging_faces_tensors(hub: Path, change: Any, said: str, tmp_path: Path) -> None:
    state = jobs.weights(hub)
    change(state)
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=f"model.pt does not fit the model's configuration: .*{said}"):
        jobs.into(tmp_path / "model.pt", tmp_path / "out", f"--config {hub}/config.json")


def test_an_odd_head_of_tied_embeddings(tmp_path: Path) -> None:
    hub = jobs.hub(tmp_path / "hub", **SMALL, tie_word_embeddings=True)
    state = jobs.weights(hub)
    torch.save(state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}, tmp_path / "same.pt")
    jobs.into(tmp_path / "same.pt", tmp_path / "out", f"--config {hub}/config.json")
    torch.save(state | {"lm_head.weight": torch.zeros(128, 64)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="lm_head.weight is not model.embed_tokens.weight, and config.json has tie_word_embeddings: true"):
        jobs.into(tmp_path / "other.pt", tmp_path / "out", f"--config {hub}/config.json --force")


@pytest.mark.parametrize(
    ("changes", "words", "said"),
    [
        ({}, "--tp_size 8", "--tp_size 8, the files are of 4: leave these flags out"),
        ({}, "--kv_size_multiplier 4 --pp_size 2", "--pp_size 2, the files are of 1; --kv_size_multiplier 4, the files are of 2"),
        ({}, "--model_style megatron", "holds a model of --model_style hf: give that"),
        ({}, "--hw_backend trn2", "do not hold copies of K/V heads as on trn2, but as on trn1: give --hw_backend trn1"),
        ({"num_hidden_layers": 3}, "", "missing: model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "", "not of this model: model.layers.1.input_layernorm.weight"),
        ({"vocab_size": 256}, "", r"model.embed_tokens.weight has shape \[128, 64\], and the configuration says \[256, 64\]"),
        (
            {"num_attention_heads": 24, "num_key_value_heads": 3, "head_dim": 8},
            "",
            "hold 32 rows of a K weight, and 3 K/V heads of 8 have 24",
        ),
    ],
)
def test_files_of_ranks(hub: Path, nxdt: Path, changes: dict[str, Any], words: str, said: str, tmp_path: Path) -> None:
    import json

    config = json.loads((hub / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=said):
        jobs.back(nxdt, tmp_path / "out", f"--config {tmp_path}/config.json {words}")
    assert not (tmp_path / "out").exists()


def test_files_that_are_missing_or_damaged(hub: Path, nxdt: Path, tmp_path: Path) -> None:
    copy = jobs.into(hub, tmp_path / "nxdt", "--tp_size 4 --kv_size_multiplier 2 --qkv_linear True")
    path = copy / "model" / "dp_rank_00_tp_rank_02_pp_rank_00.pt"
    data = torch.load(path)
    name = "model.layers.0.self_attn.qkv_proj.weight_k"
    torch.save({**data, name: data[name] + 1}, path)
    with pytest.raises(ValueError, match="do not hold copies of K/V heads as on trn1: the files are damaged"):
        jobs.back(copy, tmp_path / "out", f"--config {hub}/config.json")
    path.unlink()
    with pytest.raises(FileNotFoundError, match="that of dp 0, tp 2, pp 0 is missing"):
        jobs.back(copy, tmp_path / "out", f"--config {hub}/config.json")
    with pytest.raises(FileNotFoundError, match="holds no files of NxD"):
        jobs.back(hub, tmp_path / "out", f"--config {hub}/config.json")


def test_sources_that_are_none(hub: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    torch.save([1], tmp_path / "list.pt")
    torch.save({"weights": {"a": torch.zeros(1)}}, tmp_path / "nested.pt")
    for source, said in (("empty", "holds no weights: neither"), ("none", "there is no such folder or file")):
        with pytest.raises(FileNotFoundError, match=said):
            jobs.into(tmp_path / source, tmp_path / "out", f"--config {hub}/config.json")
    for source, said in (("list.pt", "only list"), ("nested.pt", "only weights: --model_key says under which key")):
        with pytest.raises(ValueError, match=f"holds no state dict, {said}"):
            jobs.into(tmp_path / source, tmp_path / "out", f"--config {hub}/config.json")
    with pytest.raises(ValueError, match="give --input_dir, a folder or file with the weights, or --hf_model_name"):
        jobs.run(f"--convert_from_full_state --output_dir {tmp_path}")
    with pytest.raises(ValueError, match="give --input_dir, the folder of a checkpoint of NxD Training"):
        jobs.run(f"--convert_to_full_state --output_dir {tmp_path}")


def test_what_is_there_stays(hub: Path, nxdt: Path, tmp_path: Path) -> None:
    before = sorted((nxdt / "model").iterdir())
    with pytest.raises(FileExistsError, match=r"model holds \*.pt files already: give another --output_dir, or --force"):
        jobs.into(hub, nxdt, "--tp_size 2")
    assert sorted((nxdt / "model").iterdir()) == before
    for name, said in (("hub", r"holds \*.safetensors files already"), ("file.pt", "file.pt exists: give another")):
        jobs.back(nxdt, tmp_path / name, f"--config {hub}/config.json")
        with pytest.raises(FileExistsError, match=said):
            jobs.back(nxdt, tmp_path / name, f"--config {hub}/config.json")
        jobs.back(nxdt, tmp_path / name, f"--config {hub}/config.json --force")
    copy = jobs.into(hub, tmp_path / "nxdt", "--tp_size 2")
    jobs.into(hub, copy, "--force")
    assert [path.name for path in copy.iterdir()] == ["model"] and len(list((copy / "model").iterdir())) == 1
