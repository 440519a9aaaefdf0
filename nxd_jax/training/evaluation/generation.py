"""Answers of a model, token by token.

Of a model as it is trained: each token takes a forward pass over the text so far, in a buffer that grows by doubling, a program for each size, and there is
no cache of keys and values. (`nxdt-evaluate` answers with `nxd_jax.inference`.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from nxd_jax.tensor_parallel.regions import gather_from_tensor_model_parallel_region
from torch_bridge.runtime import steps

FIRST = 64
"""Tokens of the smallest buffer."""


@dataclasses.dataclass(frozen=True)
class Choosing:
    """How the next token is chosen. temperature 0 or top_k 1, or no `sample`: the likeliest one. Else one is drawn among the `top_k` likeliest (0: all) and
    those that make up `top_p` of the probability."""

    sample: bool = False
    temperature: float = 0.0
    top_k: int = 1
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}: temperature and top_k are at least 0, top_p is above 0 and at most 1"
            )

    @property
    def likeliest(self) -> bool:
        """Whether nothing is drawn."""
        return not self.sample or self.temperature == 0 or self.top_k == 1

    def __call__(self, logits: torch.Tensor, source: torch.Generator) -> torch.Tensor:
        """The next tokens [rows] of logits [rows, vocabulary] on the CPU."""
        if self.likeliest:
            return logits.argmax(-1)
        logits = logits.float() / self.temperature
        if self.top_k:
            least = logits.topk(min(self.top_k, logits.shape[-1]), -1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p < 1:
            ordered, places = logits.sort(-1, descending=True)
            shares = ordered.softmax(-1)
            out = shares.cumsum(-1) - shares >= self.top_p
            logits = logits.masked_fill(torch.zeros_like(out).scatter(-1, places, out), -torch.inf)
        return torch.multinomial(logits.softmax(-1), 1, generator=source)[:, 0]


def generate(
    model: nn.Module, prompts: Sequence[Sequence[int]], length: int, end: Sequence[int], choosing: Choosing | None = None, seed: int = 42
) -> list[list[int]]:
    """The answers to prompts of token ids, each up to one of the tokens in `end` (left out), or to `length` tokens with the prompt.

    model: on xla, forward(ids [rows, tokens]) gives (logits [rows, tokens, vocabulary / tp], ...). Rows are padded at the end, which causal attention does not
    see.
    """
    choosing = choosing or Choosing()
    source = torch.Generator().manual_seed(seed)
    rows = [list(prompt) for prompt in prompts]
    begins = [len(row) for row in rows]
    open_rows = {k for k, row in enumerate(rows) if len(row) < length}
    buffer: torch.Tensor | None = None
    with torch.no_grad():
        while open_rows:
            longest = max(map(len, rows))
            if buffer is None or longest > buffer.shape[1]:
                buffer = _filled(rows, _size(longest, length))
            last = torch.tensor([len(row) - 1 for row in rows])
            tokens = choosing(_next_logits(model, buffer, last), source)
            for k in sorted(open_rows):
                token = int(tokens[k])
                if token in end:
                    open_rows.discard(k)
                    continue
                rows[k].append(token)
                if len(rows[k]) >= length:
                    open_rows.discard(k)
                if len(rows[k]) <= buffer.shape[1]:
                    buffer[k, len(rows[k]) - 1] = token
    return [row[begin:] for row, begin in zip(rows, begins, strict=True)]


def _size(needed: int, most: int) -> int:
    size = FIRST
    while size <= needed:
        size *= 2
    return min(size, most)


def _filled(rows: Sequence[Sequence[int]], size: int) -> torch.Tensor:
    found = torch.zeros(len(rows), size, dtype=torch.int64)
    for k, row in enumerate(rows):
        found[k, : len(row)] = torch.tensor(row)
    return found


def _next_logits(model: nn.Module, ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """The logits [rows, vocabulary] behind each row's last token, on the CPU."""
    logits = model(ids.to("xla"))[0]
    places = last.to("xla")[:, None, None].expand(-1, 1, logits.shape[-1])
    found = gather_from_tensor_model_parallel_region(logits.gather(1, places)[:, 0])
    steps.mark()
    result: torch.Tensor = found.cpu()
    return result
