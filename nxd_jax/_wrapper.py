"""What stands for a model or an optimizer, and the one inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class Wrapper:
    """A base class of `NxDModel` and `NxDOptimizer`: packages below the trainer find what is inside by it."""

    def _nxd_inner(self) -> Any:
        """The model or optimizer that this one stands for."""
        raise NotImplementedError

    def _nxd_pipeline(self) -> Pipeline | None:
        """The pipeline that the model runs through, if it does."""
        return None


class Pipeline:
    """A base class of `NxDPPModel`: other packages find the model and its stages by it."""

    def _nxd_whole(self) -> Any:
        """The model that is cut into stages."""
        raise NotImplementedError

    def names_by_rank(self) -> list[list[str]]:
        """For each pipeline rank of NxD the names of the parameters and buffers that it has, in its order."""
        raise NotImplementedError

    def lent(self, of: Callable[[str], Any]) -> dict[str, Any]:
        """What belongs to weights that stages of this process read and that lie with other processes, by name. of: for a weight that lies here."""
        raise NotImplementedError

    def names_in_order(self) -> list[str]:
        """The names of the whole model's parameters and buffers, also of those that lie with other processes, module by module."""
        raise NotImplementedError


class Adapted:
    """A base class of `LoraModel`: packages below find the model with its adapters by it."""

    def get_base_model(self) -> Any:
        """The model inside, with its adapters."""
        raise NotImplementedError

    def also_held_by(self, holders: Iterable[Any]) -> None:
        """Other modules that have adapted layers in them, such as the stages of a pipeline."""
        raise NotImplementedError


def inner(found: Any) -> Any:
    """What is inside a `Wrapper` or a `Pipeline`; anything else as it is."""
    if isinstance(found, Pipeline):
        return found._nxd_whole()
    return found._nxd_inner() if isinstance(found, Wrapper) else found


def pipeline_of(found: Any) -> Pipeline | None:
    """The pipeline that a model is, or runs through; None without one."""
    if isinstance(found, Pipeline):
        return found
    return found._nxd_pipeline() if isinstance(found, Wrapper) else None
