"""What transformers prepares for a model's forward stays on the CPU: the forward (`forwards`) moves it, or hands it to a program as it is."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

METHOD = "prepare_inputs_for_generation"


class HostInputs:
    """In the place of a model's method of that name: the class's own, called on the model as one whose device is the CPU, so that it moves nothing."""

    def __init__(self, model: Any):
        kind: Any = type(model)
        here = object.__new__(_on_cpu(kind))
        object.__setattr__(here, "__dict__", model.__dict__)
        self._bound = types.MethodType(getattr(kind, METHOD), here)
        functools.update_wrapper(self, self._bound)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._bound(*args, **kwargs)


@functools.cache
def _on_cpu(kind: Any) -> Any:
    """The class of a model with another device; it is called what the model's class is called."""
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "device": property(lambda _: torch.device("cpu"))}
    return types.new_class(kind.__name__, (kind,), exec_body=lambda space: space.update(named))
