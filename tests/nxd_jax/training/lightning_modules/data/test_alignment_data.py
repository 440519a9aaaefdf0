"""`ModelAlignmentDataModule`: where rows come from, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from nxd_jax.training.lightning_modules.data.model_alignment_data_module import ModelAlignmentDataModule, strategy_of
from nxd_jax.training.lightning_modules.data.sft_data_module import SFTDataModule
from tests.nxd_jax.training.data import corpus

pytestmark = [pytest.mark.usefixtures("ranks"), *corpus.MARKS]

ROWS = [{"input": f"{k}:", "output": f"{k * k}"} for k in range(9)]


class FakeTrainer:
    world_size = 1
    ckpt_path = None
    limit_val_batches: Any = 0


def module(
    folder: Path,
    data: dict[str, Any] | None = None,
    strategy: dict[str, Any] | None = None,
    kind: type[ModelAlignmentDataModule] = ModelAlignmentDataModule,
) -> ModelAlignmentDataModule:
    corpus.tokenizer().save_pretrained(str(folder / "tokenizer"))
    cfg = {
        "trainer": {"devices": 1},
        "distributed_strategy": {},
        "data": {
            "micro_batch_size": 1,
            "global_batch_size": 2,
            "train_dir": str(folder / "rows.jsonl"),
            "val_dir": None,
            "seq_length": 32,
            "tokenizer": {"type": str(folder / "tokenizer")},
            **(data or {}),
        },
        "model": {"model_config": None},
        "model_alignment_strategy": {"sft": {"packing": False}} if strategy is None else strategy,
    }
    return kind(OmegaConf.create(cfg), FakeTrainer())


def jsonl(folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow", "folder", "saved"])
def test_files_of_every_kind(kind: str, tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    file = jsonl(tmp_path, ROWS)
    expected = module(tmp_path)
    expected.setup("fit")
    if kind == "json":
        file = tmp_path / "rows.json"
        file.write_text(json.dumps(ROWS))
    elif kind == "parquet":
        file = tmp_path / "rows.parquet"
        datasets.Dataset.from_list(ROWS).to_parquet(str(file))
    elif kind in ("arrow", "saved"):
        file = tmp_path / "set"
        datasets.Dataset.from_list(ROWS).save_to_disk(str(file))
        if kind == "arrow":
            (file,) = file.glob("*.arrow")
    elif kind == "folder":
        (tmp_path / "parts").mkdir()
        for part, rows in (("a", ROWS[:4]), ("b", ROWS[4:])):
            (tmp_path / "parts" / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        file = tmp_path / "parts"
    found = module(tmp_path, {"train_dir": str(file)})
    found.setup("fit")
    rows, wanted = found.data_sets["train"], expected.data_sets["train"]
    assert len(rows) == len(wanted) == len(ROWS)
    assert all(torch.equal(rows[k][name], wanted[k][name]) for k in range(len(rows)) for name in rows[k])
    assert found.data_sets["val"] is None


def test_only_the_first_rows(tmp_path: Path) -> None:
    jsonl(tmp_path, ROWS)
    found = module(tmp_path, {"dev_choose_samples": 4})
    found.setup("fit")
    assert len(found.data_sets["train"]) == 4


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        ({"train_dir": "none.jsonl"}, FileNotFoundError, "data.train_dir=none.jsonl: there is no file or folder none.jsonl"),
        ({"tokenizer": None}, ValueError, "data.tokenizer.type is missing"),
        ({"tokenizer": {"type": "./none"}}, FileNotFoundError, "data.tokenizer: there is no none"),
        ({"prompt_name": "x"}, ValueError, "templates of promptsource cannot be used"),
        ({"chat_template": "none.jinja"}, FileNotFoundError, "data.chat_template: there is no file none.jinja"),
        ({"chat_template": True}, ValueError, "the tokenizer has no chat template"),
        ({"train_dir": "words.txt"}, ValueError, "words.txt is plain text; rows with columns are needed"),
        ({"train_dir": "empty.jsonl"}, ValueError, "data.train_dir=empty.jsonl has no rows"),
    ],
)
def test_mistakes(data: dict[str, Any], error: type[Exception], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path, ROWS)
    (tmp_path / "words.txt").write_text("words")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(error, match=text):
        module(tmp_path, data).setup("fit")


def test_strategies() -> None:
    assert strategy_of({}) is None
    assert strategy_of({"model_alignment_strategy": {"dpo": {}, "peft": {}}}) == "dpo"
    with pytest.raises(ValueError, match="has sft and dpo: give one of sft, dpo, orpo"):
        strategy_of({"model_alignment_strategy": {"sft": {}, "dpo": {}}})
    with pytest.raises(ValueError, match="has none of its strategies"):
        strategy_of({"model_alignment_strategy": {"peft": {}}})


@pytest.mark.parametrize("packed", [True, False])
def test_the_module_of_first_releases(packed: bool, tmp_path: Path) -> None:
    """`data.packing`, without `model_alignment_strategy`, and the key of later files."""
    jsonl(tmp_path, ROWS)
    found = [
        module(tmp_path, {"packing": packed}, {"sft": {}}, SFTDataModule),
        module(tmp_path, {"packing": not packed}, {"sft": {"packing": packed}}, SFTDataModule),
        module(tmp_path, None, {"sft": {"packing": packed}}),
    ]
    found[0].config.model_alignment_strategy = None
    for one in found:
        one.setup("fit")
    first, second, third = ([row["labels"].tolist() for row in one.data_sets["train"]] for one in found)
    assert first == second == third and (len(first) < len(ROWS)) is packed


def test_the_module_of_first_releases_is_for_fine_tuning(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"SFTDataModule reads rows for fine-tuning, and the file has model_alignment_strategy.dpo"):
        module(tmp_path, strategy={"dpo": {}}, kind=SFTDataModule)
