"""`trainer.PostPartitionHooks`: what is registered is called once, and what it returns comes back."""

from __future__ import annotations

import functools

import neuronx_distributed
import pytest
from neuronx_distributed.trainer import PostPartitionHooks, hooks, post_partition_hooks


def times(a: int, b: int, more: int = 1) -> int:
    return a * b * more


def test_hooks_are_called_once_and_their_results_returned() -> None:
    registry = PostPartitionHooks()
    registry.register_post_partition_hook(times, [5, 6])
    registry.register_post_partition_hook(callable_function=times, func_args=(2, 3), func_kwargs={"more": 7})
    assert [hook["name"] for hook in registry.hooks] == ["times", "times"]
    assert registry.execute_all_hooks() == [30, 42]
    assert registry.hooks == [] and registry.execute_all_hooks() == []


def test_a_hook_may_register_another() -> None:
    registry = PostPartitionHooks()
    calls: list[str] = []
    registry.register_post_partition_hook(lambda: registry.register_post_partition_hook(calls.append, ["second"]))
    assert registry.execute_all_hooks() == [None, None]
    assert calls == ["second"] and not registry.hooks


def test_the_model_goes_to_those_registered_with_one() -> None:
    registry = PostPartitionHooks()
    for model in (None, "m"):
        registry.register_post_partition_hook(lambda *args, **kwargs: (args, kwargs), (1,), {"model": None})
        registry.register_post_partition_hook(lambda: "second")
        assert registry.execute_all_hooks(model=model) == [((1,), {"model": model}), "second"]


def test_a_hook_that_fails_stays() -> None:
    registry = PostPartitionHooks()
    registry.register_post_partition_hook(functools.partial(times, 1))  # has no name
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        registry.execute_all_hooks()
    assert [hook["name"] for hook in registry.hooks] == ["partial"]


def test_what_cannot_be_called() -> None:
    with pytest.raises(ValueError, match="a post-partition hook must be a function, got 3"):
        PostPartitionHooks().register_post_partition_hook(3)  # type: ignore[arg-type]


def test_where_they_are() -> None:
    assert isinstance(hooks, PostPartitionHooks) and neuronx_distributed.trainer.hooks is hooks is post_partition_hooks.hooks
