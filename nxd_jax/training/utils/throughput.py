"""`neuronx_distributed_training.utils.Throughput`: how many sequences a second a training gets through."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class Throughput:
    """Sequences per second over the last `moving_avg_window_size` steps of all ranks.

    The first step, in which programs are compiled, counts until there is a second one and no longer. (The original counts set-up and compilation for as
    long as its window is.) throughput_peak: the highest after the first step. clock: for tests.
    """

    def __init__(self, moving_avg_window_size: int = 10, clock: Callable[[], float] = time.perf_counter):
        self.moving_avg_window_size = moving_avg_window_size
        self.seqs_per_iteration: int | None = None
        self.throughput_peak = 0.0
        self.throughput_sum = 0.0
        self._clock = clock
        self._times: deque[float] = deque(maxlen=moving_avg_window_size + 1)
        self._compiling = True
        self._paused: float | None = None

    def set_seqs_per_iteration(self, micro_batch_size: int, dp_size: int, num_microbatches: int) -> None:
        """A step trains on this many sequences: the product."""
        self.seqs_per_iteration = int(micro_batch_size * dp_size * num_microbatches)

    def start(self) -> None:
        """Training begins now."""
        self._times.clear()
        self._times.append(self._clock())
        self._compiling = True

    def pause(self) -> None:
        """What comes now is no training (a validation, a checkpoint), until `go_on`."""
        self._paused = self._clock()

    def go_on(self) -> None:
        """Training goes on; the time since `pause` does not count."""
        if self._paused is not None:
            gone = self._clock() - self._paused
            self._times = deque((t + gone for t in self._times), maxlen=self._times.maxlen)
            self._paused = None

    def get_throughput(self) -> float:
        """A step has ended: sequences per second. Raises RuntimeError before `set_seqs_per_iteration`."""
        if self.seqs_per_iteration is None:
            raise RuntimeError("Throughput.get_throughput: call set_seqs_per_iteration(micro_batch_size, dp_size, num_microbatches) first")
        if not self._times:
            self.start()
        now = self._clock()
        self._times.append(now)
        found = self.seqs_per_iteration * (len(self._times) - 1) / max(now - self._times[0], 1e-9)
        if self._compiling:
            self._compiling = False
            self._times.popleft()
        else:
            self.throughput_peak = max(self.throughput_peak, found)
        self.throughput_sum += found
        return found
