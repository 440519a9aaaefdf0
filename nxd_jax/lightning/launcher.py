"""Starting a `Trainer`'s work: here and now. One process hosts all ranks, or torchrun has started one for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytorch_lightning.strategies.launchers.launcher import _Launcher

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class _NeuronXLALauncher(_Launcher):
    """`neuronx_distributed.lightning.launcher._NeuronXLALauncher`: calls the function in this process, also in a notebook."""

    def __init__(self, strategy: Any = None):
        self._strategy = strategy

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Call the function."""
        return function(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        """There are no processes of ours to end."""
