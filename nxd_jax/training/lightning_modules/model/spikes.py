"""A word in the log when a loss jumps or is no number."""

from __future__ import annotations

import logging
import math
from collections import deque

logger = logging.getLogger("nxd_jax")


class SpikeWatch:
    """Looks at losses as they are logged. window: how many of them a new one is compared with; deviations: how far above their mean is a spike."""

    def __init__(self, window: int = 50, deviations: float = 6.0, least: int = 10):
        self.deviations = deviations
        self.least = least
        self._seen: deque[float] = deque(maxlen=window)
        self._said_nan = False

    def see(self, step: int, loss: float) -> None:
        """A loss was logged. Warns of a spike, and once of NaN or infinity."""
        if not math.isfinite(loss):
            if not self._said_nan:
                logger.warning(
                    "the loss of step %d is %s, and so are weights from now on: lower model.optim.lr, set trainer.gradient_clip_val, or go back to a "
                    "checkpoint before (exp_manager.resume_from_checkpoint)",
                    step,
                    loss,
                )
            self._said_nan = True
            return
        self._said_nan = False
        if len(self._seen) >= self.least and loss > self._limit():
            logger.warning(
                "loss spike: %.4f at step %d, where the last %d logged were %.4f on average", loss, step, len(self._seen), self._mean()
            )
        self._seen.append(loss)

    def _mean(self) -> float:
        return sum(self._seen) / len(self._seen)

    def _limit(self) -> float:
        mean = self._mean()
        spread = math.sqrt(sum((x - mean) ** 2 for x in self._seen) / len(self._seen))
        return mean + self.deviations * max(spread, 0.01 * abs(mean))
