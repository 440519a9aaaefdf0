"""A TCP port for processes that a test starts."""

from __future__ import annotations

import random
import socket

PORTS = range(10_000, 32_000)
"""Below what Linux gives to connections by itself: a port that is free now stays so while a process takes seconds to start."""


def free() -> int:
    """A port that nobody listens on."""
    for _ in range(100):
        port = random.SystemRandom().choice(PORTS)  # tests start with the same seed in every worker
        with socket.socket() as s:
            try:
                s.bind(("", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"none of 100 ports between {PORTS.start} and {PORTS.stop} is free")
