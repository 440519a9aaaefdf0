"""`CheckpointManager`: a folder with a checkpoint for each of some steps, the last ones kept."""

from __future__ import annotations

import os
import pathlib
import shutil
import threading
import uuid
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch.distributed.checkpoint as dcp

from torch_bridge.mesh import processes, world
from torch_bridge.torch_xla import _preemption
from torch_bridge.torch_xla.experimental.distributed_checkpoint._helpers import on_cpu
from torch_bridge.torch_xla.experimental.distributed_checkpoint.planners import SPMDLoadPlanner, SPMDSavePlanner

__all__ = ["CheckpointManager"]

_PART = ".part-"


class CheckpointManager:
    """`CheckpointManager`: saves and restores state dicts by step.

    path: a local folder; a checkpoint is `path/<step>`, in the format of `torch.distributed.checkpoint`. It gets its name when it is whole, so a crash leaves
    the checkpoints before it. save_interval: every how many steps `should_save` is true. max_to_keep: how many are kept, those that were written
    last, whatever their steps; 0: all. max_pending_async: how many saves in the background may wait; a further one waits itself. chkpt_on_preemption: whether
    SIGTERM makes `reached_preemption` and `should_save` true, once. process_group: accepted; all processes call `save`, and the first one writes.
    num_of_threads: how many threads write the files of a checkpoint.

    Raises ValueError for an interval below 1, and for addresses that are no local folder.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        save_interval: int,
        max_to_keep: int | None = 0,
        max_pending_async: int | None = 1,
        process_group: object = None,
        chkpt_on_preemption: bool = True,
        num_of_threads: int | None = 1,
    ):
        if type(save_interval) is not int or save_interval < 1:
            raise ValueError(f"save_interval must be a number of steps, 1 or more, got {save_interval!r}")
        if "://" in str(path):
            raise ValueError(f"{path}: checkpoints go to a local folder; copy it from there, or mount the bucket")
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")  # no_dist=True says so
        self.base_path = pathlib.Path(path)
        self.save_interval = save_interval
        self.max_to_keep = max_to_keep or 0
        self.chkpt_on_preemption = chkpt_on_preemption
        self.num_of_threads = max(1, num_of_threads or 1)
        self._pending = threading.BoundedSemaphore(max(1, max_pending_async or 1))
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saves: list[Future[None]] = []
        self._preempted = threading.Event()
        if chkpt_on_preemption and threading.current_thread() is threading.main_thread():
            _preemption.note_in(self._preempted)

    def should_save(self, step: int) -> bool:
        """Whether it is a step to save: 0, `save_interval`, twice that, ..., or the first one asked about after SIGTERM."""
        return self.reached_preemption(step) or step % self.save_interval == 0

    def save(self, step: int, state_dict: dict[str, Any], force: bool = False) -> bool:
        """Save, if `should_save` or `force`, and return whether it was."""
        if not (force or self.should_save(step)):
            return False
        self.join()
        values = on_cpu(state_dict)
        if world.process_index() == 0:
            self._save(step, values)
        processes.barrier("checkpoint")
        self._preempted.clear()
        return True

    def save_async(self, step: int, state_dict: dict[str, Any], force: bool = False) -> bool:
        """The same in the background: values of now are copied to the CPU, and written by another thread. `join` waits, and raises what went wrong."""
        if not (force or self.should_save(step)):
            return False
        self._raise_failed()
        if world.process_count() > 1:
            return self.save(step, state_dict, force=True)
        self._pending.acquire()
        try:
            self._saves.append(self._pool.submit(self._save_waiting, self._save, step, on_cpu(state_dict)))
        except BaseException:
            self._pending.release()
            raise
        return True

    def restore(self, step: int, state_dict: dict[str, Any]) -> None:
        """Read a checkpoint into a state dict: its tensors are written to and stay divided as they are, other values are replaced.

        Raises ValueError for a step that there is no checkpoint of; what `torch.distributed.checkpoint` raises for names that are missing in it.
        """
        self.join()
        if step not in self.all_steps():
            raise ValueError(f"{self.base_path} has no checkpoint of step {step!r}; there are {self.all_steps() or 'none'}")
        dcp.load(state_dict, checkpoint_id=self.base_path / str(step), planner=SPMDLoadPlanner(), no_dist=True)

    def all_steps(self) -> list[int]:
        """The steps of which there are checkpoints, ascending."""
        found = self.base_path.iterdir() if self.base_path.is_dir() else ()
        return sorted(int(p.name) for p in found if p.name.isdigit() and (p / ".metadata").exists())

    def join(self) -> None:
        """Wait for saves in the background."""
        for save in self._saves:
            save.exception()
        self._raise_failed()

    def reached_preemption(self, step: int) -> bool:
        """Whether SIGTERM has come, to any process: True for one checkpoint; a checkpoint of this step or a later one settles it."""
        return _preemption.come_to_any(self._preempted, "preempted")

    def _raise_failed(self) -> None:
        done = [save for save in self._saves if save.done()]
        self._saves = [save for save in self._saves if not save.done()]
        for save in done:
            save.result()

    def _save_waiting(self, save: Callable[[int, dict[str, Any]], None], step: int, state_dict: dict[str, Any]) -> None:
        """save: `_save` as it was when it was asked for; torch_xla's tests replace it for a block."""
        try:
            save(step, state_dict)
        finally:
            self._pending.release()

    def _save(self, step: int, state_dict: dict[str, Any]) -> None:
        """Into a folder of another name, which gets its own when it is whole."""
        self.base_path.mkdir(parents=True, exist_ok=True)
        part = self.base_path / f"{_PART}{uuid.uuid4().hex}"
        try:
            writer = dcp.FileSystemWriter(part, thread_count=self.num_of_threads)
            dcp.save(state_dict, checkpoint_id=part, storage_writer=writer, planner=SPMDSavePlanner(), no_dist=True)
            final = self.base_path / str(step)
            if final.exists():
                shutil.rmtree(final)
            self._stamp(part)
            part.rename(final)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        self._preempted.clear()
        for old in sorted(self.all_steps(), key=self._written)[: -self.max_to_keep] if self.max_to_keep else ():
            shutil.rmtree(self.base_path / str(old), ignore_errors=True)

    def _written(self, step: int) -> int:
        """When a checkpoint was written, in nanoseconds."""
        return (self.base_path / str(step) / ".metadata").stat().st_mtime_ns

    def _stamp(self, part: pathlib.Path) -> None:
        """Have a checkpoint be the last one by its file times, also where clocks are coarse or go back."""
        metadata = part / ".metadata"
        last = max((self._written(step) for step in self.all_steps()), default=0)
        if metadata.stat().st_mtime_ns <= last:
            os.utime(metadata, ns=(last + 1000, last + 1000))
