"""An exponential moving average of the weights: validated in their place, saved and resumed with them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer

from nxd_jax.checkpoint import reading
from nxd_jax.lightning.stored import StoredWeights
from nxd_jax.tensor_parallel import casting
from nxd_jax.training.lightning_modules.nlp_checkpoint_io import AVERAGES


class EMA(Callback):
    """`exp_manager.ema`. After every every_n_steps-th step: average = decay * average + (1 - decay) * weights, in float32 whatever the weights' precision.

    Validation and tests are of the averages, unless validate_original_weights. A checkpoint has them in `ema/`, under the names of `model/`. cpu_offload is
    accepted without effect: each rank holds the averages of its own part of the weights. (The original crashes.)

    Raises ValueError for a decay outside 0 to 1, or every_n_steps below 1.
    """

    def __init__(self, decay: float = 0.999, validate_original_weights: bool = False, every_n_steps: int = 1, cpu_offload: bool = False):
        if not 0 <= decay <= 1:
            raise ValueError(f"exp_manager.ema.decay must be between 0 and 1, got {decay}")
        if every_n_steps < 1:
            raise ValueError(f"exp_manager.ema.every_n_steps must be at least 1, got {every_n_steps}")
        self.decay = decay
        self.validate_original_weights = validate_original_weights
        self.every_n_steps = every_n_steps
        self.averages: dict[str, torch.Tensor] = {}
        self._stored: StoredWeights | None = None
        self._step = 0
        self._swapped: dict[str, torch.Tensor] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.averages = {name: _beside(p) for name, p in _trained(pl_module)}
        if self._stored is not None:
            reading.load_model(self._stored.folder, self.averages, True, None)
            self._stored = None
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == self._step or trainer.global_step % self.every_n_steps:
            return
        self._step = trainer.global_step
        with torch.no_grad():
            for name, p in _trained(pl_module):
                self.averages[name].mul_(self.decay).add_(p.detach().to(self.averages[name].dtype), alpha=1 - self.decay)

    # -- validation -----------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.averages and not self.validate_original_weights:
            self._swap(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swap_back(pl_module)

    on_test_start = on_validation_start
    on_test_end = on_validation_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """What is saved afterwards are the weights."""
        self._swap_back(pl_module)

    @contextlib.contextmanager
    def in_place_of_weights(self, pl_module: LightningModule) -> Iterator[None]:
        """The module with the averages as its weights."""
        self._swap(pl_module)
        try:
            yield
        finally:
            self._swap_back(pl_module)

    def _swap(self, module: LightningModule) -> None:
        with torch.no_grad():
            for name, p in _trained(module):
                self._swapped[name] = p.detach().clone()
                p.copy_(self.averages[name].to(p.dtype))

    def _swap_back(self, module: LightningModule) -> None:
        with torch.no_grad():
            for name, p in _trained(module) if self._swapped else ():
                p.copy_(self._swapped[name])
        self._swapped = {}

    # -- checkpoints ----------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[AVERAGES] = dict(self.averages)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take over the averages; without any in the checkpoint they begin as the weights."""
        found = checkpoint.get(AVERAGES)
        self._stored = found if isinstance(found, StoredWeights) else None


def _trained(module: LightningModule) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def _beside(p: torch.nn.Parameter) -> torch.Tensor:
    """A parameter's value in float32, with what says how ranks share it out."""
    found = p.detach().to(casting.wide_dtype()).clone()
    found.__dict__.update({name: value for name, value in p.__dict__.items() if not name.startswith("_")})
    return found
