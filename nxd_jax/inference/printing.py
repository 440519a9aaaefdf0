"""Answers as text, as they are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TextIO

import torch
from transformers import TextStreamer

from nxd_jax.inference.generation import Made


class _Streamer(TextStreamer):
    """transformers' streamer, which waits for whole characters and words, into a stream of ours."""

    def __init__(self, out: TextIO, tokenizer: Any):
        super().__init__(tokenizer, skip_special_tokens=True)
        self._out = out

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._out.write(text + ("\n" if stream_end else ""))
        self._out.flush()


class Printer:
    """Writes one answer as it is made; of several the first that is not complete, then those after it, each below its text in brackets."""

    def __init__(self, out: TextIO, tokenizer: Any, texts: Sequence[str]):
        self._out, self._texts = out, texts
        self._streamers = [_Streamer(out, tokenizer) for _ in texts]
        self._held: list[list[Made]] = [[] for _ in texts]
        self._current = 0
        self._begin()

    def add(self, made: Made) -> None:
        """A token of any answer."""
        self._held[made.prompt].append(made)
        while self._current < len(self._texts) and self._held[self._current]:
            waiting = self._held[self._current]
            self._held[self._current] = []
            if not self._write(waiting):
                return

    def _write(self, waiting: Sequence[Made]) -> bool:
        """Whether the answer is complete, and the next one may begin."""
        streamer = self._streamers[self._current]
        for made in waiting:
            if made.token is not None:
                streamer.put(torch.tensor([made.token]))
        if not waiting[-1].last:
            return False
        streamer.end()
        self._current += 1
        self._begin()
        return True

    def _begin(self) -> None:
        if len(self._texts) > 1 and self._current < len(self._texts):
            self._out.write(f"[{self._texts[self._current]}]\n")
