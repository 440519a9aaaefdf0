"""Functions of the script's that `generate()` calls with the text so far: on the CPU, or on xla if they hold xla tensors of their own."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch

DEPTH = 3
"""Objects inside objects that are looked through for tensors."""


def on_their_device(given: Any) -> Any:
    """Logits processors or stopping criteria, each so that it can be called with CPU tensors."""
    if not given or not any(map(holds_xla, given)):
        return given
    return type(given)([_for_cpu(one) if holds_xla(one) else one for one in given])


def allowed_tokens(function: Any) -> Any:
    """The same for `prefix_allowed_tokens_fn`."""
    if function is None or not holds_xla(function):
        return function
    return functools.wraps(function)(lambda batch, ids: function(batch, ids.to("xla")))


def holds_xla(function: Any) -> bool:
    """Whether an xla tensor is among what it has as attributes, in its closure or as its defaults, or among globals that it names."""
    return any(_on_xla(x, DEPTH) for x in _held(function))


def _held(f: Any) -> Iterator[Any]:
    while isinstance(f, functools.partial):
        yield from (*f.args, *f.keywords.values())
        f = f.func
    yield f
    call: Any = f if inspect.isroutine(f) or not callable(f) else type(f).__call__
    yield getattr(call, "__self__", None)
    code_of = inspect.unwrap(getattr(call, "__func__", call)) if call is not None else None
    code = getattr(code_of, "__code__", None)
    if code is None or getattr(code_of, "__module__", "").startswith(("torch.", "transformers.")):
        return
    yield from (code_of.__defaults__ or (), (code_of.__kwdefaults__ or {}).values())  # type: ignore[union-attr]
    yield from (code_of.__globals__.get(name) for name in code.co_names)  # type: ignore[union-attr]
    for cell in code_of.__closure__ or ():  # type: ignore[union-attr]
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue


def _on_xla(x: Any, depth: int) -> bool:
    if isinstance(x, torch.Tensor):
        return x.device.type == "xla"
    if isinstance(x, torch.device):
        return x.type == "xla"
    if depth == 0 or isinstance(x, (str, bytes, type, torch.nn.Module)) or inspect.ismodule(x):
        return False
    if isinstance(x, dict):
        inside: Any = x.values()
    elif isinstance(x, (list, tuple, set, frozenset)):
        inside = x
    else:
        inside = getattr(x, "__dict__", {}).values()
    return any(_on_xla(y, depth - 1) for y in inside)


def _for_cpu(one: Any) -> Any:
    """Those of transformers as copies with CPU tensors, which stay what they are among transformers' own; others get xla tensors, as they would have."""
    if type(one).__module__.startswith("transformers."):
        moved = copy.copy(one)
        moved.__dict__.update({k: moved_to(v, "cpu") for k, v in vars(one).items()})
        return moved
    return _OnXla(one)


class _OnXla:
    """A function of (ids, scores) that is called with xla tensors and gives CPU tensors."""

    def __init__(self, function: Any):
        self._function = function

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> Any:
        return moved_to(self._function(input_ids.to("xla"), moved_to(scores, "xla")), "cpu")

    def __getattr__(self, name: str) -> Any:
        if name == "_function":  # of a copy that is half made
            raise AttributeError(name)
        return getattr(self._function, name)


def moved_to(x: Any, device: Any) -> Any:
    """Tensors, also in tuples, lists and dicts, on a device; what has another type stays."""
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if type(x) in (list, tuple):
        return type(x)(moved_to(y, device) for y in x)
    return {k: moved_to(y, device) for k, y in x.items()} if type(x) is dict else x
