"""`neuronx_distributed.modules.lora.config`: what adapters a model gets, and how they are saved."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nxd_jax._flags import flag

BIAS_MODES = ("none", "all", "lora_only")
INIT_MODES = ("default", "gaussian")

RUN_FIELDS = (
    "enable_lora",
    "lora_verbose",
    "load_lora_from_ckpt",
    "lora_load_tag",
    "lora_save_dir",
    "merge_lora",
    "save_lora_base",
    "save_lora_config_adapter",
    "merge_sharded_lora",
)
"""What a run decides for itself, whatever the checkpoint that it loads was made with."""

SAVED_FIELDS = (
    "bias",
    "init_lora_weights",
    "lora_alpha",
    "lora_dropout",
    "lora_rank",
    "use_rslora",
    "target_modules",
    "modules_to_save",
    "save_lora_base",
    "merge_lora",
    "save_lora_config_adapter",
)
"""What NxD saves of a configuration."""


@dataclasses.dataclass
class LoraConfig:
    """`modules.lora.LoraConfig`: the adapters of a model.

    lora_rank: inner size r of the adapters, a positive int. lora_alpha: adapters are scaled by alpha / r, or alpha / sqrt(r) with `use_rslora`.
    lora_dropout: probability, in [0, 1), with which an adapter's inputs are dropped in training.
    target_modules: which modules get an adapter: a list of names (the whole dotted name, or its last parts), one regular expression for whole dotted
    names, or None for the usual projections of the model's `config.model_type`.
    bias: which biases train: "none", "all" of the model, or "lora_only", those of modules with an adapter.
    init_lora_weights: A is drawn with `kaiming_uniform_` ("default") or with `normal_` of deviation 1 / r ("gaussian"); B is zero. An embedding's A is
    zero and its B normal.
    modules_to_save: names of further modules that train as they are and are saved with the adapters.
    lora_verbose: log which modules got adapters.

    save_lora_base, merge_lora: what `state_dict()` and checkpoints hold. Neither: the adapters. save_lora_base: the base model too, separately. Both: the
    base model with the adapters merged into it, and no adapters.
    save_lora_config_adapter: the configuration goes into the checkpoint, under "lora_config"; else to `<lora_save_dir>/adapter_config.json`.
    merge_sharded_lora: a state dict of adapters alone holds full tensors rather than each tensor parallel rank's parts. (The other two kinds always hold
    parts: NxD drops `save_lora_base` and `merge_lora` here, against its documentation.)
    load_lora_from_ckpt, lora_save_dir, lora_load_tag: start with the adapters, and the fields above, of the checkpoint `<lora_save_dir>/<lora_load_tag>`.
    enable_lora: documented, though the original refuses it. False: `get_lora_model` leaves models as they are.

    Raises TypeError for a value of a wrong type or an unknown argument, ValueError for one that is not allowed; the message names the field.
    """

    lora_rank: int = 16
    target_modules: list[str] | str | None = None
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    bias: str = "none"
    use_rslora: bool = False
    init_lora_weights: str = "default"
    modules_to_save: list[str] | None = None
    lora_verbose: bool = False
    load_lora_from_ckpt: bool = False
    lora_load_tag: str | None = None
    lora_save_dir: str = "lora_adapter"
    merge_lora: bool = False
    save_lora_base: bool = False
    save_lora_config_adapter: bool = False
    merge_sharded_lora: bool = True
    enable_lora: bool = True

    def __new__(cls, *args: Any, **kwargs: Any) -> LoraConfig:
        _check_names(kwargs, TypeError)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self.target_modules = _names(self, "target_modules", text_too=True)
        self.modules_to_save = _names(self, "modules_to_save", text_too=False)  # type: ignore[assignment]
        for name, check in _CHECKS.items():
            check(name, getattr(self, name))
        for name in _FLAGS:
            setattr(self, name, flag(f"LoraConfig: {name}", getattr(self, name)))
        self.lora_save_dir = os.fspath(self.lora_save_dir)
        if self.merge_lora and not self.save_lora_base:
            raise ValueError(
                "LoraConfig: merge_lora=True with save_lora_base=False saves nothing: the adapter is merged into the base model, which is not saved. Set "
                "save_lora_base=True too, or merge_lora=False to save the adapter"
            )

    @property
    def scaling(self) -> float:
        """What an adapter's result is multiplied by."""
        return self.lora_alpha / (math.sqrt(self.lora_rank) if self.use_rslora else self.lora_rank)

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON, and `r`, which is `lora_rank` again."""
        return {**dataclasses.asdict(self), "r": self.lora_rank}

    @staticmethod
    def get_selected_fields() -> list[str]:
        """The names of the fields that NxD's checkpoints have; ours have all (`to_dict`)."""
        return list(SAVED_FIELDS)

    def selected_fields_to_save(self) -> dict[str, Any]:
        """The values of `get_selected_fields`, by name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name in SAVED_FIELDS}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LoraConfig:
        """The inverse of `to_dict`; `r` stands for a missing `lora_rank`. Raises ValueError for unknown keys, and as the class does."""
        known = dict(values)
        r = known.pop("r", None)
        if r is not None and known.setdefault("lora_rank", r) != r:
            raise ValueError(f"LoraConfig: r={r} and lora_rank={known['lora_rank']} disagree")
        _check_names(known, ValueError)
        return cls(**known)

    def of_checkpoint(self, saved: LoraConfig) -> LoraConfig:
        """The configuration of a checkpoint, with what this run decides (`RUN_FIELDS`) from this one."""
        return dataclasses.replace(saved, **{name: getattr(self, name) for name in RUN_FIELDS})


def as_config(config: object) -> LoraConfig:
    """A `LoraConfig` as it is, or made of a dict. Raises TypeError for anything else."""
    if isinstance(config, LoraConfig):
        return config
    if isinstance(config, Mapping):
        return LoraConfig.from_dict(config)
    raise TypeError(f"lora_config must be a LoraConfig or a dict of its fields, got {type(config).__name__}")


# -- checks ------------------------------------------------------------------------------------------


def _check_names(names: Iterable[str], error: type[Exception]) -> None:
    fields = [f.name for f in dataclasses.fields(LoraConfig)]
    unknown = [n for n in names if n not in fields]
    if unknown:
        raise error(f"LoraConfig has no {', '.join(map(repr, unknown))}: its fields are {', '.join(fields)}")


def _names(config: LoraConfig, field: str, text_too: bool) -> list[str] | str | None:
    """A field with names of modules, as a list. Raises TypeError or ValueError."""
    value = getattr(config, field)
    if value is None or (text_too and isinstance(value, str) and _compiles(field, value)):
        return value
    allowed = "a list of module names" + (", a regular expression" if text_too else "") + " or None"
    names = list(value) if isinstance(value, (list, tuple, set, frozenset)) else None
    if names is None or not all(isinstance(n, str) for n in names):
        raise TypeError(f"LoraConfig: {field} must be {allowed}, got {value!r}")
    if not names or "" in names:
        raise ValueError(f"LoraConfig: {field}={value!r} must name at least one module, by names that are not empty; allowed is {allowed}")
    return names


def _compiles(field: str, pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"LoraConfig: {field}={pattern!r} is no regular expression ({error}); for plain names pass a list") from None
    return True


def _rank(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"LoraConfig: {name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"LoraConfig: {name}={value} must be at least 1")


def _number(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"LoraConfig: {name} must be a number, got {value!r}")


def _alpha(name: str, value: Any) -> None:
    _number(name, value)
    if not 0 < value < math.inf:
        raise ValueError(f"LoraConfig: {name}={value} must be positive")


def _probability(name: str, value: Any) -> None:
    _number(name, value)
    if not 0 <= value < 1:
        raise ValueError(f"LoraConfig: {name}={value} must be a probability below 1")


def _one_of(allowed: tuple[str, ...]) -> Callable[[str, Any], None]:
    def check(name: str, value: object) -> None:
        if value not in allowed:
            raise ValueError(f"LoraConfig: {name} must be {', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}, got {value!r}")

    return check


def _tag(name: str, value: object) -> None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"LoraConfig: {name} must be a str or None, got {value!r}")


def _path(name: str, value: object) -> None:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise TypeError(f"LoraConfig: {name} must be the path of a directory, got {value!r}")


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "lora_rank": _rank,
    "lora_alpha": _alpha,
    "lora_dropout": _probability,
    "bias": _one_of(BIAS_MODES),
    "init_lora_weights": _one_of(INIT_MODES),
    "lora_load_tag": _tag,
    "lora_save_dir": _path,
}
_FLAGS = (
    "use_rslora",
    "lora_verbose",
    "load_lora_from_ckpt",
    "merge_lora",
    "save_lora_base",
    "save_lora_config_adapter",
    "merge_sharded_lora",
    "enable_lora",
)
