"""`nxdt-train --check`: each mistake is named with its key and its line, and all of them at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nxd_jax.training import registry
from nxd_jax.training.config import checking, loading, trainable
from nxd_jax.training.config.report import Report
from tests.nxd_jax.training.config import conf_files
from tests.nxd_jax.training.config.broken import ERRORS, LLAMA, WARNINGS, Broken


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(conf: str, folder: Path, changes: dict[str, Any]) -> tuple[Any, Path]:
    """A configuration with some changes, and its file."""
    values = conf_files.with_files(conf, folder)
    conf_files.change(values, changes)
    return OmegaConf.create(values), conf_files.write(values, conf, folder)


def report(conf: str, folder: Path, changes: dict[str, Any]) -> Report:
    return checking.check(*written(conf, folder, changes))


@pytest.mark.core(keep=45)
@pytest.mark.parametrize("broken", [*ERRORS, *WARNINGS], ids=lambda b: b.key)
def test_each_mistake_has_its_key_and_line(broken: Broken, folder: Path) -> None:
    cfg, file = written(broken.conf, folder, broken.changes)
    found = checking.check(cfg, file)
    group = {"error": found.errors, "warning": found.warnings, "note": found.notes}[broken.level]
    mine = [p for p in group if p.key == broken.key and broken.text in p.text]
    assert mine, f"{broken.text!r} is not in:\n{found.problems()}"
    assert found.ok == (not found.errors and trainable.trainable(cfg))
    name, line, column = mine[0].where.split(":")
    assert name == file.name
    text = file.read_text().splitlines()[int(line) - 1]
    in_line = text.strip().partition(":")[0]
    assert in_line in broken.key.split(".") and text.index(in_line) == int(column) - 1


def test_all_mistakes_at_once(folder: Path) -> None:
    found = report(LLAMA, folder, {"trainer.max_stesp": 1, "model.optim.lr": "x", "distributed_strategy.tensor_model_parallel_size": 7})
    assert {p.key for p in found.errors} >= {"trainer.max_stesp", "model.optim.lr", "distributed_strategy.tensor_model_parallel_size"}
    lines = [int(p.where.split(":")[1]) for p in found.errors]
    assert [str(p) for p in report(LLAMA, folder, {"precision": conf_files.GONE}).errors] == [
        f"{LLAMA}_config.yaml: precision: is missing; it is keys with values"
    ]
    assert lines == sorted(lines)
    assert not found.ok and "memory and time: not known" in str(found) and "learning rate: not known" in str(found)
    with pytest.raises(ValueError, match="the learning rates are not known"):
        found.plot(folder / "x.svg")


def test_an_interpolation_that_leads_nowhere_is_one_mistake(folder: Path) -> None:
    found = report(LLAMA, folder, {"data.global_batch_size": "${data.micro_batch_siz}"})
    assert [p.text for p in found.errors if p.key == "data.global_batch_size"] == [
        "${data.micro_batch_siz} cannot be resolved: Interpolation key 'data.micro_batch_siz' not found"
    ]
    assert [p.key for p in report(LLAMA, folder, {"trainer.max_steps": "20"}).errors] == ["trainer.max_steps"]


@pytest.mark.parametrize(
    ("text", "where", "said"),
    [
        ("name: a\ntrainer: {devices: 1\nseed: 2\n", "3:", "expected ',' or '}'"),
        ("name: a\n\tseed: 1\n", "2:", "cannot start any token"),
        ("- 1\n- 2\n", "1:1", "it must hold keys with values"),
        ("", "", "it must hold keys with values"),
    ],
)
def test_files_that_are_no_configuration(text: str, where: str, said: str, folder: Path) -> None:
    (folder / "c.yaml").write_text(text)
    found = checking.check_file(folder / "c.yaml")
    assert [p.where.startswith(f"c.yaml:{where}" if where else "c.yaml") for p in found.errors] == [True]
    assert said in str(found)


def test_a_file_in_another_encoding(folder: Path) -> None:
    (folder / "c.yaml").write_bytes(b"name: \xff\xfe\n")
    assert "it is no text in UTF-8" in str(checking.check_file(folder / "c.yaml"))
    with pytest.raises(loading.ConfigError, match="there is no configuration file"):
        checking.check_file(folder / "other.yaml")


def test_keys_that_stand_twice_and_overrides(folder: Path) -> None:
    """What Hydra refuses is said with everything else."""
    _, file = written(LLAMA, folder, {})
    file.write_text(file.read_text() + "seed: 5\n")
    words = [
        "trainer.max_steps=20",
        "trainer.max_stesp=3",
        "trainer.max_time=later",
        "data.global_batch_size=6",
        "+model.zzz=1",
        "~data.nothing",
    ]
    found = checking.check_file(file, words)
    texts = {p.key: p for p in (*found.errors, *found.warnings)}
    last = len(file.read_text().splitlines())
    assert texts["seed"].where == f"{file.name}:{last}:1" and "stands twice, first in line 3" in texts["seed"].text
    assert texts["trainer.max_stesp"].where == "command line"
    assert texts["trainer.max_stesp"].text == "is not in the file; did you mean trainer.max_steps? (+trainer.max_stesp=3 adds it)"
    assert texts["trainer.max_time"].text == "is not in the file (+trainer.max_time=later adds it)"
    assert texts["data.nothing"].where == "command line" and "nothing" in texts["data.nothing"].text
    assert texts["data.global_batch_size"].where == "command line" and "6 must be a multiple" in texts["data.global_batch_size"].text
    assert texts["model.zzz"].where == "command line"
    assert "20 steps" in str(found)


def test_keys_may_stand_in_other_sections(folder: Path) -> None:
    """Those that the original looks up anywhere."""
    moved = {"model.fusions.ring_attention": conf_files.GONE, "data.ring_attention": True}
    moved |= {"distributed_strategy.context_parallel_size": conf_files.GONE, "model.context_parallel_size": 2}
    found = report("hf_llama3_70B_CP", folder, moved)
    assert found.ok and "cp 2" in str(found)
    wrong = report("hf_llama3_70B_CP", folder, {**moved, "data.ring_attention": "on it"})
    assert [p.key for p in wrong.errors if p.key == "data.ring_attention"]


def test_classes_of_ones_own_may_read_any_key(folder: Path) -> None:
    found = report(
        LLAMA, folder, {"model": {"encoder_seq_length": 8, "mine": 1, "_target_": "a.B"}, "data._target_": "a.C", "data.other": 2}
    )
    assert not [p for p in (*found.errors, *found.warnings) if p.key in ("model.mine", "data.other", "model.model_config", "model.optim")]
    registry.register("own_source", object, object)  # type: ignore[arg-type]
    try:
        assert report(LLAMA, folder, {"model_source": "own_source", "model.own": 3}).ok
    finally:
        del registry._ENTRIES["own_source"]


def test_what_this_release_does_not_train(folder: Path) -> None:
    found = report("megatron_llama_7B", folder, {"model_alignment_strategy": {"sft": {"packing": True}}})
    assert not found.ok and "model_alignment_strategy is not trained with model_source: megatron" in found.problems()
    assert trainable.trainable(OmegaConf.create(conf_files.configuration("megatron_llama_7B")))
    for conf in ("hf_llama3_8B", "hf_llama3_8B_SFT_lora", "hf_llama3_8B_DPO", "hf_llama3_8B_ORPO"):
        assert trainable.trainable(OmegaConf.create(conf_files.configuration(conf)))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"input_ids": [1] * 5}, "row 0 of rows.jsonl has 5 tokens, and model.encoder_seq_length is 4096"),
        ({"input_ids": [32000] * 4096}, "has the token id 32000, and vocab_size of config.json is 32000"),
        ({"input_ids": [-1] * 4096}, "has the token id -1"),
        ({"words": [1]}, "has the columns words, and not input_ids"),
    ],
)
def test_first_rows_of_a_set(row: dict[str, Any], said: str, folder: Path) -> None:
    cfg, file = written(LLAMA, folder, {})
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    found = checking.check(cfg, file)
    assert [p.key for p in found.errors if said in p.text] == ["data.train_dir"], found.problems()


def test_rows_of_a_saved_set(folder: Path) -> None:
    import datasets

    columns = {name: [[1] * 128] * 3 for name in ("input_ids", "attention_mask", "labels")}
    datasets.Dataset.from_dict(columns).save_to_disk(folder / "set")
    changes = {"data.train_dir": "set", "model.encoder_seq_length": 128}
    found = report(LLAMA, folder, changes)
    assert next(p.text for p in found.errors if p.key == "data.train_dir").startswith(
        "has 3 rows, and a step needs data.global_batch_size=1024"
    )
    smaller = {
        "trainer.devices": 1,
        "distributed_strategy.tensor_model_parallel_size": 1,
        "data.global_batch_size": 3,
        "trainer.max_steps": 200,
    }
    assert "200 times through the set" in str(report(LLAMA, folder, {**changes, **smaller}))


def test_pictures_of_learning_rates(folder: Path) -> None:
    found = report(LLAMA, folder, {})
    assert "<polyline" in found.plot(folder / "lr.svg").read_text()
    assert found.plot(folder / "lr.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"a picture is a file .svg, .png or .pdf"):
        found.plot(folder / "lr.txt")
