"""What LoRA trained, as a Hugging Face model: its weights with the adapters added."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nxd_jax.checkpoint import reading
from tests.nxd_jax.training import yaml_runs
from tests.nxd_jax.training.converters import jobs
from tests.nxd_jax.training.data import corpus
from tests.nxd_jax.training.test_alignment import ADAPTED, PEFT, SFT, TP2, S, sft_loss, sft_rows, stacked

pytestmark = [pytest.mark.usefixtures("ranks", "variables"), *corpus.MARKS, pytest.mark.core(keep=0)]

ALL = f"{PEFT}.target_modules=[qkv_proj, o_proj, gate_up_proj, down_proj]"
COPIES = ("trainer.devices=4", f"{S}.tensor_model_parallel_size=4", f"{S}.kv_replicator=2")


def trained(file: Path, *changes: str) -> Path:
    yaml_runs.train(file, *ADAPTED, ALL, "model.num_layers=1", "~model.optim.sched", "trainer.max_steps=3", *changes)
    (tag,) = file.parent.joinpath("experiments").rglob("*.ckpt")
    return tag


@pytest.mark.parametrize("layout", [TP2, COPIES], ids=["tp", "copies of K/V heads"])
def test_adapters_are_added(layout: tuple[str, ...], tmp_path: Path) -> None:
    """The model answers as the run that goes on: its next loss is transformers'."""
    import transformers

    file = yaml_runs.write_aligned(tmp_path, "hf_llama3_8B_SFT_lora", SFT)
    tag = trained(file, *layout, f"{PEFT}.save_lora_base=True")
    found = jobs.back(tag, tmp_path / "hub", f"--config {_config(tmp_path)}")
    weights, saved = jobs.weights(found), reading.Folder(tag / "model")
    assert not any("lora" in name for name in weights)
    ours = "model.layers.0.self_attn.{}.weight"
    a, b = (saved.full(f"model.layers.0.self_attn.o_proj.lora_{k}.weight") for k in "AB")
    assert b.abs().max() > 0
    torch.testing.assert_close(weights[ours.format("o_proj")], saved.full(ours.format("o_proj")) + b @ a * (32 / 4), rtol=1e-6, atol=1e-6)
    model = transformers.LlamaForCausalLM.from_pretrained(found, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        loss = float(sft_loss(model, stacked(sft_rows(True), 3)))
    changes = (*ADAPTED, ALL, f"{PEFT}.save_lora_base=True", "model.num_layers=1", "~model.optim.sched", "trainer.max_steps=4", *layout)
    assert yaml_runs.train(file, *changes)[3] == pytest.approx(loss, rel=1e-5)


def test_adapters_without_what_they_need(tmp_path: Path) -> None:
    file = yaml_runs.write_aligned(tmp_path / "alone", "hf_llama3_8B_SFT_lora", SFT)
    tag = trained(file, f"{PEFT}.save_lora_base=False")
    with pytest.raises(
        ValueError, match=r"holds adapters alone \(peft.save_lora_base: False\), without model.layers.0.self_attn.qkv_proj.weight"
    ):
        jobs.back(tag, tmp_path / "hub", f"--config {_config(tmp_path / 'alone')}")
    file = yaml_runs.write_aligned(tmp_path / "both", "hf_llama3_8B_SFT_lora", SFT)
    tag = trained(
        file, f"{PEFT}.save_lora_base=True", f"{PEFT}.save_lora_config_adapter=False", f"+{PEFT}.lora_save_dir={tmp_path / 'lora'}"
    )
    config = f"--config {_config(tmp_path / 'both')}"
    with pytest.raises(ValueError, match=r"holds adapters and not their configuration .*adapter_config.json"):
        jobs.back(tag, tmp_path / "hub", config)
    values = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    (tag / "adapter_config.json").write_text(json.dumps(values | {"lora_rank": 8, "r": 8}))
    with pytest.raises(ValueError, match=r"holds adapters of rank 4, and their configuration says 8: it is another's"):
        jobs.back(tag, tmp_path / "hub", config)
    (tag / "adapter_config.json").write_text(json.dumps(values))
    assert len(jobs.weights(jobs.back(tag, tmp_path / "hub", config))) == 12


def test_adapters_in_files_of_ranks(tmp_path: Path) -> None:
    hub = jobs.hub(tmp_path / "hub", num_hidden_layers=1)
    nxdt = jobs.into(hub, tmp_path / "nxdt", "--tp_size 1 --qkv_linear True")
    (file,) = (nxdt / "model").glob("*.pt")
    torch.save(torch.load(file) | {"model.layers.0.self_attn.o_proj.lora_A.weight": torch.zeros(2, 64)}, file)
    with pytest.raises(
        ValueError, match=r"holds adapters \(LoRA\).*with peft.save_lora_base=True and peft.merge_lora=True, and convert what that saves"
    ):
        jobs.back(nxdt, tmp_path / "back", f"--config {hub}/config.json")


def _config(folder: Path) -> Path:
    """The config.json of a run's model of one layer."""
    values = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "one_layer.json").write_text(json.dumps(values))
    return folder / "one_layer.json"
