"""Keys of `exp_manager`, from its schema."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from nxd_jax.training.config.keys.kinds import Key, anything, options_of, section
from nxd_jax.training.utils import experiment_config

_UNREAD = {
    "resume_past_end": "resuming a training that is complete",
    "save_bf16": "weights in bfloat16 in checkpoints",
    "enable_recovery_time_instrumentation": "printing how long recovery takes",
    "load_xser": "how checkpoints were written; loading finds that out",
    "log_tflops_per_sec_per_gpu": "NeMo's own estimate of operations per second",
    "seconds_to_sleep": "waiting before files are touched",
    "create_straggler_detection_callback": "NeMo's search for slow GPUs",
    "straggler_detection_params": "NeMo's search for slow GPUs",
    "create_fault_tolerance_callback": "NeMo's fault tolerance",
    "fault_tolerance": "NeMo's fault tolerance",
    "create_dllogger_logger": "another logger",
    "dllogger_logger_kwargs": "another logger",
    "create_clearml_logger": "another logger",
    "clearml_logger_kwargs": "another logger",
    "create_neptune_logger": "another logger",
    "neptune_logger_kwargs": "another logger",
    "checkpoint_callback_params.model_parallel_size": "tp times pp, which follows from distributed_strategy",
    "checkpoint_callback_params.async_save": "exp_manager.async_checkpointing is what saves in the background",
    "checkpoint_callback_params.save_last_n_optim_states": "NeMo's checkpoints without optimizer states",
    "checkpoint_callback_params.always_save_nemo": "NeMo's .nemo files",
    "checkpoint_callback_params.save_nemo_on_train_end": "NeMo's .nemo files",
    "checkpoint_callback_params.save_best_model": "NeMo's .nemo files",
    "checkpoint_callback_params.postfix": "NeMo's .nemo files",
    "checkpoint_callback_params.prefix": "NeMo's .nemo files",
}

_TYPES = {bool: "bool", int: "int", float: "float", str: "str", list: "list", dict: "dict"}
_VALUES = {"mode": ("min", "max")}


def _keys(schema: type, prefix: str = "") -> dict[str, Key]:
    """A schema's fields."""
    hints = typing.get_type_hints(schema)
    return {f.name: _key(f, hints[f.name], f"{prefix}{f.name}") for f in dataclasses.fields(schema)}


def _key(f: dataclasses.Field[Any], hint: Any, path: str) -> Key:
    several = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = [t for t in (typing.get_args(hint) if several else (hint,)) if t is not type(None)]
    unread = _UNREAD.get(path, "")
    null = hint is Any or (several and type(None) in typing.get_args(hint))
    if dataclasses.is_dataclass(parts[0]):
        return section(_keys(typing.cast(type, parts[0]), f"{path}."), unread=unread)
    kind = _TYPES.get(typing.get_origin(parts[0]) or parts[0])
    if kind == "dict":
        return options_of(unread)
    if kind is None:
        return anything(unread=unread)
    if f.name == "version":
        return Key(("str", "int", "float"), unread=unread)
    return Key((kind,), null=null, values=_VALUES.get(f.name, ()), unread=unread)


EXP_MANAGER: dict[str, Key] = _keys(experiment_config.ExpManagerConfig)
