"""The optimizer and the schedule of learning rates."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from nxd_jax.training.config.facts import Facts
from nxd_jax.training.config.problems import Problems
from nxd_jax.training.optim import registry

OPTIM, SCHED = "model.optim", "model.optim.sched"
_NUMBERS = ("lr", "weight_decay", "eps")


def check(facts: Facts, problems: Problems) -> None:
    optim = facts.get(OPTIM)
    if facts.custom and optim is None:
        return
    if not isinstance(optim, Mapping):
        problems.error(OPTIM, "is missing: it names the optimizer (name: adamw_fp32OptState) and its learning rate (lr: 3e-4)")
        return
    _optimizer(facts, problems, optim)
    sched = optim.get("sched")
    if isinstance(sched, Mapping):
        _schedule(facts, problems, sched)
    elif sched is not None:
        problems.error(SCHED, f"{sched!r} must be keys with values: name, warmup_steps and so on")


def _optimizer(facts: Facts, problems: Problems, optim: Mapping[str, Any]) -> None:
    if not optim.get("name"):
        problems.error(f"{OPTIM}.name", f"is missing; it is one of {', '.join(registry.OPTIMIZERS)}")
        return
    try:
        registry.get_optimizer(str(optim["name"]))
    except ValueError as error:
        problems.error(f"{OPTIM}.name", _tail(error))
        return
    for key in optim:
        if key not in ("name", "sched", *_NUMBERS, "betas"):
            _option(problems, str(optim["name"]), key, optim[key])
    _numbers(problems, optim)
    if not any(p.key.startswith(f"{OPTIM}.") for p in problems.of("error")):
        _together(problems, optim)
    norms = facts.get("model.do_layer_norm_weight_decay")
    if facts.hf and norms is not None:
        said = "are decayed" if norms else "are not decayed"
        problems.note(
            "model.do_layer_norm_weight_decay", f"{norms}: weights of norms {said}; the original does the opposite for Hugging Face models"
        )
    if facts.hf and optim.get("weight_decay") not in (None, 0.01):
        problems.note(
            f"{OPTIM}.weight_decay",
            f"{optim['weight_decay']} is used; the original uses 0.01 for Hugging Face models whatever the file says",
        )


def _option(problems: Problems, name: str, key: str, value: Any) -> None:
    try:
        registry.optimizer_options({"name": name, key: value})
    except ValueError as error:
        near = difflib.get_close_matches(key, [*_NUMBERS, "betas", "sched", "name"], 1, cutoff=0.7)
        problems.error(f"{OPTIM}.{key}", _tail(error) + (f" (did you mean {near[0]}?)" if near else ""))


def _together(problems: Problems, optim: Mapping[str, Any]) -> None:
    """What the optimizer itself refuses, if it is torch's or ours."""
    cls = registry.get_optimizer(str(optim["name"]))
    if not cls.__module__.startswith(("torch.", "nxd_jax.")):
        return
    try:
        cls([torch.nn.Parameter(torch.zeros(1))], **registry.optimizer_options(optim))
    except (TypeError, ValueError) as error:
        problems.error(OPTIM, f"{optim['name']} refuses its options: {_tail(error)}")


def _numbers(problems: Problems, optim: Mapping[str, Any]) -> None:
    for key in _NUMBERS:
        value = optim.get(key)
        if key == "eps" and isinstance(value, (list, tuple)):
            _option(problems, str(optim["name"]), key, value)  # Adafactor has two
            continue
        if value is not None and ((found := _number(value)) is None or found < 0):
            problems.error(f"{OPTIM}.{key}", f"{value!r} must be a number of at least 0")
    if optim.get("lr") is None:
        problems.error(f"{OPTIM}.lr", "is missing: the learning rate")
    betas = optim.get("betas")
    if betas is not None:
        good = (
            isinstance(betas, (list, tuple))
            and len(betas) == 2
            and all((found := _number(b)) is not None and 0 <= found < 1 for b in betas)
        )
        if not good:
            problems.error(f"{OPTIM}.betas", f"{betas!r} must be two numbers from 0 to below 1")


def _schedule(facts: Facts, problems: Problems, sched: Mapping[str, Any]) -> None:
    name = sched.get("name")
    if not isinstance(name, str) or name not in registry.SCHEDULERS:
        problems.error(f"{SCHED}.name", _refusal(name))
        return
    if name in registry.EACH_EPOCH:
        problems.note(f"{SCHED}.name", f"{name} takes a step at the end of each epoch, as in the original")
    allowed = registry.scheduler_keys(registry.SCHEDULERS[name])
    unknown = [key for key in sched if allowed is not None and key not in ("name", "max_steps", *registry.OF_THE_LOOP, *allowed)]
    for key in unknown:
        problems.error(f"{SCHED}.{key}", f"{name} takes {', '.join(a for a in allowed or () if a != 'last_epoch')}")
    ours = {k: v for k, v in sched.items() if v is not None and k not in ("name", *registry.OF_THE_LOOP, *unknown)}
    wrong = [k for k, v in ours.items() if (not isinstance(v, bool) if k == "cycle" else _number(v) is None)]
    for key in wrong:
        problems.error(f"{SCHED}.{key}", f"{sched[key]!r} must be {'True or False' if key == 'cycle' else 'a number'}")
    for key in (k for k in sched if k in registry.OF_THE_LOOP):
        problems.warn(f"{SCHED}.{key}", "has no effect: a schedule follows the number of steps alone")
    if not unknown and not wrong:
        _steps(facts, problems, sched)


def _refusal(name: Any) -> str:
    """What the registry says of a name that it does not have."""
    try:
        registry.make_scheduler(None, {"name": None if name is None else str(name)})
    except ValueError as error:
        return _tail(error)
    raise AssertionError(name)


def _steps(facts: Facts, problems: Problems, sched: Mapping[str, Any]) -> None:
    steps, warmup, constant = facts.steps, _number(sched.get("warmup_steps")) or 0, _number(sched.get("constant_steps")) or 0
    if "trainer.max_steps" in facts.bad:
        return
    if steps < 1:
        problems.error("trainer.max_steps", f"must be given: {SCHED} needs the number of steps, which is {steps}")
        return
    if sched.get("last_epoch") not in (None, -1):
        problems.error(f"{SCHED}.last_epoch", f"{sched['last_epoch']!r} must be left out: a checkpoint says at which step a run is")
    for what in ("warmup", "constant", "hold"):
        found = _number(sched.get(f"{what}_steps"))
        if found is not None and (found < 0 or found != int(found)):
            problems.error(f"{SCHED}.{what}_steps", f"{found:g} must be a whole number of steps, and not negative")
    if sched.get("max_steps") not in (None, steps):
        problems.warn(f"{SCHED}.max_steps", f"{sched['max_steps']} has no effect: it is always trainer.max_steps={steps}")
    for what in ("warmup", "constant", "hold"):
        if sched.get(f"{what}_steps") is not None and sched.get(f"{what}_ratio") is not None:
            problems.error(f"{SCHED}.{what}_ratio", f"give {what}_steps or {what}_ratio, not both")
    if warmup > steps:
        problems.error(
            f"{SCHED}.warmup_steps", f"{warmup:g} is more than trainer.max_steps={steps}: the learning rate would never be reached"
        )
    if constant + warmup > steps and constant:
        problems.warn(
            f"{SCHED}.constant_steps",
            f"{constant:g} and warmup_steps={warmup:g} are more than trainer.max_steps={steps}: behind the warm-up the learning rate is min_lr at once",
        )
    if (_number(sched.get("min_lr")) or 0.0) < 0:
        problems.error(f"{SCHED}.min_lr", f"{sched['min_lr']} must not be negative")
    low, lr = _number(sched.get("min_lr")), _number(facts.get(f"{OPTIM}.lr"))
    if low is not None and lr is not None and low > lr:
        problems.error(f"{SCHED}.min_lr", f"{low:g} must not be above model.optim.lr={lr:g}")


def _number(value: Any) -> float | None:
    """A finite number, also as text (YAML reads 1e-4 as text); None for all else."""
    if isinstance(value, bool):
        return None
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None


def _tail(error: Exception) -> str:
    """Without the key, which a report says itself."""
    return re.sub(r"^model\.optim[\w.]*: ", "", str(error))
