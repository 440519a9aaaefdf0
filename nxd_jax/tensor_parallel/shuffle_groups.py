"""Groups of data-parallel ranks that exchange tokens before experts are chosen."""

from __future__ import annotations

from typing import Any

from nxd_jax.tensor_parallel import parallel_groups
from nxd_jax.tensor_parallel.parallel_groups import Lists

KIND = "token_shuffle"
_HOW = "initialize_token_shuffle_group(size)"


def initialize(size: int) -> None:
    """Divide every data-parallel group into groups of this size, of neighbours in it.

    Raises RuntimeError if the size does not divide the data-parallel size, AssertionError if there are groups of another size: all layers of a process use one.
    """
    layout = parallel_groups.layout()
    dp = layout.size["dp"]
    if size < 1 or dp % size:
        raise RuntimeError(f"token_shuffle_group_size={size} must divide the data parallel size {dp}")
    if parallel_groups.is_defined(KIND):
        there = len(lists()[0])
        if there != size:
            raise AssertionError(
                f"token shuffle groups of {there} ranks exist, cannot make groups of {size}: all layers use one size; to change it, call "
                "parallel_state.destroy_token_shuffle_group first"
            )
        return
    parallel_groups.define(KIND, [line[k : k + size] for line in layout.lists["dp"] for k in range(0, dp, size)])


def group() -> Any:
    """The group of this rank. Raises RuntimeError before `initialize`."""
    return parallel_groups.defined(KIND, _HOW)


def lists() -> Lists:
    """The ranks of all groups."""
    return [list(members) for members in group()._mesh]
