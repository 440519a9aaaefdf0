"""What stands for a model or an optimizer, and the one inside it."""

from __future__ import annotations

from typing import Any


class Wrapper:
    """A base class of `NxDModel` and `NxDOptimizer`: packages below the trainer find what is inside by it."""

    def _nxd_inner(self) -> Any:
        """The model or optimizer that this one stands for."""
        raise NotImplementedError


def inner(found: Any) -> Any:
    """What is inside a `Wrapper`; anything else as it is."""
    return found._nxd_inner() if isinstance(found, Wrapper) else found
