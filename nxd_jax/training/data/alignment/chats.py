"""Conversations as text, by the chat template of a tokenizer, in pieces: what is read, and what the model is to say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nxd_jax.training.data.alignment.bad_rows import NoAnswerError

Message = dict[str, Any]
Piece = tuple[str, bool]
"""A run of text, and whether it is learned."""


class Template:
    """A Jinja template for conversations. text: of `data.chat_template`; None: the tokenizer's own. key: how the tokenizer is called in errors.

    Raises ValueError if there is none.
    """

    def __init__(self, tokenizer: Any, text: str | None, key: str):
        self.tokenizer = tokenizer
        self.text = text
        if text is None and not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"{key}: the tokenizer has no chat template, which rows with messages need: set data.chat_template to a Jinja file, or give rows with the "
                "columns 'input' and 'output'"
            )

    def render(self, messages: Sequence[Message], answer_follows: bool = False) -> str:
        """The text of messages. answer_follows: with what stands before an answer at the end. Raises NoAnswerError for what the template refuses."""
        try:
            found: str = self.tokenizer.apply_chat_template(
                list(messages), chat_template=self.text, tokenize=False, add_generation_prompt=answer_follows
            )
        except Exception as error:  # templates raise their own
            raise NoAnswerError(f"the chat template refuses it: {str(error).splitlines()[0] if str(error) else error!r}") from error
        return found

    def pieces(self, messages: Sequence[Message]) -> list[Piece]:
        """The text of a conversation in runs; the assistant's messages, with what ends them, are learned.

        Raises NoAnswerError for a conversation without an answer, and for templates that lose one or change what came before.
        """
        check_messages(messages)
        found: list[Piece] = []
        done = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self.render(messages[:number], answer_follows=True), self.render(messages[: number + 1])
            if not (before.startswith(done) and after.startswith(before)):
                raise NoAnswerError(f"the chat template writes what stands before message {number} in another way when that is added")
            answer = after[len(before) :]
            if str(message["content"]).strip() not in answer:
                raise NoAnswerError(f"the chat template loses the answer in message {number}")
            found += [(before[len(done) :], False), (answer, True)]
            done = after
        if not found:
            raise NoAnswerError("no message is the assistant's")
        return found

    def answer(self, prompt: Sequence[Message], answer: Sequence[Message]) -> tuple[str, str]:
        """The text of a prompt, and of an answer that follows it."""
        before, after = self.render(prompt, answer_follows=True), self.render([*prompt, *answer])
        if not after.startswith(before):
            raise NoAnswerError("the chat template writes the prompt in another way when an answer follows it")
        return before, after[len(before) :]


def template_text(value: Any) -> str | None:
    """What `data.chat_template` says: true, or nothing (None: the tokenizer's own), a file, or a template itself.

    Raises FileNotFoundError for a file that is not there.
    """
    if value is None or isinstance(value, bool):
        return None
    text = str(value)
    if "{" in text:
        return text
    place = Path(text).expanduser()
    if not place.is_file():
        raise FileNotFoundError(
            f"data.chat_template: there is no file {text}; it is true (the tokenizer's own), a file, or the template itself"
        )
    return place.read_text(encoding="utf-8")


def check_messages(messages: Any) -> None:
    """Raise NoAnswerError for what is no list of {role, content}, and for an empty answer."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise NoAnswerError("messages must be a list of {'role': ..., 'content': ...}")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise NoAnswerError(f"message {number} must be {{'role': ..., 'content': ...}} with text in both")
        if message["role"] == "assistant" and not message["content"].strip():
            raise NoAnswerError(f"the answer in message {number} is empty")
