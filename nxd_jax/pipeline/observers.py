"""Who is told of what pipelines do: one protocol, as sessions have one (`torch_bridge.runtime.observers`)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxd_jax.pipeline.model import NxDPPModel
    from nxd_jax.pipeline.schedules import Action
    from torch_bridge.mesh.places import Place

Block = contextlib.AbstractContextManager[Any]
QUIET: Block = contextlib.nullcontext()


class StepObserver:
    """Base class: told of nothing. Methods run on the thread that does the work; what they raise, the script gets."""

    counts_arrays = False
    """Whether it counts arrays by the action that makes them: then no action makes those of others."""

    def step(self, model: NxDPPModel) -> Block:
        """Around the passes of a training step."""
        return QUIET

    def action(self, action: Action) -> Block:
        """Around an action of that step: it is recorded and handed to the devices within."""
        return QUIET

    def moved(self, source: Place, target: Place, size: int) -> None:
        """A tensor goes from one place to another, as an array of this process. size: in bytes on a core."""


_OBSERVERS: list[StepObserver] = []


def observe(observer: StepObserver) -> None:
    """Tell an observer of every pipeline of this process, from the next step on."""
    _OBSERVERS.append(observer)


def observed() -> tuple[StepObserver, ...]:
    """Those who are told."""
    return tuple(_OBSERVERS)


def count_arrays() -> bool:
    """Whether one of them counts arrays."""
    return any(observer.counts_arrays for observer in _OBSERVERS)


def unobserve(observer: StepObserver) -> None:
    """Tell it no more."""
    _OBSERVERS.remove(observer)


def step(model: NxDPPModel) -> Block:
    """All observers' blocks around a training step."""
    return _around([observer.step(model) for observer in _OBSERVERS])


def action(which: Action) -> Block:
    """All observers' blocks around an action."""
    return _around([observer.action(which) for observer in _OBSERVERS])


def moved(source: Place, target: Place, size: int) -> None:
    """Tell all observers that a tensor goes from place to place."""
    for observer in _OBSERVERS:
        observer.moved(source, target, size)


def _around(blocks: list[Block]) -> Block:
    if len(blocks) < 2:  # the log of the last step alone, mostly
        return blocks[0] if blocks else QUIET
    return _all_of(blocks)


@contextlib.contextmanager
def _all_of(blocks: list[Block]) -> Any:
    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block)
        yield
