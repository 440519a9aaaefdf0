"""`neuronx_distributed.trainer.hooks`: functions to call once a pipeline has been cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class PostPartitionHooks:
    """`trainer.hooks.PostPartitionHooks`: registers functions, and calls them in order."""

    def __init__(self) -> None:
        self._hooks: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def register_post_partition_hook(self, fn: Callable[..., Any], func_args: Any = (), func_kwargs: dict[str, Any] | None = None) -> None:
        """Have `fn(*func_args, **func_kwargs)` called. Raises ValueError for what cannot be called."""
        if not callable(fn):
            raise ValueError(f"a post-partition hook must be a function, got {fn!r}")
        self._hooks.append((fn, tuple(func_args), dict(func_kwargs or {})))

    def execute_all_hooks(self, model: Any = None) -> None:
        """Call all of them; with a model it becomes their keyword `model` where they were registered with one."""
        for fn, args, kwargs in self._hooks:
            fn(*args, **({**kwargs, "model": model} if "model" in kwargs and model is not None else kwargs))


hooks = PostPartitionHooks()
"""The registry of this process."""
