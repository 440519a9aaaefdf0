"""How fast batches follow each other, from clocks and shapes alone. (Not part of NxD.)"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import torch

from torch_bridge import nested

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Amount(NamedTuple):
    """How much there is in a batch: a number of `unit`, "tokens" or "samples"."""

    number: int
    unit: str


def amount_of(batch: object) -> Amount | None:
    """What a batch (any nested data) holds, by the shapes of its tensors; None without tensors.

    Tokens: the elements of `batch["input_ids"]`, else of the first tensor of integers with 2 dims. Samples: the first dim of the first tensor.
    """
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor):
        return Amount(batch["input_ids"].numel(), "tokens")
    tensors = [t for t in nested.collect(batch, lambda x: isinstance(x, torch.Tensor)) if t.dim()]
    for t in tensors:
        if t.dim() == 2 and t.dtype in _INTEGERS:
            return Amount(t.numel(), "tokens")
    return Amount(tensors[0].shape[0], "samples") if tensors else None


class Pace:
    """A moving average over the last batches (`over` of them).

    A batch's time is that since the one before ended, so that reading data counts. Not counted: the first batch of all, which waits for
    compilation, and what happens in a `pause`. Times are seconds of any clock that goes forward only.
    """

    def __init__(self, over: int = 10):
        self._recent: deque[tuple[float, Amount | None]] = deque(maxlen=over)
        self._since: float | None = None
        self.begun = False
        """Whether a batch has ended."""

    def pause(self) -> None:
        """Until the next batch starts, something else than training happens."""
        self._since = None

    def batch_starts(self, now: float) -> None:
        """Ends a pause."""
        if self._since is None:
            self._since = now

    def batch_ends(self, now: float, amount: Amount | None) -> None:
        """amount: of this batch."""
        if self.begun and self._since is not None:
            self._recent.append((now - self._since, amount))
        self.begun = True
        self._since = now

    def seconds(self) -> float | None:
        """The time of a batch; None as long as no batch counts."""
        return sum(s for s, _ in self._recent) / len(self._recent) if self._recent else None

    def rate(self) -> tuple[float, str] | None:
        """Tokens or samples a second, and which of them; of the batches that hold what the last one holds. None if that is not known."""
        last = self._recent[-1][1] if self._recent else None
        if last is None:
            return None
        alike = [(s, amount.number) for s, amount in self._recent if amount is not None and amount.unit == last.unit]
        seconds = sum(s for s, _ in alike)
        return (sum(n for _, n in alike) / seconds, last.unit) if seconds > 0 else None


def described(pace: Pace, ranks: int) -> dict[str, str]:
    """A pace in words: `{"step_time": "0.123s", "tokens/s": "12.3k"}`, without what is not known. ranks: how many go through such a batch each."""
    seconds, rate = pace.seconds(), pace.rate()
    found = {} if seconds is None else {"step_time": f"{seconds:.3f}s"}
    if rate is not None:
        found[f"{rate[1]}/s"] = _short(rate[0] * ranks)
    return found


def _short(number: float) -> str:
    """Three digits: 0.123, 12.3, 123, 12.3k, 1.23M."""
    unit = ""
    for unit in ("", "k", "M", "G"):
        if number < 999.5 or unit == "G":
            break
        number /= 1000
    return (f"{number:.0f}" if number >= 99.95 else f"{number:.3g}") + unit
