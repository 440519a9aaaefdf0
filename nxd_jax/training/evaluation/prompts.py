"""Prompts and right answers of an evaluation, from rows of a file by Jinja templates."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nxd_jax.training.data.alignment import texts

logger = logging.getLogger("nxd_jax")


class Question(NamedTuple):
    """prompt: what the model is given. label: the right answer."""

    prompt: str
    label: str


def read(place: str, prompt_template: str | None = None, label_template: str | None = None) -> list[Question]:
    """Questions of a file or folder of rows, or of the split "test" of a set on the Hugging Face hub.

    Templates are rendered with a row's columns; without one, the columns `prompt` and `label` (or `input` and `output`) are taken.

    Raises FileNotFoundError, ValueError for rows that have neither.
    """
    rows = _rows(place)
    prompt, label = _template(prompt_template, "--prompt_template"), _template(label_template, "--label_template")
    found = []
    for number, row in enumerate(rows):
        found.append(
            Question(
                _text(row, prompt, ("prompt", "input"), "--prompt_template", number, place),
                _text(row, label, ("label", "output"), "--label_template", number, place),
            )
        )
    return found


def _rows(place: str) -> Sequence[texts.Row]:
    if Path(place).exists() or place.startswith((".", "/", "~")) or place.endswith((".json", ".jsonl", ".arrow", ".parquet")):
        return texts.read([str(Path(place).expanduser())], "--data_dir")
    import datasets

    try:
        return datasets.load_dataset(place, split="test").to_list()
    except Exception as error:  # the library's and the network's own
        raise FileNotFoundError(
            f"--data_dir {place}: there is no such file, and no set of this name with a split 'test' on the Hugging Face hub ({error})"
        ) from error


def _template(text: str | None, option: str) -> Any:
    if text is None:
        return None
    from jinja2 import Environment, StrictUndefined, TemplateSyntaxError

    try:
        return Environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(text)
    except TemplateSyntaxError as error:
        raise ValueError(f"{option} is no Jinja template: {error}") from error


def _text(row: texts.Row, template: Any, columns: Sequence[str], option: str, number: int, place: str) -> str:
    if template is not None:
        from jinja2 import UndefinedError

        try:
            return str(template.render(**row))
        except UndefinedError as error:
            raise ValueError(f"{option}: {error} in row {number} of {place}, which has {', '.join(row)}") from error
    value = next((row[name] for name in columns if row.get(name) is not None), None)
    if not isinstance(value, str):
        raise ValueError(
            f"row {number} of {place} has no text in {' or '.join(columns)}; it has {', '.join(row)}: say what to take with {option}"
        )
    return value
