"""torch's `Join` for xla tensors: uneven inputs raise in all processes, and in one that hosts several ranks with `throw_on_early_termination=True`.

A process that has no more inputs answers the others' collectives one by one. Those run in the others' programs, so it cannot, and all would wait for ever.
Processes tell each other on the host, before each step, whether they go on. A process that hosts several ranks is told by the loader that gives it batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable

from torch_bridge.collectives import object_collectives
from torch_bridge.mesh import world

_throwing: list[Join] = []
"""The contexts that are entered and are to raise, the innermost last."""


def epoch_ends(done: Sequence[int], others: Sequence[int]) -> None:
    """Called by a loader for several ranks of this process of which some have no more batches. Raises RuntimeError within a `Join` that is to throw."""
    if _throwing:
        raise RuntimeError(
            f"Join(throw_on_early_termination=True): ranks {list(done)} have no more batches and ranks {list(others)} have. Give all ranks equally many "
            "(DistributedSampler pads, or drop_last=True), or catch this error to end the epoch there"
        )


def _check_all(goes_on: bool, device: torch.device, group: Any) -> None:
    """Raises RuntimeError if some ranks of the group go on while others have no more inputs."""
    if torch.device(device).type != "xla" or world.process_count() == 1:
        return
    found = object_collectives.all_gather(goes_on, "join", group._mesh)
    if any(found) and not all(found):
        done = [place for place, more in enumerate(found) if not more]
        raise RuntimeError(
            f"Join: ranks {done} of the group have no more inputs and the others have. On xla every rank must compute in every step: give all ranks equally "
            "many batches (DistributedSampler pads, or drop_last=True), or catch this error, which all ranks raise, to end the epoch there"
        )


def _notifying(notify: Callable[[Joinable], Any]) -> Callable[[Joinable], Any]:
    def notify_join_context(joinable: Joinable) -> Any:
        config = joinable._join_config
        if config.is_first_joinable and config.enable:
            _check_all(True, joinable.join_device, joinable.join_process_group)
        return notify(joinable)

    return notify_join_context


def _entering(enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def __enter__(self: Any) -> Any:
        if self._enable and self._throw_on_early_termination and torch.device(self._device).type == "xla":
            _throwing.append(self)
        return enter(self)

    return __enter__


def _leaving(leave: Callable[..., Any]) -> Callable[..., Any]:
    def __exit__(self: Any, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> Any:
        _throwing[:] = [join for join in _throwing if join is not self]
        if self._enable and kind is None:
            _check_all(False, self._device, self._process_group)
        return leave(self, kind, value, trace)

    return __exit__


def install() -> None:
    """Have `Join` ask, and DistributedDataParallel, which tells it of each step."""
    Join.notify_join_context = staticmethod(_notifying(Join.notify_join_context))  # type: ignore[assignment]
    Join.__enter__ = _entering(Join.__enter__)  # type: ignore[method-assign]
    Join.__exit__ = _leaving(Join.__exit__)  # type: ignore[method-assign]
