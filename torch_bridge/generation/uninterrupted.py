"""Whether nothing but transformers' own code runs between two tokens of a `generate()`: then what a model's forward reads need not be asked for each."""

from __future__ import annotations

import inspect
import signal
import threading
from typing import Any

from torch.nn.modules import module as _module

from torch_bridge.generation import requests
from torch_bridge.runtime import interrupts

_CALLED = (
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
    "_has_unfinished_sequences",
    "_optimize_model_for_decode",
    "_sample",
    "__call__",
)
"""Methods of a model that run between its forwards."""
_GIVEN = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "assistant_model", "custom_generate")
"""Arguments that are code of the script's, if they are there."""
_TRANSFORMERS, _TORCH, _HANDLERS = ("transformers.",), ("transformers.", "torch."), ("torch_bridge.", "torch.", "pytest_timeout.")
_THREADS = ("nxd-top-", "nxd_jax ", "IOPub", "Heartbeat", "Control", "IPythonHistorySavingThread")
"""What names of threads that change no model begin with: ours and Jupyter's."""


class Uninterrupted:
    """Of a call of `generate()`. Asked at its start, what it was given, and for each token, which threads there are."""

    def __init__(self, request: requests.Request):
        self._holds = of_transformers(request) and not _handles_signals()

    def __bool__(self) -> bool:
        return self._holds and all(map(_harmless, threading.enumerate()))


def of_transformers(request: requests.Request) -> bool:
    """Whether all that a call runs between forwards of its model is transformers' own."""
    model, streamer = request.model, request.given("streamer")
    if any(request.given(name) for name in _GIVEN) or (streamer is not None and not _is_of(type(streamer), _TRANSFORMERS)):
        return False
    if any(name in vars(model) for name in _CALLED) or has_hooks(model):
        return False
    return all(_is_of(inspect.unwrap(getattr(type(model), name, of_transformers)), _TORCH) for name in _CALLED)


def _is_of(what: Any, packages: tuple[str, ...]) -> bool:
    return f"{getattr(what, '__module__', '')}.".startswith(packages)


def has_hooks(model: Any) -> bool:
    """Whether code of the script's runs before or after the forward of a model; that of modules inside is part of what they do."""
    return any((model._forward_hooks, model._forward_pre_hooks, _module._global_forward_hooks, _module._global_forward_pre_hooks))


def _handles_signals() -> bool:
    """Whether the script has handlers of its own."""
    usual = (signal.default_int_handler, interrupts.on_interrupt)
    found = [handler for handler in map(signal.getsignal, signal.valid_signals()) if callable(handler) and handler not in usual]
    return not all(_is_of(handler, _HANDLERS) for handler in found)


def _harmless(thread: threading.Thread) -> bool:
    return thread is threading.current_thread() or thread.name.startswith(_THREADS) or _is_of(type(thread), ("tqdm.",))
