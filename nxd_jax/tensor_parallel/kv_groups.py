"""Groups of ranks that hold copies of the same K/V heads."""

from __future__ import annotations

from typing import Any

from nxd_jax.tensor_parallel import parallel_groups
from nxd_jax.tensor_parallel.parallel_groups import Lists

_HOW = "initialize_kv_group(kv_shared_group_size)"


def adjacent(hardware: object, sequential: bool = False) -> bool:
    """Whether neighbouring ranks hold the copies of one K/V head: on trn2, and if `sequential`."""
    return sequential or "trn2" in str(getattr(hardware, "value", hardware)).lower()


def fitting_copies(heads: int, kv_heads: int, tp: int) -> list[int]:
    """How often each K/V head may be held so that tensor-parallel ranks have equally many, and each serves its own query heads; ascending."""
    return [n for n in range(1, tp + 1) if tp % n == 0 and kv_heads * n % tp == 0 and heads // kv_heads % n == 0]


def arrange(count: int, tp: int, size: int, neighbours: bool) -> Lists:
    """Such groups of `size`, in `count` groups of `tp` ranks: of neighbouring ranks, or of every tp/size-th, as K/V heads are repeated as a whole.

    Raises AssertionError if `size` does not divide `tp`.
    """
    if tp % size:
        raise AssertionError(f"tensor parallel size {tp} is not divisible by kv_shared_group_size {size}")
    found: Lists = []
    for start in range(0, count * tp, tp):
        for k in range(tp // size):
            members = range(k * size, (k + 1) * size) if neighbours else range(k, tp, tp // size)
            found.append([start + m for m in members])
    return found


def initialize(size: int, sequential: bool = False) -> None:
    """Divide every tensor parallel group. Raises AssertionError if there are groups of another size: all layers of a model use one."""
    from torch_bridge.torch_neuronx.utils import get_platform_target

    layout = parallel_groups.layout()
    if parallel_groups.is_defined("kv"):
        there = len(lists()[0])
        if there != size:
            raise AssertionError(
                f"single KV size: groups of {there} exist, cannot make groups of {size}; all GQA layers of a model use one kv_size_multiplier"
            )
        return
    places = arrange(1, layout.size["tp"], size, adjacent(get_platform_target(), sequential))
    parallel_groups.define("kv", [[group[p] for p in members] for group in layout.lists["tp"] for members in places])


def group() -> Any:
    """The group of this rank. Raises RuntimeError before `initialize`."""
    return parallel_groups.defined("kv", _HOW)


def lists() -> Lists:
    """The ranks of all groups."""
    return [list(members) for members in group()._mesh]


def shared(as_list: bool = False) -> Any:
    """The group of ranks that hold the same K/V heads as this one, or the ranks of all such groups."""
    return lists() if as_list else group()
