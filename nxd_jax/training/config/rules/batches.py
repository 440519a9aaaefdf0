"""Batches, steps, and when Lightning's Trainer does what."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from nxd_jax.training.config.facts import Facts
from nxd_jax.training.config.problems import Problems


def check(facts: Facts, problems: Problems) -> None:
    _sizes(facts, problems)
    _trainer(facts, problems)
    _validation(facts, problems)


def _sizes(facts: Facts, problems: Problems) -> None:
    key, dp = "data.global_batch_size", facts.dp
    if dp is None or not facts.gbs:
        return
    unit = facts.mbs * dp
    if facts.gbs % unit:
        low = facts.gbs // unit * unit
        near = f"{low} or {low + unit}" if low else str(unit)
        problems.error(
            key,
            f"{facts.gbs} must be a multiple of data.micro_batch_size={facts.mbs} times {dp} data-parallel ranks ({facts.world} ranks / {facts.shared} of "
            f"tp, pp and cp), such as {near}. (The original rounds down, and trains on fewer.)",
        )
    elif facts.size("pp") > 1 and facts.microbatches is not None and facts.microbatches < facts.size("pp"):
        problems.warn(key, f"{facts.microbatches} micro-batches for {facts.size('pp')} pipeline stages: most of them wait most of the time")


def _trainer(facts: Facts, problems: Problems) -> None:
    if facts.get("trainer.accumulate_grad_batches", 1) > 1:
        problems.error(
            "trainer.accumulate_grad_batches",
            "must be left out: micro-batches follow from data.global_batch_size and data.micro_batch_size",
        )
    if facts.get("trainer.gradient_clip_algorithm") is not None:
        problems.error("trainer.gradient_clip_algorithm", "must be left out: gradients are clipped by their norm, in the optimizer")
    if facts.get("exp_manager.log_gradient_norm") and not facts.get("trainer.gradient_clip_val"):
        problems.warn(
            "exp_manager.log_gradient_norm",
            "True has no effect without trainer.gradient_clip_val: the norm is computed where gradients are clipped",
        )
    if facts.get("trainer.enable_model_summary"):
        problems.error("trainer.enable_model_summary", "True is not supported; this report has parameters and memory")
    allowed = (32, "32", "32-true") if facts.megatron else (32, "32", "32-true", "bf16-true", "16-true")
    if facts.get("trainer.precision", 32) not in allowed:
        problems.error(
            "trainer.precision", f"{facts.get('trainer.precision')!r} must be 32, or left out: precision.type says the precision"
        )
    for key in ("trainer.max_time", "exp_manager.max_time_per_run"):
        _time(key, facts.get(key), problems)
    if (
        facts.steps < 1
        and facts.get("trainer.max_epochs", -1) < 1
        and "trainer.max_steps" not in facts.bad
        and not facts.get("trainer.max_time")
    ):
        problems.error("trainer.max_steps", "is not set, and max_epochs is not either: training would never end")


def _time(key: str, value: Any, problems: Problems) -> None:
    """`value` must be what Lightning's Timer takes."""
    if value is None or (isinstance(value, str) and re.fullmatch(r"\d+:\d\d:\d\d:\d\d", value.strip())):
        return
    try:
        timedelta(**(value if isinstance(value, Mapping) else {"text": value}))
    except TypeError:
        problems.error(key, f"{value!r} must be DD:HH:MM:SS, or numbers of days, hours, minutes and seconds, such as {{hours: 2}}")


def _validation(facts: Facts, problems: Problems) -> None:
    limit = facts.get("trainer.limit_val_batches")
    key = "trainer.limit_val_batches"
    if facts.megatron and isinstance(limit, float) and limit > 1.0:
        problems.error(key, f"{limit} must be a whole number of batches, or a part of at most 1.0")
    elif isinstance(limit, float) and (limit > 1.0 or (limit != int(limit) and limit < 0)):
        problems.error(key, f"{limit}: a number with a point is a part of all batches, 0.0 to 1.0; give {int(limit)} for so many batches")
    every = facts.get("trainer.val_check_interval")
    if isinstance(every, float) and every > 1.0:
        problems.error(
            "trainer.val_check_interval",
            f"{every}: a number with a point is a part of an epoch, 0.0 to 1.0; give {int(every)} for so many steps",
        )
    elif isinstance(every, float) and every and facts.values["trainer"].get("check_val_every_n_epoch", 1) is None:
        problems.error(
            "trainer.val_check_interval",
            f"{every} is a part of an epoch, and needs trainer.check_val_every_n_epoch: 1; with null, which counts steps over all epochs, give their number",
        )
    if every is not None and not every:
        problems.error("trainer.val_check_interval", f"{every} must be above 0; trainer.limit_val_batches=0 leaves validation out")
    validates = limit not in (0, 0.0) and (every is None or facts.steps < 1 or every <= facts.steps)
    if facts.hf and validates and not facts.get("data.val_dir") and limit is not None:
        problems.warn(key, f"{limit}: data.val_dir is not set, so there is no validation")
    if (
        isinstance(every, int)
        and facts.get("trainer.check_val_every_n_epoch") is not None
        and limit not in (0, 0.0)
        and facts.steps
        and every > facts.steps > 0
    ):
        problems.warn("trainer.val_check_interval", f"{every} is more than max_steps={facts.steps}: there is no validation")
