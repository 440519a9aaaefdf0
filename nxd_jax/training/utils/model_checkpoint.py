"""`neuronx_distributed_training.utils.exp_manager.NeMoModelCheckpoint`: which checkpoints a run saves, under which names, and which it keeps."""

from __future__ import annotations

import logging
import os
import re
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from nxd_jax.checkpoint import savers, saving
from nxd_jax.checkpoint.storage import create_checkpoint_storage
from nxd_jax.training.lightning_modules.nlp_checkpoint_io import STATE_KEY
from nxd_jax.training.utils import resuming
from torch_bridge.mesh import world

logger = logging.getLogger("nxd_jax")

LAST = "-last"
_EXTRACTING = "NEURON_EXTRACT_GRAPHS_ONLY"
"""Set by neuron_parallel_compile: nothing is trained that would be worth a `-last`."""


class NeMoModelCheckpoint(ModelCheckpoint):
    """Lightning's ModelCheckpoint with the original's names and keys.

    filename: such as "name--{step}-{consumed_samples}", with the step and samples of the moment. (The original has the samples that were logged last.) A
    monitored `reduced_train_loss` is that of the step that is saved, also where it is not logged.
    save_last: after each save, and when training ends, one more under `<filename>-last`. train_time_interval: seconds, or a timedelta. n_resume: the
    checkpoints in dirpath are this run's, as those that it saves: they count for save_top_k. (The original never deletes those before a resume.)
    save_best_model: at the end, put back the weights of the best one. use_master_weights_in_ckpt, model_parallel_size, async_save, save_last_n_optim_states,
    always_save_nemo, prefix, postfix: accepted without effect.

    Raises ValueError for save_nemo_on_train_end: a .nemo file needs NeMo.
    """

    def __init__(
        self,
        always_save_nemo: bool = False,
        save_nemo_on_train_end: bool = False,
        save_best_model: bool = False,
        postfix: str = ".nemo",
        n_resume: bool = False,
        model_parallel_size: int | None = None,
        use_master_weights_in_ckpt: bool = False,
        async_save: bool = False,
        save_last_n_optim_states: int = -1,
        enable_version_counter: bool = False,
        prefix: str | None = None,
        train_time_interval: float | timedelta | None = None,
        **options: Any,
    ):
        if save_nemo_on_train_end:
            raise ValueError(
                "checkpoint_callback_params.save_nemo_on_train_end is True, and a .nemo file is written by NeMo: set it to False; checkpoints are folders that "
                "neuronx_distributed.load_checkpoint and nxd-ckpt read"
            )
        if train_time_interval is not None and not isinstance(train_time_interval, timedelta):
            train_time_interval = timedelta(seconds=float(train_time_interval))
        super().__init__(train_time_interval=train_time_interval, enable_version_counter=bool(enable_version_counter), **options)
        self.CHECKPOINT_NAME_LAST = f"{self.filename or '{epoch}-{step}'}{LAST}"
        self.save_best_model = save_best_model
        self.n_resume = n_resume
        self._surplus: list[str] = []
        self._cleaned = False
        self._waits = False

    @property
    def state_key(self) -> str:
        """The same whatever the options are: a run may go on with others."""
        return STATE_KEY

    # -- when -----------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        with warnings.catch_warnings():  # going on in a folder is what runs do
            warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
            super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._check(trainer)
            if self.n_resume:
                self._adopt(trainer.strategy.broadcast(resuming.complete_tags(self.dirpath)))

    def _check(self, trainer: Trainer) -> None:
        every = self._every_n_train_steps >= 1 or self._every_n_epochs >= 1 or self._train_time_interval is not None
        if every and self.save_top_k and str(self.monitor).startswith("val") and not trainer.limit_val_batches and not self.save_last:
            raise MisconfigurationException(
                f"checkpoint_callback_params.monitor: {self.monitor!r} comes from validation, and trainer.limit_val_batches is {trainer.limit_val_batches}: no "
                "checkpoint would ever be saved. To keep the last save_top_k, set monitor to step and mode to max"
            )
        if not every and not self.save_last:
            logger.warning(
                "no checkpoint will be saved: set checkpoint_callback_params.every_n_train_steps, every_n_epochs, train_time_interval or save_last"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if trainer.ckpt_path is not None and resuming.lies_in(str(trainer.ckpt_path), self.dirpath):
            self._last_global_step_saved = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Save at once, whatever validation would say after this batch; a monitored value that is not there yet is waited for."""
        if self._should_skip_saving_checkpoint(trainer) or not self._is_due(trainer):
            return
        found = self._monitor_candidates(trainer)
        if self.monitor is not None and self.monitor not in found and self.save_top_k:
            self._wait(trainer, found)
            return
        self._save_topk_checkpoint(trainer, found)
        self._save_last_checkpoint(trainer, found)

    def _wait(self, trainer: Trainer, found: dict[str, torch.Tensor]) -> None:
        """For the monitored value, which a validation may log, and the module after this batch.

        Raises MisconfigurationException if neither does, and there is no save_last.
        """
        if not trainer.enable_validation:
            if self._waits and not self.save_last:
                names = ", ".join(sorted(found))
                raise MisconfigurationException(
                    f"checkpoint_callback_params.monitor: nothing logs {self.monitor!r}, and there is no validation: no checkpoint would ever be saved. "
                    f"There are {names}. To keep the last save_top_k, set monitor to step and mode to max"
                )
            self._save_last_checkpoint(trainer, found)
        self._waits = True

    def _is_due(self, trainer: Trainer) -> bool:
        by_step = self._every_n_train_steps >= 1 and trainer.global_step % self._every_n_train_steps == 0
        if self._train_time_interval is None:
            return by_step
        now = time.monotonic()
        passed = now - (now if self._last_time_checked is None else self._last_time_checked)
        by_time = bool(trainer.strategy.broadcast(passed >= self._train_time_interval.total_seconds()))
        if by_time:
            self._last_time_checked = now
        return by_step or by_time

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._waits and not self._should_skip_saving_checkpoint(trainer):
            self._waits = False
            found = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, found)
            self._save_last_checkpoint(trainer, found)
            return
        super().on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """With save_last, save once more; with save_best_model, put back the best weights."""
        if trainer.fast_dev_run:
            return
        if self.save_last and not os.environ.get(_EXTRACTING) and not self._last_is_now(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
        if self.save_best_model:
            self._restore_best(trainer)

    def save_now(self, trainer: Trainer) -> None:
        """Save the present step if it is not saved, for a run that has to end: as one of the last-K if steps are what counts, else as `-last`."""
        if self._should_skip_saving_checkpoint(trainer):
            return
        found = self._monitor_candidates(trainer)
        if self.monitor == "step" and self.mode == "max" and self.save_top_k:
            self._save_topk_checkpoint(trainer, found)
            return
        chosen, self.save_last = self.save_last, True
        try:
            self._save_last_checkpoint(trainer, found)
        finally:
            self.save_last = chosen

    # -- names ----------------------------------------------------------------------------------------

    def _monitor_candidates(self, trainer: Any) -> dict[str, torch.Tensor]:
        found = super()._monitor_candidates(trainer)
        data, module = trainer.datamodule, trainer.lightning_module
        if hasattr(data, "compute_consumed_samples"):
            steps = trainer.global_step - getattr(module, "init_global_step", 0)
            found["consumed_samples"] = torch.tensor(float(data.compute_consumed_samples(steps)))
        if hasattr(module, "step_numbers"):  # callbacks come before the module logs the step
            for name, value in module.step_numbers().items():
                if name == self.monitor or f"{{{name}" in (self.filename or ""):
                    found[name] = torch.tensor(float(value))
        return found

    def _last_is_now(self, trainer: Trainer) -> bool:
        return (
            bool(self.last_model_path)
            and self._last_checkpoint_saved == self.last_model_path
            and self._last_global_step_saved == trainer.global_step
        )

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        if not self.dirpath:
            return set()
        found = resuming.complete_tags(self.dirpath)
        return {resuming.join(self.dirpath, tag.name) for tag in found if tag.name.endswith(LAST + self.FILE_EXTENSION)}

    # -- what is kept ---------------------------------------------------------------------------------

    def _adopt(self, found: list[resuming.Tag]) -> None:
        """Take the complete checkpoints of earlier runs for one's own."""
        regular = _pattern(self.filename or "{epoch}-{step}")
        for tag in found:
            path, stem = resuming.join(self.dirpath, tag.name), tag.name.removesuffix(self.FILE_EXTENSION)
            if stem.endswith(LAST) and regular.fullmatch(stem.removesuffix(LAST)):
                if self.last_model_path:
                    self._surplus.append(self.last_model_path)
                self.last_model_path = path
            elif regular.fullmatch(stem) and (score := self._score(tag)) is not None:
                self.best_k_models[path] = torch.tensor(score)
        self._rank()

    def _score(self, tag: resuming.Tag) -> float | None:
        """The monitored value that a name says."""
        if self.monitor in ("step", "global_step"):
            return None if tag.step is None else float(tag.step)
        said = re.findall(rf"(?<![A-Za-z0-9_]){re.escape(str(self.monitor))}=(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)", tag.name)
        return float(said[-1]) if said else None

    def _rank(self) -> None:
        """The best and the worst of what is kept; what is more than save_top_k goes with the next save."""
        ordered = sorted(self.best_k_models, key=lambda path: float(self.best_k_models[path]), reverse=self.mode == "max")
        if self.save_top_k > 0:
            for path in ordered[self.save_top_k :]:
                self._surplus.append(path)
                del self.best_k_models[path]
            ordered = ordered[: self.save_top_k]
        if not ordered:
            return
        self.best_model_path, self.best_model_score = ordered[0], self.best_k_models[ordered[0]]
        if len(ordered) == self.save_top_k:
            self.kth_best_model_path, self.kth_value = ordered[-1], self.best_k_models[ordered[-1]]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of what a checkpoint says, take the exact values of checkpoints that are still here, wherever the folder was."""
        if not self.n_resume:
            return
        scores = {str(path).rstrip("/").rpartition("/")[2]: value for path, value in state_dict.get("best_k_models", {}).items()}
        for path in self.best_k_models:
            value = scores.get(path.rpartition("/")[2])
            if value is not None and self.monitor == state_dict.get("monitor"):
                self.best_k_models[path] = torch.as_tensor(value).cpu()
        self._rank()

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        if self.last_model_path and not self.save_last and filepath != self.last_model_path:  # of a run that had to end
            self._surplus.append(self.last_model_path)
            self.last_model_path = ""
        gone, self._surplus = self._surplus, []
        for path in gone:
            if path != filepath:
                self._remove_checkpoint(trainer, path)
        if not self._cleaned and self.n_resume:
            self._cleaned = True
            self._remove_unfinished(os.path.basename(filepath))

    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:
        """Also the one that was resumed from, if it is this run's."""
        return previous != current and resuming.lies_in(previous, self.dirpath)

    def _remove_unfinished(self, but: str) -> None:
        """Remove what killed runs left half written, once the first save of this one is complete."""
        folder, pattern = self.dirpath, _pattern(self.filename or "{epoch}-{step}")

        def remove() -> None:
            storage = create_checkpoint_storage(str(folder))
            for name in resuming.incomplete_tags(folder):
                stem = name.partition(self.FILE_EXTENSION)[0].removesuffix(LAST)
                if name != but and pattern.fullmatch(stem) and savers.owner(storage.root / name) is None:
                    logger.info("%s was never completed and is removed", resuming.join(folder, name))
                    storage.remove_tags([name])

        if world.process_index() == 0:
            saving.then(remove)

    def _restore_best(self, trainer: Trainer) -> None:
        trainer.strategy.barrier("save_best_model")
        if not self.best_model_path:
            logger.warning("checkpoint_callback_params.save_best_model: no checkpoint was saved, the weights are the last ones")
            return
        loaded = trainer.strategy.load_checkpoint(self.best_model_path)
        trainer.strategy.load_model_state_dict(loaded, strict=True)
        logger.info("the weights are those of the best checkpoint, %s", self.best_model_path)


def _pattern(filename: str) -> re.Pattern[str]:
    """What names of a template look like."""
    literal = [re.escape(part) for part in re.split(r"\{[^}]*\}", filename)]
    return re.compile(".*".join(literal) + r"(?:-v\d+)?")
