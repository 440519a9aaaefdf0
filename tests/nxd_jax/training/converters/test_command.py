"""`nxdt-convert`: what it says, its status, and that both sides compute the same."""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_jax.training.converters import command, converting, logits
from nxd_jax.training.converters.sizes import Layout
from tests.nxd_jax.training.converters import jobs

SMALL = {"num_hidden_layers": 2}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.hub(tmp_path_factory.mktemp("model") / "hub", **SMALL)


def words(*given: Any) -> list[str]:
    return [str(word) for word in given]


def test_what_it_says(hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    into = words(
        "--convert_from_full_state", "--input_dir", hub, "--output_dir", tmp_path / "nxdt", "--tp_size", 4, "--kv_size_multiplier", 2
    )
    assert command.main(into) == 0
    out = capsys.readouterr().out
    assert out == (
        f"{hub} (Hugging Face, 19 tensors, 0.00 GB) -> {tmp_path}/nxdt/model (NxD Training, hf style, tp 4, pp 1, K/V heads 2 times as on trn1)\n"
    )
    assert command.main(into) == 2
    assert "nxdt-convert: " in (err := capsys.readouterr().err) and "--force to replace" in err
    back = words(
        "--convert_to_full_state", "--input_dir", tmp_path / "nxdt", "--output_dir", tmp_path / "back.pt", "--config", hub / "config.json"
    )
    assert command.main(back) == 0
    jobs.same(torch.load(tmp_path / "back.pt"), jobs.weights(hub))
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    assert "checkpoint_converter.py" in capsys.readouterr().out


def test_what_is_not_installed(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(*_: Any) -> Any:
        raise ModuleNotFoundError("No module named 'hydra'", name="hydra.core")

    monkeypatch.setattr(converting, "setting", missing)
    given = words("--convert_from_full_state", "--input_dir", hub, "--output_dir", tmp_path / "nxdt")
    assert command.main(given) == 2
    assert "nxdt-convert: hydra.core is not installed: pip install 'nxd-jax[nxdt]'" in capsys.readouterr().err


def test_a_model_of_the_hub(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of that name, or what huggingface_hub downloads: safetensors, else pytorch_model.bin."""
    jobs.run(f"--convert_from_full_state --hf_model_name {hub} --output_dir {tmp_path / 'nxdt'}")
    asked: list[tuple[str, list[str]]] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=download))
    assert converting.downloaded("someone/model") == tmp_path
    assert [name for name, _ in asked] == ["someone/model"] * 2
    assert "*.safetensors" in asked[0][1] and "pytorch_model*.bin" in asked[1][1] and "*.safetensors" not in asked[1][1]


def test_verify_compares_logits(hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own, both ways."""
    into = words(
        "--convert_from_full_state", "--input_dir", hub, "--output_dir", tmp_path / "nxdt", "--tp_size", 4, "--kv_size_multiplier", 2
    )
    assert command.main([*into, "--hw_backend", "trn2", "--verify"]) == 0
    assert "logits of 2 x 16 random tokens differ by at most" in (out := capsys.readouterr().out) and out.endswith("the same\n")
    back = words(
        "--convert_to_full_state", "--input_dir", tmp_path / "nxdt", "--output_dir", tmp_path / "back", "--config", hub / "config.json"
    )
    assert command.main([*back, "--verify"]) == 0
    assert capsys.readouterr().out.endswith("the same\n")
    (tmp_path / "back" / "model.safetensors").unlink()
    with pytest.raises(RuntimeError, match="the models could not be compared: FileNotFoundError"):
        logits.verify(tmp_path / "back", tmp_path / "nxdt", {**jobs.SIZES, **SMALL}, Layout(tp=4, copies=2))


def test_verify_fails(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(logits, "verify", lambda *_: (0.01, 2.0))
    for style in ("hf", "megatron"):
        into = words("--convert_from_full_state", "--input_dir", hub, "--output_dir", tmp_path / style, "--verify", "--model_style", style)
        assert command.main(into) == 1
        assert "differ by at most 0.01 (the largest is 2): DIFFERENT" in capsys.readouterr().out


def test_what_cannot_be_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(words("--verify", "--input_dir", tmp_path, "--output_dir", tmp_path / "out", "--convert_to_xser")) == 2
    assert "it goes with --convert_from_full_state or --convert_to_full_state" in capsys.readouterr().err


def test_a_namespace_that_no_parser_made(hub: Path, tmp_path: Path) -> None:
    """What is in it counts as given."""
    args = argparse.Namespace(convert_from_full_state=True, input_dir=str(hub), output_dir=str(tmp_path / "nxdt"), tp_size=2)
    line = jobs.CheckpointConverterBase().run(args)
    assert "tp 2, pp 1" in line and "model.norm.weight" in jobs.rank(tmp_path / "nxdt", 1)
