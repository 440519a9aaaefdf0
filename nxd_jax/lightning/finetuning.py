"""Lightning's callbacks that freeze and unfreeze layers, with models that are made late. (Not part of NxD.)

Lightning calls their `setup`, which freezes layers, before the module's, which makes the model. It is put off until the model is there; optimizers are
made after that.
"""

from __future__ import annotations

import functools
from typing import Any

from pytorch_lightning.callbacks import BaseFinetuning

from nxd_jax.lightning.module import NeuronLTModule

Delayed = list[tuple[BaseFinetuning, Any]]


def put_off(trainer: Any, module: Any) -> Delayed:
    """Keep such callbacks from being set up before the model is there; they, and what they will be called with."""
    found: Delayed = []
    for callback in trainer.callbacks:
        if isinstance(callback, BaseFinetuning):
            vars(callback).pop("setup", None)  # of a run that ended before it was due
            if isinstance(module, NeuronLTModule) and module.model is None:
                given: dict[str, Any] = {}
                callback.setup = functools.partial(_keep, given)  # type: ignore[method-assign]
                found.append((callback, given))
    return found


def _keep(given: dict[str, Any], trainer: Any, pl_module: Any, stage: str) -> None:
    given.update(trainer=trainer, pl_module=pl_module, stage=stage)


def make_up(delayed: Delayed) -> None:
    """Set them up."""
    while delayed:
        callback, given = delayed.pop(0)
        vars(callback).pop("setup", None)
        callback.setup(**given)
