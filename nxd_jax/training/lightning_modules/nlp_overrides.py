"""`neuronx_distributed_training.lightning_modules.nlp_overrides`: the Trainer, the strategy and the checkpoint files of YAML workflows."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ProgressBar
from pytorch_lightning.trainer.connectors.logger_connector import _LoggerConnector

from nxd_jax.lightning import layout
from nxd_jax.lightning.progress_bar import NeuronTQDMProgressBar
from nxd_jax.lightning.strategy import NeuronXLAStrategy
from nxd_jax.trainer import neuronx_distributed_config
from nxd_jax.training.lightning_modules.nlp_checkpoint_io import NLPCheckpointIO

__all__ = ["NLPCheckpointIO", "NLPDDPStrategy", "NLPTrainer"]

_OWN = {"lnc": None, "sequential_move_factor": None, "resume_from_checkpoint": None, "track_grad_norm": None, "devices": "auto"}
"""Options that Lightning's Trainer does not have (or has no more), or whose meaning is the strategy's."""

_DEFAULTS = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
    "num_sanity_val_steps": 2,
    "log_every_n_steps": 50,
}

_FIXED = {
    "gradient_clip_algorithm": (None, "gradients are clipped by their norm, in the optimizer: leave it out"),
    "enable_model_summary": (False, "a summary of one rank's parts says little: `nxdt-train --check` shows parameters and memory"),
}


class NLPTrainer(Trainer):
    """The original's Trainer: Lightning's, with the keys of `trainer` in a YAML file, on `devices * num_nodes` NeuronCores.

    The number of ranks is laid out when it is made. Steps 0, n, 2n, ... are logged, with n `log_every_n_steps`.
    lnc: physical cores of a logical one (1 or 2), accepted; sequential_move_factor: accepted without effect.
    accelerator: "tpu", "neuron" or "auto". resume_from_checkpoint: a path that `fit` goes on from unless it is given another.

    Raises TypeError for unknown keys, ValueError for what the original refuses: accumulate_grad_batches above 1 (it follows from data.global_batch_size),
    gradient_clip_algorithm, enable_model_summary.
    """

    def __init__(self, plugins: Any = None, strategy: Any = None, **options: Any):
        _check(options)
        own = {name: options.pop(name, default) for name, default in _OWN.items()}
        accelerator = options.pop("accelerator", None)
        if accelerator not in (None, "auto", "tpu", "neuron", "xla"):
            raise ValueError(f"trainer.accelerator: {accelerator!r} must be 'tpu' (which here stands for NeuronCores), or left out")
        self.lnc = own["lnc"]
        self.sequential_move_factor = own["sequential_move_factor"]
        if options.get("enable_progress_bar", True):
            options["callbacks"] = _with_progress_bar(options.get("callbacks"))
        super().__init__(
            plugins=list(plugins) if plugins else None,
            strategy=strategy if strategy is not None else NLPDDPStrategy(),
            devices=own["devices"],
            **{**_DEFAULTS, **options},
        )
        self._logger_connector = _Logging(self)
        if own["resume_from_checkpoint"] is not None:
            self.ckpt_path = own["resume_from_checkpoint"]
        layout.set_world(
            getattr(getattr(self.strategy, "parallel_devices", None), "asked", None), self.num_nodes, neuronx_distributed_config()
        )

    def fit(  # type: ignore[override]
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: Any = None,
        **options: Any,
    ) -> None:
        """Lightning's; what `exp_manager` chose to go on from comes before ckpt_path (which the original's training.py sets to `resume_from_checkpoint`, at
        every restart)."""
        chosen = self._checkpoint_connector._user_managed
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, None if chosen else ckpt_path, **options)


class _Logging(_LoggerConnector):
    """Writes steps 0, n, 2n, ..., which are those that `log_metrics` logs. Lightning writes steps n - 1, 2n - 1, ..., with what was logged last."""

    @property
    def should_update_logs(self) -> bool:
        trainer: Any = self.trainer
        if trainer.log_every_n_steps == 0 or trainer._active_loop is not trainer.fit_loop:
            return super().should_update_logs
        return bool(trainer.fit_loop.epoch_loop._batches_that_stepped % trainer.log_every_n_steps == 0 or trainer.should_stop)


def _with_progress_bar(callbacks: Any) -> list[Any]:
    """Callbacks, and a progress bar unless there is one among them."""
    found = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks else []
    return found if any(isinstance(c, ProgressBar) for c in found) else [*found, NeuronTQDMProgressBar()]


def trainer_keys() -> list[str]:
    """The keys of `trainer` in a YAML file."""
    return sorted({*inspect.signature(Trainer.__init__).parameters, *_OWN} - {"self", "plugins", "strategy"})


def _check(options: dict[str, Any]) -> None:
    known = trainer_keys()
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise TypeError(f"trainer has no key {name!r}" + (f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(known)}"))
    if (options.get("accumulate_grad_batches") or 1) > 1:
        raise ValueError(
            f"trainer.accumulate_grad_batches: {options['accumulate_grad_batches']} must be left out: micro-batches follow from data.global_batch_size, "
            "data.micro_batch_size and the number of data-parallel ranks"
        )
    for name, (value, why) in _FIXED.items():
        if options.get(name, value) not in (value, None):
            raise ValueError(f"trainer.{name}: {options[name]!r} is not supported: {why}")


class NLPDDPStrategy(NeuronXLAStrategy):
    """The original's strategy: `NeuronXLAStrategy` for modules that know their own configuration (`BaseModelModule.nxd_config`).

    restore_path: the checkpoint that training begins with. find_unused_parameters, cluster_environment, no_ddp_communication_hook: accepted without effect;
    ranks are those of the launcher.
    """

    strategy_name = "nlp_ddp"

    def __init__(
        self,
        find_unused_parameters: bool = False,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        restore_path: Any = None,
        no_ddp_communication_hook: bool = False,
        **options: Any,
    ):
        super().__init__(checkpoint_io=checkpoint_io, **options)
        self.restore_path = restore_path
