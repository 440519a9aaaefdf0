"""Tiny decoders of transformers, each on the CPU and, with the same weights, on xla."""

from __future__ import annotations

import copy
import functools
import logging
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from torch_bridge import metrics
from torch_bridge.generation import uninterrupted
from torch_bridge.replay.direct import Direct

logger = logging.getLogger(__name__)
WORDS, END, PAD = 128, 1, 0
_SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "bos_token_id": 2,
    "eos_token_id": END,
    "pad_token_id": PAD,
}


def _llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES))


def _qwen2() -> Any:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_SIZES))


def _gpt2() -> Any:
    ends = {"bos_token_id": 2, "eos_token_id": END, "pad_token_id": PAD, "initializer_range": 0.2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=WORDS, n_embd=64, n_layer=2, n_head=4, **ends))


def _mixtral() -> Any:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**_SIZES, num_local_experts=4, sliding_window=None))


def _mistral() -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**_SIZES, sliding_window=8))


def _gemma2() -> Any:
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**_SIZES, head_dim=16, sliding_window=8))


MAKERS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "mistral": _mistral,
    "gemma2": _gemma2,
}


@functools.cache
def on_cpu(name: str) -> Any:
    """The reference; nobody changes it."""
    torch.manual_seed(0)
    return MAKERS[name]().eval()


def on_xla(name: str) -> Any:
    """A copy of it on xla."""
    return copy.deepcopy(on_cpu(name)).to("xla")


def prompt(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Ids [rows, length] without special ones."""
    return torch.randint(3, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(lengths: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of these lengths, padded on the left, and their mask."""
    ids = prompt(len(lengths), max(lengths), seed)
    for row, n in zip(ids, lengths, strict=True):
        row[: len(row) - n] = PAD
    return ids, (ids != PAD).long()


def generated(model: Any, ids: torch.Tensor, seed: int = 1, **options: Any) -> torch.Tensor:
    """What a model generates, on the CPU; tensors among the options go where the model is."""
    torch.manual_seed(seed)
    there = {k: x.to(model.device) if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    out: torch.Tensor = model.generate(ids.to(model.device), **{"do_sample": False, **there})
    assert out.device.type == model.device.type
    return out.cpu()


def program_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets an item for each token that is a call of its program. Threads of the tests' own runner do not count as the script's.

    What forbids such calls is logged, for tests that fail because of what earlier ones left.
    """
    made: list[int] = []
    call, runs_nothing_of_scripts, handles_signals = Direct.call, uninterrupted._harmless, uninterrupted._handles_signals
    runners = set(threading.enumerate()) - {threading.main_thread()}

    def counted(self: Direct, new: Any) -> Any:
        found = call(self, new)
        made.extend([1] * (found is not None))
        return found

    def harmless(thread: threading.Thread) -> bool:
        found = thread in runners or runs_nothing_of_scripts(thread)
        if not found:
            logger.warning("a thread that may change a model: %s", thread)
        return found

    def handled() -> bool:
        found = handles_signals()
        if found:
            handlers = {s: signal.getsignal(s) for s in signal.valid_signals()}
            logger.warning("signals have handlers: %s", {s: handler for s, handler in handlers.items() if callable(handler)})
        return found

    monkeypatch.setattr(Direct, "call", counted)
    monkeypatch.setattr(uninterrupted, "_harmless", harmless)
    monkeypatch.setattr(uninterrupted, "_handles_signals", handled)
    return made


class Compiled:
    """How many programs a block has compiled."""

    def __enter__(self) -> Compiled:
        self._before = metrics.COMPILE_TIME.count
        self.programs = -1
        return self

    def __exit__(self, *error: object) -> None:
        self.programs = metrics.COMPILE_TIME.count - self._before
