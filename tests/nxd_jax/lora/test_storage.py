"""Folders with adapters: save_lora, NxD's files for each rank, save_checkpoint, and what LoraConfig loads from them."""

from __future__ import annotations

import json
import logging
import pathlib
from typing import Any

import pytest
import torch

from nxd_jax.modules.lora import LoraConfig, LoraModel, get_lora_model, storage
from nxd_jax.tensor_parallel import rank_states
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.lora.test_model import MODES, TARGETS, Block, made, results, same


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lora_adapter`, where configurations go by default, is in the test's own folder."""
    monkeypatch.chdir(tmp_path)


def loaded(directory: Any, tag: str | None = None, seed: int = 0, **options: Any) -> LoraModel:
    """A model as scripts resume it."""
    torch.manual_seed(seed)
    config = LoraConfig(load_lora_from_ckpt=True, lora_save_dir=str(directory), lora_load_tag=tag, **options)
    model = get_lora_model(Block().to("xla"), config)
    assert isinstance(model, LoraModel)
    return model


def files(path: pathlib.Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


# -- save_lora ---------------------------------------------------------------------------------------


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("tag", [None, "step_3"])
def test_save_and_load(nxd: Nxd, tmp_path: pathlib.Path, tag: str | None, inside: bool) -> None:
    nxd(4, tp=2)
    model = made(bias="lora_only", use_rslora=True, save_lora_config_adapter=inside)
    model.save_lora(str(tmp_path / "out"), tag)
    expected = [f"{tag}/adapter_model.pt" if tag else "adapter_model.pt", *([] if inside else ["adapter_config.json"])]
    assert files(tmp_path / "out") == sorted(expected)
    nxd(4, tp=4)
    again = loaded(tmp_path / "out", tag)
    assert again.lora_config.use_rslora and again.lora_config.bias == "lora_only" and again.lora_config.target_modules == TARGETS
    assert again.lora_config.lora_rank == 2 and again.lora_config.load_lora_from_ckpt
    want = results(again)
    nxd(4, tp=2)
    torch.testing.assert_close(want, results(made(bias="lora_only", use_rslora=True)), rtol=1e-4, atol=1e-5)
    other = made(stirred=8, bias="lora_only", use_rslora=True)
    other.load_lora(str(tmp_path / "out"), tag)
    torch.testing.assert_close(results(other), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", [m for m in MODES if m.startswith(("base", "merged"))])
def test_save_with_the_base(nxd: Nxd, mode: str) -> None:
    nxd(2, tp=2)
    source = made(**MODES[mode])
    source.save_lora()
    assert files(pathlib.Path("lora_adapter")) == ["adapter_config.json"] * (mode != "merged") + ["adapter_model.pt"]
    data = torch.load("lora_adapter/adapter_model.pt")
    assert data["up.weight"].shape == (16, 8)
    other = made(seed=5, stirred=8, lora_save_dir="lora_adapter")
    other.load_state_dict()
    assert same(other, source)


def test_the_configuration_file(nxd: Nxd) -> None:
    nxd(2, tp=2)
    made(lora_dropout=0.25).checkpoint_state()
    data = json.loads(pathlib.Path("lora_adapter/adapter_config.json").read_text())
    assert data["r"] == data["lora_rank"] == 2 and data["lora_dropout"] == 0.25 and data["target_modules"] == TARGETS


# -- files of NxD's save_checkpoint --------------------------------------------------------------------


def rank_files(model: LoraModel, folder: pathlib.Path, xser: bool = False) -> None:
    """Each tensor parallel rank's own file, as NxD writes them."""
    from torch_bridge.torch_xla.utils import serialization

    folder.mkdir(parents=True)
    for tp, state in enumerate(rank_states.split(dict(model.state_dict()), [0, 1])):
        path = folder / f"dp_rank_00_tp_rank_{tp:02d}_pp_rank_00.pt"
        if not xser:
            torch.save(state, path)
            continue
        path.with_suffix(".pt.tensors").mkdir()
        references = {}
        for k, (name, value) in enumerate(state.items()):
            references[name] = serialization.TensorReference(k) if isinstance(value, torch.Tensor) else value
            if isinstance(value, torch.Tensor):
                torch.save(value, path.with_suffix(".pt.tensors") / f"tensor_{k}.pt")
        torch.save(references, path)


@pytest.mark.thorough(keep=5)
@pytest.mark.parametrize("xser", [False, True])
@pytest.mark.parametrize("inner, tag", [("model", "t1"), ("model", "t1/model"), (".", "t1"), (".", "t1/model")])
def test_files_of_every_rank(nxd: Nxd, tmp_path: pathlib.Path, inner: str, tag: str, xser: bool) -> None:
    nxd(2, tp=2)
    source = made(save_lora_config_adapter=True, merge_sharded_lora=False)
    rank_files(source, tmp_path / "c" / "t1" / inner, xser)
    assert same(loaded(tmp_path / "c", tag), source)


def test_files_with_full_tensors_load_on_any_number_of_ranks(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(2, tp=2)
    source = made(save_lora_config_adapter=True)
    rank_files(source, tmp_path / "c" / "t")
    want = results(source)
    nxd(4, tp=4)
    torch.testing.assert_close(results(loaded(tmp_path / "c", "t")), want, rtol=1e-4, atol=1e-5)
    nxd(2, tp=2)
    rank_files(made(save_lora_config_adapter=True, merge_sharded_lora=False), tmp_path / "parts" / "t")
    nxd(4, tp=4)
    with pytest.raises(ValueError, match="full shape"):
        loaded(tmp_path / "parts", "t")


def test_a_configuration_of_the_original_as_an_object(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(1)
    source = made()
    torch.save(dict(source.state_dict()) | {"lora_config": source.lora_config}, tmp_path / "dp_rank_00_tp_rank_00_pp_rank_00.pt")
    assert same(loaded(tmp_path), source)


# -- what is missing or does not fit ---------------------------------------------------------------------


def test_nothing_there(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(1)
    with pytest.raises(FileNotFoundError, match="no LoRA checkpoint in .*nowhere.*There is no directory .*nowhere: set lora_save_dir"):
        loaded(tmp_path / "nowhere", "t")
    (tmp_path / "c" / "t1").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="c has t1: is one of them the tag, lora_load_tag"):
        loaded(tmp_path / "c")
    (tmp_path / "c" / "t1" / "notes.txt").touch()
    with pytest.raises(
        FileNotFoundError,
        match="expected adapter_model.pt, adapter_model.safetensors or dp_rank_00_tp_rank_00_pp_rank_00.pt.*has notes.txt",
    ):
        loaded(tmp_path / "c", "t1")


def test_without_a_configuration(nxd: Nxd, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    nxd(1)
    source = made()
    source.save_lora(str(tmp_path / "c"))
    (tmp_path / "c" / "adapter_config.json").unlink()
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        again = loaded(tmp_path / "c", lora_rank=2, lora_alpha=4, target_modules=TARGETS)
    assert "no configuration with" in caplog.text and same(again, source)


def test_configurations_that_do_not_fit(nxd: Nxd, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    nxd(1)
    source = made()
    source.save_lora(str(tmp_path / "c"))
    with pytest.raises(
        ValueError, match=r"the adapters of .*adapter_model.pt have lora_rank=2, lora_alpha=4.*load_lora_from_ckpt=True, which takes"
    ):
        made(lora_alpha=3).load_lora(str(tmp_path / "c"))
    path = tmp_path / "c" / "adapter_config.json"
    path.write_text(json.dumps(source.lora_config.to_dict() | {"of_a_later_release": 1}))
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        assert same(loaded(tmp_path / "c"), source)
    assert "unknown fields of_a_later_release are ignored" in caplog.text
    path.write_text("[]")
    with pytest.raises(ValueError, match="adapter_config.json must hold the fields of a LoRA configuration, got list"):
        loaded(tmp_path / "c")
    path.write_text("{")
    with pytest.raises(ValueError, match="adapter_config.json is no JSON"):
        loaded(tmp_path / "c")
    torch.save([1], tmp_path / "c" / "adapter_model.pt")
    with pytest.raises(ValueError, match="adapter_model.pt must hold a state dict, got list"):
        loaded(tmp_path / "c")


def test_files_run_no_code(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (open, (str(tmp_path / "written"), "w"))

    torch.save({"x": Evil()}, tmp_path / "adapter_model.pt")
    nxd(1)
    with pytest.raises(Exception, match="Weights only load failed"):
        loaded(tmp_path)
    assert not (tmp_path / "written").exists()


def test_other_kinds_of_checkpoints(nxd: Nxd, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nxd(1)
    source = made()
    state, config = source.state_dict(), source.lora_config.to_dict()
    monkeypatch.setattr(storage, "READERS", [*storage.READERS, lambda path: storage.Source(path, config, lambda model: state)])
    assert same(loaded(tmp_path), source)


# -- nxd.save_checkpoint ---------------------------------------------------------------------------------


def test_checkpoint_targets(nxd: Nxd) -> None:
    nxd(2, tp=2)
    model = made()
    known = model.tensors()
    adapters = [n for n in known if ".lora_" in n]
    stored = [n.replace("_qkv", s) for n in adapters for s in (("_q", "_k", "_v") if n.endswith("_qkv") else ("_qkv",))]
    found = model.checkpoint_targets(stored)
    assert list(found) == adapters and all(found[n] is known[n] for n in found)
    assert set(model.checkpoint_targets(list(known))) == set(known)
    base = set(known) - set(adapters)
    assert model.tensors()["up.lora_B.weight"].any() and set(model.checkpoint_targets(base)) == base
    assert not model.tensors()["up.lora_B.weight"].any()
    with pytest.raises(ValueError, match="none of the 1 names in the state dict is in the model"):
        model.checkpoint_targets(["x"])
    with pytest.raises(ValueError, match="adapters of the checkpoint have lora_rank=3"):
        model.checkpoint_targets(adapters, LoraConfig(lora_rank=3).to_dict())


@pytest.mark.parametrize("mode", ["adapters", "adapters with biases and head", "base and adapters"])
def test_save_checkpoint(nxd: Nxd, tmp_path: pathlib.Path, mode: str) -> None:
    checkpoint = pytest.importorskip("nxd_jax.trainer.checkpoint")
    nxd(4, tp=2)
    source = made(save_lora_config_adapter=True, **MODES[mode])
    checkpoint.save_checkpoint(str(tmp_path / "c"), tag="t", model=source)
    assert same(loaded(tmp_path / "c", "t", seed=5 if mode.startswith("base") else 0, **MODES[mode]), source)
    want = results(source)
    nxd(4, tp=4)
    torch.testing.assert_close(results(loaded(tmp_path / "c", "t/model", **MODES[mode])), want, rtol=1e-4, atol=1e-5)
    model = made(stirred=8, **MODES[mode])
    checkpoint.load_checkpoint(str(tmp_path / "c"), tag="t", model=model)
    torch.testing.assert_close(results(model), want, rtol=1e-4, atol=1e-5)


def test_save_checkpoint_merged(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    checkpoint = pytest.importorskip("nxd_jax.trainer.checkpoint")
    nxd(2, tp=2)
    source = made(**MODES["merged"])
    checkpoint.save_checkpoint(str(tmp_path / "c"), tag="t", model=source)
    torch.manual_seed(5)
    plain = Block().to("xla")
    checkpoint.load_checkpoint(str(tmp_path / "c"), tag="t", model=plain)
    assert same(plain, source)
    model = made(seed=5, stirred=None, **MODES["merged"])
    checkpoint.load_checkpoint(str(tmp_path / "c"), tag="t", model=model)
    assert same(model, source)
