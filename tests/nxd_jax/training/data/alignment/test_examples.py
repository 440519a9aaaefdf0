"""Rows of prompt and answer as token ids."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from nxd_jax.training.data.alignment import examples
from tests.nxd_jax.training.data import corpus

ROWS = [{"input": f"question {k}? ", "output": "yes " * (k % 5 + 1)} for k in range(12)]
MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three?"},
    {"role": "assistant", "content": "Four."},
]
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def ids(text: str) -> list[int]:
    found: list[int] = corpus.tokenizer()(text, add_special_tokens=False)["input_ids"]
    return found


def tokenize(rows: list[dict[str, Any]], length: int = 64, **rules: Any) -> list[tuple[list[int], list[bool]]]:
    made = examples.tokenize(rows, examples.Rules(corpus.tokenizer(), length, **rules), "data.train_dir=rows")
    return [(made.ids[slice(*made.bounds(k))].tolist(), made.learned[slice(*made.bounds(k))].tolist()) for k in range(len(made))]


@pytest.mark.parametrize("batch", [1000, 5])
def test_prompt_and_answer(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "TEXTS", batch)
    begin, end = corpus.tokenizer().bos_token_id, corpus.tokenizer().eos_token_id
    for row, (found, learned) in zip(ROWS, tokenize(ROWS), strict=True):
        prompt, answer = [begin, *ids(row["input"])], [*ids(row["output"]), end]
        assert found == prompt + answer
        assert learned == [False] * len(prompt) + [True] * len(answer)


def test_a_conversation_learns_what_the_assistant_says() -> None:
    ((found, learned),) = tokenize([{"messages": MESSAGES}], length=256, template=CHATML)
    tokenizer = corpus.tokenizer()
    assert tokenizer.decode(found) == "".join(f"<{m['role']}>{m['content']}<end>\n" for m in MESSAGES)
    said = [i for i, mark in zip(found, learned, strict=True) if mark]
    assert tokenizer.decode(said) == "Two.<end>\nFour.<end>\n"


def test_input_and_output_in_a_chat_template() -> None:
    (found, learned), *_ = tokenize(ROWS, length=256, chat=True, template=CHATML)
    assert corpus.tokenizer().decode(found) == "<user>question 0? <end>\n<assistant>yes <end>\n"
    assert corpus.tokenizer().decode([i for i, mark in zip(found, learned, strict=True) if mark]) == "yes <end>\n"


BODY = "{% if add_generation_prompt %}<assistant>{% endif %}"
LOST = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}" + BODY
CHANGING = "{{ messages | length }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}" + BODY


@pytest.mark.parametrize(
    ("row", "template", "text"),
    [
        ({"input": "a", "output": " "}, None, "row 1: output is empty"),
        ({"input": None, "output": "b"}, None, "row 1: input is None, not text"),
        ({"messages": MESSAGES}, LOST, "row 1: the chat template loses the answer in message 2"),
        ({"messages": MESSAGES}, CHANGING, "row 1: the chat template writes what stands before message 2 in another way"),
        ({"messages": MESSAGES}, "{{ raise_exception('no system') }}", "row 1: the chat template refuses it: "),
        ({"messages": MESSAGES[:2]}, CHATML, "row 1: no message is the assistant's"),
        ({"messages": []}, CHATML, "row 1: messages must be a list"),
        ({"messages": [{"role": "user"}]}, CHATML, "row 1: message 0 must be"),
        ({"messages": [{"role": "assistant", "content": ""}]}, CHATML, "row 1: the answer in message 0 is empty"),
    ],
)
def test_rows_that_teach_nothing(row: dict[str, Any], template: str | None, text: str, caplog: pytest.LogCaptureFixture) -> None:
    good = {"messages": [MESSAGES[1], MESSAGES[2]]} if "messages" in row else ROWS[0]
    if template not in (None, CHATML):
        good = row
    with pytest.raises(ValueError, match="data.train_dir=rows: . of 2 rows cannot be trained on: ") as error:
        tokenize([good, row], template=template)
    assert text in str(error.value) and "data.bad_rows=drop" in str(error.value)
    if good is not row:
        with caplog.at_level(logging.WARNING, "nxd_jax"):
            assert len(tokenize([good, row], template=template, bad="drop")) == 1
        assert text in caplog.text and "They are left out" in caplog.text


def test_rows_that_are_too_long(caplog: pytest.LogCaptureFixture) -> None:
    rows = [ROWS[0], {"input": "a" * 10, "output": "b" * 100}, {"input": "a" * 100, "output": "b"}]
    with pytest.raises(
        ValueError, match=r"2 of 3 rows have more than data.seq_length=64 tokens: row 1: \d+ tokens; row 2: .*data.long_rows=cut"
    ):
        tokenize(rows)
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        assert tokenize(rows, long="drop") == tokenize(rows[:1])
    assert "2 of 3 rows" in caplog.text
    cut = tokenize(rows, long="cut")
    assert len(cut) == 2 and len(cut[1][0]) == 64 and any(cut[1][1])
    with pytest.raises(ValueError, match="data.long_rows: 'often' must be error, drop or cut"):
        tokenize(rows, long="often")
    with pytest.raises(ValueError, match="data.bad_rows: 'cut' must be error or drop"):
        tokenize(rows, bad="cut")


def test_columns_and_tokenizers() -> None:
    with pytest.raises(
        ValueError, match=r"data.train_dir=rows has no column 'output'; it has 'input', 'answer'. Rows need .*, or 'messages'"
    ):
        tokenize([{"input": "a", "answer": "b"}])
    with pytest.raises(ValueError, match="the tokenizer has no chat template, which rows with messages need: set data.chat_template"):
        tokenize([{"messages": MESSAGES}])

    class NoEnd:
        eos_token_id = None

    with pytest.raises(ValueError, match="data.tokenizer.type: the tokenizer has no eos_token"):
        examples.tokenize(ROWS, examples.Rules(NoEnd(), 8), "rows")
