"""What of a configuration goes to environment variables: `process_config` of the original's training_orchestrator.py.

A variable that the user has set keeps its value; NEURON_CC_FLAGS gets more words. What an earlier configuration of this process has set, a later one
replaces.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from torch_bridge.precision import device_formats

_ACCUMULATE = "--enable-mixed-precision-accumulation"
_NO_CAST = "--auto-cast none"


@dataclass(frozen=True)
class Precision:
    """use_bf16, downcast, stochastic: XLA_USE_BF16, XLA_DOWNCAST_BF16 and NEURON_RT_STOCHASTIC_ROUNDING_EN, None: not touched. flags: for NEURON_CC_FLAGS.
    masters: the optimizer keeps float32 weights and adds gradients up in float32, if there is ZeRO-1."""

    use_bf16: str | None
    downcast: str | None
    stochastic: str | None
    flags: str = ""
    masters: bool = False


PRECISIONS = {
    "mixed_precision": Precision("0", "1", "0", _ACCUMULATE, masters=True),
    "mixed_precisionSR": Precision("0", "1", "1", _ACCUMULATE, masters=True),
    "bf16SR": Precision("1", "0", "1", _ACCUMULATE),
    "fp32": Precision("0", "0", None, _NO_CAST),
    "autocast": Precision("0", "0", "0", f"{_ACCUMULATE} {_NO_CAST}", masters=True),
}
"""By `precision.type`."""

SPELLINGS = {"mixed_precision_SR": "mixed_precisionSR"}
"""What the original's code accepts where its documentation says something else."""

PRECISION_TYPES = (*PRECISIONS, "manual")


def precision_type(cfg: DictConfig) -> str:
    """`precision.type`, in the documented spelling. Raises ValueError for others."""
    said = cfg.precision.get("type")
    found = SPELLINGS.get(said, said)
    if found not in PRECISION_TYPES:
        raise ValueError(f"precision.type: {said!r} must be one of {', '.join(PRECISION_TYPES)}")
    return str(found)


def precision_of(cfg: DictConfig) -> Precision:
    """What `precision` asks for; `manual`: its own keys."""
    kind = precision_type(cfg)
    if kind != "manual":
        return PRECISIONS[kind]
    keys = ("xla_use_bf16", "xla_downcast_bf16", "neuron_rt_stochastic_rounding_en")
    use_bf16, downcast, stochastic = (_switch(f"precision.{key}", cfg.precision.get(key)) for key in keys)
    return Precision(use_bf16, downcast, stochastic, masters=bool(cfg.precision.get("master_weights", False)))


def _switch(name: str, value: Any) -> str | None:
    if value is None:
        return None
    text = str(int(value)) if isinstance(value, bool) else str(value)
    if text not in ("0", "1"):
        raise ValueError(f"{name}: {value!r} must be '0' or '1'")
    return text


_set_here: dict[str, str] = {}
"""What `process_config` has set in this process."""


def process_config(cfg: DictConfig) -> DictConfig:
    """Set environment variables from a configuration and fill in what follows from them; returns it, changed.

    COMPILE=1: ten steps without TensorBoard and checkpoints, as `neuron_parallel_compile` wants. COMPILE=0 with TRAIN_ITERS=n: n steps.
    """
    _set_precision(precision_of(cfg), str(cfg.get("compiler_flags") or ""))
    if OmegaConf.select(cfg, "model.fusions.softmax"):
        _put("NEURON_FUSE_SOFTMAX", "1")
    if "neuron_experimental_compress_rg" in cfg:
        _put("NEURON_EXPERIMENTAL_COMPRESS_RG", "1" if cfg.neuron_experimental_compress_rg else "0")
    for key, name in _COPIED.items():
        if cfg.get(key) is not None:
            _put(name, os.path.expandvars(os.path.expanduser(str(cfg[key]))))
    with open_dict(cfg):
        if cfg.distributed_strategy.get("virtual_pipeline_model_parallel_size") is None:
            cfg.distributed_strategy.virtual_pipeline_model_parallel_size = 1
        _shorten(cfg)
    return cfg


_COPIED = {
    "aync_exec_max_inflight_requests": "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS",
    "bucket_size_collectives": "BUCKET_CAP_MB",
    "compiler_cache_url": "NEURON_COMPILE_CACHE_URL",
    "neuron_rt_exec_timeout": "NEURON_RT_EXEC_TIMEOUT",
}


def _shorten(cfg: DictConfig) -> None:
    if os.environ.get("COMPILE") == "1":
        cfg.trainer.max_steps = 10
        cfg.exp_manager.create_tensorboard_logger = False
        cfg.exp_manager.create_checkpoint_callback = False
    elif os.environ.get("COMPILE") == "0" and os.environ.get("TRAIN_ITERS"):
        text = os.environ["TRAIN_ITERS"]
        if not text.isdigit() or int(text) < 1:
            raise ValueError(f"TRAIN_ITERS={text!r} must be a number of steps")
        cfg.trainer.max_steps = int(text)


def _set_precision(precision: Precision, flags: str) -> None:
    device_formats.without_warnings()
    for name, value in (
        ("XLA_USE_BF16", precision.use_bf16),
        ("XLA_DOWNCAST_BF16", precision.downcast),
        ("NEURON_RT_STOCHASTIC_ROUNDING_EN", precision.stochastic),
    ):
        if value is None:
            _forget(name)
        else:
            _put(name, value)
    _append("NEURON_CC_FLAGS", f"{flags} {precision.flags}".strip())


def _put(name: str, value: str) -> None:
    if name in os.environ and os.environ[name] != _set_here.get(name):
        return
    os.environ[name] = _set_here[name] = value


def _forget(name: str) -> None:
    """Take back what an earlier configuration set."""
    if name in _set_here and os.environ.get(name) == _set_here.pop(name):
        del os.environ[name]


def _append(name: str, words: str) -> None:
    """Add words behind what the user set, in place of those that an earlier configuration added."""
    now = os.environ.get(name, "")
    earlier = _set_here.get(name, "")
    if earlier and now.endswith(earlier):
        now = now[: -len(earlier)]
    now = now.strip()
    missing = words if words not in now else ""
    _set_here[name] = missing
    os.environ[name] = f"{now} {missing}".strip()
