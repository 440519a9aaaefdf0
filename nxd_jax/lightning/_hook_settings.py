"""The settings of `NeuronHooksCallback`, read from what the script has: an object with attributes or a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class HookSettings:
    """What `NeuronHooksCallback` does; the names are NxD's."""

    hooks: bool
    target_layers: tuple[str, ...] = ()
    hooks_interval: int = 1
    enable_activation_dumps: bool = False
    enable_grad_dumps: bool = False
    dump_only_norms: bool = False
    dump_only_master_rank: bool = False
    enable_tb_logging_master_rank_activation_norms: bool = False
    enable_tb_logging_master_rank_grad_norms: bool = False
    master_print_model_layers: bool = False


def read(cfg: Any) -> HookSettings:
    """The settings in `cfg`; others in it are ignored, and with `hooks` off all are. Raises ValueError for a value that has no meaning."""
    names = [f.name for f in fields(HookSettings)]
    given = {name: value for name in names if (value := _setting(cfg, name)) is not None}
    if "hooks" not in given:
        raise ValueError(f"NeuronHooksCallback: cfg has no `hooks`, which must be True or False. Its settings are {', '.join(names)}")
    if not _switch("hooks", given["hooks"]):
        return HookSettings(False)
    kinds: dict[str, Any] = {"target_layers": _layers, "hooks_interval": _interval}
    return HookSettings(**{name: kinds.get(name, _switch)(name, value) for name, value in given.items()})


def _setting(cfg: object, name: str) -> Any:
    return cfg.get(name) if isinstance(cfg, Mapping) else getattr(cfg, name, None)


def _switch(name: str, value: object) -> bool:
    if value not in (True, False):
        raise ValueError(f"NeuronHooksCallback: {name} must be True or False, got {value!r}")
    return bool(value)


def _interval(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"NeuronHooksCallback: {name} must be a positive number of steps, got {value!r}")
    return value


def _layers(name: str, value: Any) -> tuple[str, ...]:
    try:
        given = value.split(",") if isinstance(value, str) else [*value]
        return tuple(layer.strip() for layer in given if layer.strip())
    except (TypeError, AttributeError):
        raise ValueError(f"NeuronHooksCallback: {name} must be names of modules, in a list or separated by commas, got {value!r}") from None
