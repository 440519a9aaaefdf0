"""`torch_xla.experimental.eager`: the bridge always records."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


def is_eager_mode() -> bool:
    """`torch_xla.experimental.is_eager_mode`: False."""
    return False


def eager_mode(enable: bool) -> None:
    """`torch_xla.experimental.eager_mode`: only False is possible."""
    if enable:
        raise NotImplementedError(
            "torch_xla.experimental.eager_mode(True): ops are always recorded and run as one graph; call torch_xla.sync() where you want "
            "results"
        )


@contextlib.contextmanager
def eager_mode_context(enable: bool) -> Iterator[None]:
    """`torch_xla.experimental.eager_mode_context`: only False is possible."""
    eager_mode(enable)
    yield
