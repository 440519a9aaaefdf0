"""`neuronx_distributed.trainer.post_partition_hooks`: functions to call once a pipeline has been cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


class PostPartitionHooks:
    """`trainer.PostPartitionHooks`: registers functions, and calls each of them once, in order.

    hooks: those that have not been called: for each a dict with `function` (its arguments filled in) and `name`.
    """

    def __init__(self) -> None:
        self.hooks: list[dict[str, Any]] = []

    def register_post_partition_hook(
        self, callable_function: Callable[..., Any], func_args: Any = (), func_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Have `callable_function(*func_args, **func_kwargs)` called. Raises ValueError for what cannot be called."""
        if not callable(callable_function):
            raise ValueError(f"a post-partition hook must be a function, got {callable_function!r}")
        name = getattr(callable_function, "__name__", type(callable_function).__name__)
        self.hooks.append({"function": partial(callable_function, *func_args, **(func_kwargs or {})), "name": name})

    def execute_all_hooks(self, model: Any = None) -> list[Any]:
        """Call and forget all of them; returns what they return. With a model it becomes their keyword `model` where they were registered with one.

        If one raises, all stay registered.
        """
        found = []
        for hook in self.hooks:  # also those that a hook registers
            call = hook["function"]
            found.append(call(model=model) if model is not None and "model" in call.keywords else call())
        self.hooks.clear()
        return found


hooks = PostPartitionHooks()
"""`trainer.hooks`: the registry of this process."""
