"""Prompts with two answers as token ids, by trl's rules written out one by one."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from nxd_jax.training.data.alignment import preferences
from tests.nxd_jax.training.data import corpus
from tests.nxd_jax.training.data.alignment.test_examples import CHATML, MESSAGES

ROWS = [{"prompt": f"Say {k} times: " * (k % 3 + 1), "chosen": "a b " * (k % 4 + 1), "rejected": "no " * (k % 7 + 1)} for k in range(14)]


def rules(length: int = 64, **more: Any) -> preferences.Rules:
    return preferences.Rules(corpus.tokenizer(), length, **more)


def tokenize(rows: list[dict[str, Any]], length: int = 64, **more: Any) -> preferences.PreferenceRows:
    return preferences.tokenize(rows, rules(length, **more), "data.train_dir=rows")


def by_hand(row: dict[str, str], length: int, most: int, mode: str) -> dict[str, list[int]]:
    tokenizer = corpus.tokenizer()
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    p = ids(row["prompt"])
    prompts, answers = {}, {}
    for side in ("chosen", "rejected"):
        full = ids(row["prompt"] + row[side])
        n = len(p) if full[: len(p)] == p else len(p) - 1
        prompts[side], answers[side] = [begin, *full[:n]], [*full[n:], end]
    common = [begin, *p][: min(len(x) for x in prompts.values())]
    longest = max(len(x) for x in answers.values())

    def shorter(x: list[int]) -> list[int]:
        if len(x) + longest <= length:
            return x
        return x[:most] if mode == "keep_start" else x[-most:]

    found = {}
    for side in prompts:
        prompt = shorter(prompts[side])
        answer = answers[side][: length - most] if len(prompt) + longest > length else answers[side]
        fill = length - len(prompt) - len(answer)
        found[f"{side}_input_ids"] = prompt + answer + [0] * fill
        found[f"{side}_attention_mask"] = [1] * (length - fill) + [0] * fill
        found[f"{side}_labels"] = [-100] * len(prompt) + answer + [-100] * fill
    common = shorter(common)
    found["prompt_input_ids"] = [0] * (length - len(common)) + common
    found["prompt_attention_mask"] = [0] * (length - len(common)) + [1] * len(common)
    return found


@pytest.mark.parametrize(
    ("length", "most", "mode"), [(128, 64, "keep_start"), (40, 16, "keep_start"), (40, 16, "keep_end"), (24, 20, "keep_end")]
)
def test_rows_are_those_of_the_rules(length: int, most: int, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        made = tokenize(ROWS, length, max_prompt_length=most, truncation_mode=mode)
    for k, row in enumerate(ROWS):
        found = {name: values.tolist() for name, values in made[k].items()}
        assert found.pop("row") == k
        assert found == by_hand(row, length, most, mode)
    assert ("were cut to max_prompt_length" in caplog.text) == (length < 128)


def test_tokens_that_merge_at_the_seam_belong_to_the_answer() -> None:
    """Nothing is lost: prompt and answer together are the ids of the whole text."""
    tokenizer = corpus.tokenizer()
    found = None
    for text in corpus.TEXTS:
        for at in range(1, len(text) - 1):
            whole = tokenizer(text, add_special_tokens=False)["input_ids"]
            part = tokenizer(text[:at], add_special_tokens=False)["input_ids"]
            if whole[: len(part)] != part and whole[: len(part) - 1] == part[:-1]:
                found = text, at, whole
        if found:
            break
    assert found is not None
    text, at, whole = found
    made = tokenize([{"prompt": text[:at], "chosen": text[at:], "rejected": text[at:] + "!"}], 128)
    ids = made[0]["chosen_input_ids"].tolist()
    assert ids[: len(whole) + 2] == [tokenizer.bos_token_id, *whole, tokenizer.eos_token_id]


def test_conversations() -> None:
    row = {"prompt": MESSAGES[:2], "chosen": [MESSAGES[2]], "rejected": [{"role": "assistant", "content": "Nine."}]}
    made = tokenize([row], 128, template=CHATML)
    tokenizer = corpus.tokenizer()
    labels = made[0]["rejected_labels"]
    assert tokenizer.decode(labels[labels >= 0]) == "Nine.<end>\n</s>"
    ids = made[0]["prompt_input_ids"][made[0]["prompt_attention_mask"] > 0]
    assert tokenizer.decode(ids) == "<s><system>Be short.<end>\n<user>One?<end>\n<assistant>"


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "row 1: chosen and rejected are the same"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "row 1: chosen is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "row 1: rejected is None, not text"),
        ({"prompt": "a " * 90, "chosen": "b " * 90, "rejected": "c"}, "row 1: 64 tokens of prompt and "),
    ],
)
def test_rows_without_a_preference(row: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="1 of 2 rows cannot be trained on") as error:
        tokenize([ROWS[0], row], max_prompt_length=64)
    assert text in str(error.value)
    assert len(tokenize([ROWS[0], row], max_prompt_length=64, bad="drop")) == 1


def test_mistakes() -> None:
    with pytest.raises(ValueError, match=r"data.train_dir=rows has no column 'rejected'; it has 'prompt', 'chosen'"):
        tokenize([{"prompt": "a", "chosen": "b"}])
    with pytest.raises(ValueError, match="truncation_mode: 'middle' must be keep_start or keep_end"):
        tokenize(ROWS, truncation_mode="middle")


def test_a_fingerprint_is_of_the_ids() -> None:
    first, again, other = tokenize(ROWS), tokenize(ROWS), tokenize(ROWS[1:])
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    assert torch.equal(first[2]["row"], torch.tensor(2))
