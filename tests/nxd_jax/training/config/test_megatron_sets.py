"""What `nxdt-train --check` says of Megatron sets that are there, and do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.nxd_jax.training.config.broken import GPT
from tests.nxd_jax.training.config.test_checking import folder, report
from tests.nxd_jax.training.data.megatron import corpora

__all__ = ["folder"]


def said(place: Path, changes: dict[str, Any]) -> list[str]:
    return [p.text for p in report(GPT, place, changes).errors if p.key == "data.data_prefix"]


@pytest.mark.parametrize(("ids", "wrong"), [([0, 1, 2], 2), ([0, -1, 1], -1)])
def test_ids_of_another_tokenizer(ids: list[int], wrong: int, folder: Path) -> None:
    corpora.write(folder / "a", [ids] * 10, np.int32)
    wanted = f"a has the token id {wrong}, and data.tokenizer has 2 tokens: the set is of another tokenizer"
    assert said(folder, {"data.data_prefix": ["a"]}) == [wanted]


def test_an_index_that_does_not_fit(folder: Path) -> None:
    corpora.write(folder / "a", [[0, 1]] * 10)
    corpora.write(folder / "b", [[0, 1]] * 10)
    (folder / "a.bin").write_bytes(b"1234")
    found = said(folder, {"data.data_prefix": {"train": [1, "a", 1, "b"], "validation": ["c"], "test": ["d"]}})
    assert [text.split(":")[0] for text in found] == ["a.idx does not fit a.bin", "c"]


def test_a_set_without_tokens(folder: Path) -> None:
    corpora.write(folder / "a", [[]] * 98 + [[0]] * 2)
    assert said(folder, {"data.data_prefix": ["a"], "data.splits_string": "98,2,0"}) == ["documents 0 to 97 of a (train) have no tokens"]


def test_how_often_the_set_is_gone_through(folder: Path) -> None:
    """98 documents of 20,000 tokens are 957 samples of 2048."""
    found = report(GPT, folder, {"trainer.max_steps": 10, "model.optim.sched.warmup_steps": 2, "data.global_batch_size": 1024})
    assert f"{10 * 1024 / ((98 * 20_000 - 1) // 2048):.4g} times through the set" in str(found)


def test_names_on_the_hub_are_not_looked_up(folder: Path) -> None:
    found = report(GPT, folder, {"data.tokenizer": {"library": "huggingface", "type": "someone/some-tokenizer"}})
    assert not [p for p in found.errors if p.key.startswith("data.")]
