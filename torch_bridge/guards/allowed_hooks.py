"""Hooks inside of modules that do not stand against playing them (`replay`), as all they do ends up in what the module returns.

That is how transformers' models collect hidden states, attentions and router logits when these are asked for: hooks on their layers, which stay there,
append to a list that lives as long as the call. And how transformers, PEFT and many scripts have gradients flow past frozen embeddings, for activation
checkpoints (`enable_input_require_grads`): a hook that calls `output.requires_grad_(True)`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

COLLECTS = "transformers.utils.output_capturing"


def _require_gradient(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    output.requires_grad_(True)


def _require_gradient_by_default(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    output.requires_grad_()


def _does(hook: Callable[..., Any]) -> tuple[Any, ...]:
    """What a function does, if it is one: its bytecode with the names and constants in it. Its arguments may have other names."""
    code = getattr(hook, "__code__", None)
    return (hook,) if code is None else (code.co_code, code.co_names, code.co_consts, code.co_argcount, code.co_freevars)


_REQUIRE_GRADIENTS = frozenset(
    map(
        _does, (_require_gradient, _require_gradient_by_default, lambda m, a, o: o.requires_grad_(True), lambda m, a, o: o.requires_grad_())
    )
)


def all_known(hooks: Mapping[Any, Any]) -> bool:
    """Whether all hooks of a module are of these kinds."""
    return all(getattr(hook, "__module__", "") == COLLECTS or _does(hook) in _REQUIRE_GRADIENTS for hook in hooks.values())


def collector() -> Any:
    """The context variable that holds what is being collected; None where transformers has none."""
    found = getattr(sys.modules.get(COLLECTS), "_active_collector", None)
    return getattr(found, "context_var", found)  # some versions have a wrapper around it


def idle(hook: Callable[..., Any]) -> bool:
    """Whether a hook does something only while a module around is collecting."""
    return getattr(hook, "__module__", "") == COLLECTS


def collecting() -> bool:
    """Whether a module around is collecting now: then its hooks have to be called."""
    active = collector()
    return active is not None and bool(active.get())


def collected() -> dict[str, Any] | None:
    """What the module around collects, by name (lists, in the order of calls); None where none does. Also where a model runs as if it were compiled."""
    active = getattr(sys.modules.get(COLLECTS), "_active_collector", None)
    return None if active is None else active.get()
