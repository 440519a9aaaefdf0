"""`exp_manager`: what is logged and saved, and where."""

from __future__ import annotations

import difflib
import re

from nxd_jax.training.config.facts import Facts
from nxd_jax.training.config.problems import Problems

_NUMBERS = ("step", "epoch", "global_step", "consumed_samples", "val_loss", "reduced_train_loss")
"""What names of checkpoints are made of, as a rule."""

M, C = "exp_manager", "exp_manager.checkpoint_callback_params"


def check(facts: Facts, problems: Problems) -> None:
    if facts.get(f"{M}.log_local_rank_0_only") and facts.get(f"{M}.log_global_rank_0_only"):
        problems.error(f"{M}.log_global_rank_0_only", "True together with log_local_rank_0_only: True; set one of them to False")
    if facts.get(f"{M}.explicit_log_dir"):
        for key in ("exp_dir", "version"):
            if facts.get(f"{M}.{key}"):
                problems.warn(f"{M}.{key}", "is not used: explicit_log_dir says the whole folder")
    if facts.get(f"{M}.create_wandb_logger"):
        for key in ("name", "project"):
            if not facts.get(f"{M}.wandb_logger_kwargs.{key}"):
                problems.error(f"{M}.create_wandb_logger", f"True needs {key} in wandb_logger_kwargs")
    if facts.get(f"{M}.resume_from_checkpoint") and facts.get(f"{M}.resume_if_exists") and not facts.get("model.weight_init_only"):
        problems.note(
            f"{M}.resume_from_checkpoint",
            "the run begins with this checkpoint; a restart goes on from the run's own newest one (resume_if_exists)",
        )
    if facts.get(f"{M}.create_early_stopping_callback") and facts.get("trainer.limit_val_batches") in (0, 0.0):
        problems.warn(
            f"{M}.create_early_stopping_callback", "True has no effect: it looks after validations, and trainer.limit_val_batches is 0"
        )
    decay = facts.get(f"{M}.ema.decay")
    if facts.get(f"{M}.ema.enable") and decay is not None and not 0 <= float(decay) <= 1:
        problems.error(f"{M}.ema.decay", f"{decay} must be between 0 and 1")
    every = facts.get(f"{M}.ema.every_n_steps", 1)
    if facts.get(f"{M}.ema.enable") and every < 1:
        problems.error(f"{M}.ema.every_n_steps", f"{every} must be at least 1")
    if facts.get(f"{M}.create_checkpoint_callback", True):
        _saving(facts, problems)


def _saving(facts: Facts, problems: Problems) -> None:
    steps, seconds = facts.get(f"{C}.every_n_train_steps"), facts.get(f"{C}.train_time_interval")
    for key, unit in (("every_n_train_steps", "steps"), ("every_n_epochs", "epochs")):
        value = facts.get(f"{C}.{key}")
        if isinstance(value, int) and value < 0:
            problems.error(f"{C}.{key}", f"{value} must be a number of {unit} between two checkpoints; 0 saves none by {unit}")
    if steps and seconds:
        problems.error(f"{C}.train_time_interval", f"give every_n_train_steps ({steps}) or train_time_interval ({seconds}), not both")
    if steps and 0 < facts.steps < steps and not facts.get(f"{C}.save_last", True):
        problems.warn(
            f"{C}.every_n_train_steps",
            f"{steps} is more than trainer.max_steps={facts.steps}, and save_last is False: no checkpoint is written",
        )
    if facts.get(f"{C}.save_top_k", 3) < -1:
        problems.error(f"{C}.save_top_k", f"{facts.get(f'{C}.save_top_k')} must be a number of checkpoints, or -1 for all")
    _filename(str(facts.get(f"{C}.filename") or ""), problems)
    monitor = facts.get(f"{C}.monitor", "val_loss")
    if monitor == "val_loss" and facts.get("trainer.limit_val_batches") in (0, 0.0):
        problems.warn(
            f"{C}.monitor", "val_loss: there is no validation (trainer.limit_val_batches); monitor: step with mode: max keeps the newest"
        )
    if monitor in ("step", "global_step", "consumed_samples") and facts.get(f"{C}.mode", "min") == "min" and f"{C}.mode" not in facts.bad:
        problems.error(f"{C}.mode", f"min with monitor: {monitor} keeps the oldest checkpoints and deletes each new one; use max")


def _filename(template: str, problems: Problems) -> None:
    """Fields that are no number of a run stand as 0 in every name."""
    for field in re.findall(r"\{([^}:]*)", template):
        near = difflib.get_close_matches(field, _NUMBERS, 1, cutoff=0.75)
        if near and field not in _NUMBERS:
            problems.warn(
                f"{C}.filename",
                f"{{{field}}} is no number that runs log by themselves, and else 0 in every name; did you mean {{{near[0]}}}?",
            )
