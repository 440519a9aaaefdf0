"""Lightning's callbacks that average weights, with models that are made late or shared out by ranks. (Not part of NxD.)"""

from __future__ import annotations

from typing import Any

from pytorch_lightning import callbacks
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from nxd_jax.lightning.module import NeuronLTModule
from nxd_jax.tensor_parallel.full_weights import is_shared_out

_AVERAGING = tuple(getattr(callbacks, name) for name in ("StochasticWeightAveraging", "WeightAveraging") if hasattr(callbacks, name))
"""WeightAveraging came with Lightning 2.6."""


def check(trainer: Any, module: Any) -> None:
    """Raise MisconfigurationException where such a callback would average nothing, or one rank's parts."""
    for callback in trainer.callbacks:
        if isinstance(callback, _AVERAGING):
            _check(type(callback).__name__, module)


def _check(name: str, module: Any) -> None:
    if isinstance(module, NeuronLTModule) and module.model is None:
        why = f"{name} copies the module before {type(module).__name__}.setup makes its model, and would average nothing"
    elif any(is_shared_out(p) for p in module.parameters()):
        why = f"{name} keeps whole models on the CPU and in checkpoints, but tensor parallel ranks hold parts of this one"
    else:
        return
    raise MisconfigurationException(
        f"{why}. Average in training_step: keep a tensor on the device for each of self.model.parameters(), and let it follow "
        "(average.lerp_(parameter.detach(), 0.01)) after optimizer.step(). A LightningModule without parallel layers, made in __init__, works as it is"
    )
