"""torch's `Join` for xla tensors of several processes: uneven inputs raise in all of them.

A process that has no more inputs answers the others' collectives one by one. Those run in the others' programs, so it cannot, and all would wait for ever.
Processes tell each other on the host, before each step, whether they go on.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable

from torch_bridge.collectives import object_collectives
from torch_bridge.mesh import world


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


def _leaving(leave: Callable[..., Any]) -> Callable[..., Any]:
    def __exit__(self: Any, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> Any:
        if self._enable and kind is None:
            _check_all(False, self._device, self._process_group)
        return leave(self, kind, value, trace)

    return __exit__


def install() -> None:
    """Have `Join` ask, and DistributedDataParallel, which tells it of each step."""
    Join.notify_join_context = staticmethod(_notifying(Join.notify_join_context))  # type: ignore[assignment]
    Join.__exit__ = _leaving(Join.__exit__)  # type: ignore[method-assign]
