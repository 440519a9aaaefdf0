"""Optimizers and schedules by the names that YAML files have for them; your own by `register_optimizer` and `register_scheduler`, as in NeMo."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch.optim.lr_scheduler import ExponentialLR, StepLR

from nxd_jax.training.config.loading import plain
from nxd_jax.training.optim import lr_schedulers
from nxd_jax.utils import _constructors
from nxd_jax.utils.adamw_fp32_optim_params import AdamW_FP32OptimParams

OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adamw_fp32OptState": AdamW_FP32OptimParams,
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
}
"""By `model.optim.name`."""

SCHEDULERS: dict[str, Any] = {
    **{
        name: getattr(lr_schedulers, name)
        for name in (
            *("LinearAnnealingWithWarmUp", "CosineAnnealing", "WarmupPolicy", "WarmupHoldPolicy"),
            *("SquareAnnealing", "SquareRootAnnealing", "InverseSquareRootAnnealing", "NoamAnnealing", "NoamHoldAnnealing"),
            *("WarmupAnnealing", "PolynomialDecayAnnealing", "PolynomialHoldDecayAnnealing"),
        )
    },
    "StepLR": StepLR,
    "ExponentialLR": ExponentialLR,
}
"""By `model.optim.sched.name`."""

EACH_EPOCH = ("ExponentialLR",)
"""Schedules that take a step at the end of an epoch; others after each of the optimizer's."""

OF_THE_LOOP = ("monitor", "reduce_on_plateau", "t_max_epochs", "t_accumulate_grad_batches", "t_limit_train_batches", "t_num_workers")
"""Keys of `model.optim.sched` that NeMo takes for itself; without effect, as `max_steps` is given."""

_NOT_HERE = {
    "novograd": "NovoGrad is no optimizer of torch: register one with nxd_jax.training.optim.register_optimizer('novograd', cls, None)"
}
_WITHOUT_EFFECT = ("capturable", "fused", "foreach", "no_deprecation_warning")
"""Options of optimizers that choose how a GPU computes."""


def register_optimizer(name: str, optimizer: Any, optimizer_params: Any = None) -> None:
    """`nemo.core.optim.register_optimizer`: a class for `model.optim.name`. optimizer_params: NeMo's dataclass of its options, accepted without effect.

    Raises ValueError for a name that is taken.
    """
    _register("optimizer", OPTIMIZERS, name, optimizer)


def register_scheduler(name: str, scheduler: Any, scheduler_params: Any = None) -> None:
    """`nemo.core.optim.lr_scheduler.register_scheduler`: a class for `model.optim.sched.name`. Raises ValueError for a name that is taken."""
    _register("scheduler", SCHEDULERS, name, scheduler)


def _register(what: str, table: dict[str, Any], name: str, cls: Any) -> None:
    if table.get(name, cls) is not cls:
        raise ValueError(f"there is an {what} {name!r} already: {table[name].__name__}; register yours under another name")
    table[name] = cls


def get_optimizer(name: str, **options: Any) -> Any:
    """The class of an optimizer (with options already given, if there are some). Raises ValueError for unknown names."""
    if name not in OPTIMIZERS:
        raise ValueError(_NOT_HERE.get(name) or _unknown("model.optim.name", name, OPTIMIZERS))
    found = OPTIMIZERS[name]
    if not options:
        return found

    class _WithOptions(found):  # type: ignore[valid-type, misc]
        def __init__(self, params: Any, **given: Any):
            super().__init__(params, **{**options, **given})

    _WithOptions.__name__ = found.__name__
    return _WithOptions


def optimizer_options(optim: Any) -> dict[str, Any]:
    """The options in `model.optim`, for the class that its name says. Raises ValueError for those that the class does not take."""
    found = {str(k): v for k, v in plain(optim).items() if k not in ("name", "sched", *_WITHOUT_EFFECT)}
    taken = inspect.signature(get_optimizer(optim["name"]).__init__).parameters
    if not _constructors.passes_on(taken):
        for key in found:
            if key not in taken:
                allowed = [name for name in taken if name not in ("self", "params", *_WITHOUT_EFFECT)]
                raise ValueError(f"model.optim.{key}: {optim['name']} takes {', '.join(allowed)}")
    for key, value in found.items():
        default = taken[key].default if key in taken else inspect.Parameter.empty
        found[key] = _option(f"model.optim.{key}", value, default, number=key in ("lr", "eps", "weight_decay"))
    return found


def options_of(optimizer: Any, names: Collection[str]) -> list[dict[str, Any]]:
    """Of each group of parameters the options of these names; of lr the rate that a schedule begins with."""
    return [
        {name: group["initial_lr"] if name == "lr" and "initial_lr" in group else group[name] for name in names if name in group}
        for group in optimizer.param_groups
    ]


def make_scheduler(optimizer: Any, sched: dict[str, Any]) -> Any:
    """A schedule from `model.optim.sched` (with `max_steps`). Raises ValueError for unknown names, and keys that it does not take."""
    options = {key: value for key, value in sched.items() if key not in OF_THE_LOOP}
    name = options.pop("name", None)
    if name not in SCHEDULERS:
        raise ValueError(_unknown("model.optim.sched.name", name, SCHEDULERS))
    cls = SCHEDULERS[name]
    allowed = scheduler_keys(cls)
    if allowed is not None:
        if "max_steps" not in allowed:
            options.pop("max_steps", None)
        for key in options:
            if key not in allowed:
                raise ValueError(f"model.optim.sched.{key}: {name} takes {', '.join(allowed)}")
    if options.get("last_epoch", -1) not in (-1, None):
        raise ValueError(
            f"model.optim.sched.last_epoch: {options['last_epoch']!r} must be left out: a checkpoint says at which step a run is"
        )
    for key, value in options.items():
        if isinstance(value, str):
            options[key] = _number(f"model.optim.sched.{key}", value)
    return cls(getattr(optimizer, "_optimizer", optimizer), **options)


def scheduler_keys(cls: Any) -> list[str] | None:
    """The keys that a class of schedules takes, with those of the classes that it derives from; None: any."""
    found: list[str] = []
    for taken in _constructors.parameters(cls):
        found += [name for name, p in taken.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and name not in found]
        if not _constructors.passes_on(taken):
            return [name for name in found if name not in ("self", "optimizer")]
    return None


def _option(name: str, value: Any, default: Any, number: bool) -> Any:
    """A value of a YAML file as a class with this default takes it: texts such as 1e-4 are numbers, lists are tuples; a text is no switch."""
    if name == "model.optim.betas" or (isinstance(default, tuple) and isinstance(value, (list, tuple))):
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{name}: {value!r} must be a list of numbers")
        return tuple(None if part is None else _number(name, part) for part in value)
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError(f"{name}: {value!r} must be True or False, without quotes")
        if value and name == "model.optim.differentiable":
            raise ValueError(f"{name}: True is for gradients of a step, which a training does not take: leave it out")
        return value
    if isinstance(value, (str, list, tuple)) and (isinstance(default, (int, float)) or (number and not isinstance(default, tuple))):
        return _number(name, value)
    return float(value) if number and isinstance(value, int) and not isinstance(value, bool) else value


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: {value!r} must be a number") from None


def _unknown(key: str, name: Any, table: dict[str, Any]) -> str:
    lowered = {known.lower(): known for known in table}
    near = difflib.get_close_matches(str(name).lower(), lowered, 1, cutoff=0.5)
    return f"{key}: {name!r} must be one of {', '.join(table)}" + (f" (did you mean {lowered[near[0]]!r}?)" if near else "")
