"""The keys of `exp_manager` in a YAML file, as OmegaConf's structured schemas: all that the original accepts."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

# OmegaConf reads annotations as they are written: Optional[...], and dict and list with their types.
Options = dict[str, Any]


@dataclasses.dataclass
class EarlyStoppingParams:
    """`exp_manager.early_stopping_callback_params`: Lightning's EarlyStopping."""

    monitor: str = "val_loss"
    mode: str = "min"
    min_delta: float = 0.001
    patience: int = 10
    verbose: bool = True
    strict: bool = True
    check_finite: bool = True
    stopping_threshold: float | None = None
    divergence_threshold: float | None = None
    check_on_train_epoch_end: bool | None = None
    log_rank_zero_only: bool = False


@dataclasses.dataclass
class CallbackParams:
    """`exp_manager.checkpoint_callback_params`. Without a reader, as in the original: model_parallel_size, async_save, save_last_n_optim_states,
    always_save_nemo, postfix, prefix. train_time_interval: in seconds."""

    filepath: str | None = None
    dirpath: str | None = None
    filename: str | None = None
    monitor: str | None = "val_loss"
    verbose: bool | None = True
    save_last: bool | None = True
    save_top_k: int | None = 3
    save_weights_only: bool | None = False
    mode: str | None = "min"
    auto_insert_metric_name: bool = True
    every_n_epochs: int | None = 0
    every_n_train_steps: int | None = None
    train_time_interval: float | None = None
    save_on_train_epoch_end: bool | None = False
    prefix: str | None = None
    postfix: str = ".nemo"
    save_best_model: bool = False
    always_save_nemo: bool = False
    save_nemo_on_train_end: bool | None = False
    model_parallel_size: int | None = None
    use_master_weights_in_ckpt: bool | None = False
    async_save: bool | None = False
    save_last_n_optim_states: int | None = -1
    enable_version_counter: bool | None = False


@dataclasses.dataclass
class StepTimingParams:
    """`exp_manager.step_timing_kwargs`. sync_cuda: wait for the device at both ends of what is timed."""

    reduction: str | None = "mean"
    sync_cuda: bool | None = False
    buffer_size: int | None = 1


@dataclasses.dataclass
class EMAParams:
    """`exp_manager.ema`: see `utils.ema.EMA`."""

    enable: bool | None = False
    decay: float | None = 0.999
    cpu_offload: bool | None = False
    validate_original_weights: bool | None = False
    every_n_steps: int = 1


@dataclasses.dataclass
class StragglerDetectionParams:
    """`exp_manager.straggler_detection_params`. Without a reader, as in the original."""

    report_time_interval: float = 300
    calc_relative_gpu_perf: bool = True
    calc_individual_gpu_perf: bool = True
    num_gpu_perf_scores_to_log: int = 5
    gpu_relative_perf_threshold: float = 0.7
    gpu_individual_perf_threshold: float = 0.7
    stop_if_detected: bool = False


@dataclasses.dataclass
class ExpManagerConfig:
    """`exp_manager`. log_tflops_per_sec_per_gpu, seconds_to_sleep, resume_past_end and the straggler and fault tolerance keys are without a reader."""

    explicit_log_dir: str | None = None
    exp_dir: str | None = None
    name: str | None = None
    version: str | None = None
    use_datetime_version: bool | None = True
    resume_if_exists: bool | None = False
    resume_past_end: bool | None = False
    resume_ignore_no_checkpoint: bool | None = False
    resume_from_checkpoint: str | None = None
    ckpt_ptl_version: str | None = None
    create_tensorboard_logger: bool | None = True
    summary_writer_kwargs: Options | None = None
    create_wandb_logger: bool | None = False
    wandb_logger_kwargs: Options | None = None
    create_mlflow_logger: bool | None = False
    mlflow_logger_kwargs: Options | None = None
    create_dllogger_logger: bool | None = False
    dllogger_logger_kwargs: Options | None = None
    create_clearml_logger: bool | None = False
    clearml_logger_kwargs: Options | None = None
    create_neptune_logger: bool | None = False
    neptune_logger_kwargs: Options | None = None
    create_checkpoint_callback: bool | None = True
    checkpoint_callback_params: CallbackParams | None = field(default_factory=CallbackParams)
    create_early_stopping_callback: bool | None = False
    early_stopping_callback_params: EarlyStoppingParams | None = field(default_factory=EarlyStoppingParams)
    create_preemption_callback: bool | None = True
    files_to_copy: list[str] | None = None
    log_step_timing: bool | None = True
    log_delta_step_timing: bool | None = False
    step_timing_kwargs: StepTimingParams | None = field(default_factory=StepTimingParams)
    log_local_rank_0_only: bool | None = False
    log_global_rank_0_only: bool | None = False
    disable_validation_on_resume: bool | None = True
    ema: EMAParams | None = field(default_factory=EMAParams)
    max_time_per_run: Any | None = None
    seconds_to_sleep: float = 5
    create_straggler_detection_callback: bool | None = False
    straggler_detection_params: StragglerDetectionParams | None = field(default_factory=StragglerDetectionParams)
    create_fault_tolerance_callback: bool | None = False
    fault_tolerance: Options | None = None
    log_tflops_per_sec_per_gpu: bool | None = True
    log_parameter_norm: bool | None = True
    log_gradient_norm: bool | None = True
    save_xser: bool | None = True
    load_xser: bool | None = True
    save_bf16: bool | None = False
    async_checkpointing: bool | None = False
    enable_recovery_time_instrumentation: bool | None = False


def read(cfg: DictConfig) -> Any:
    """`exp_manager` with all keys, defaults where it says nothing, interpolations resolved. A section that is null has its defaults.

    Raises TypeError for what is no mapping; ValueError for keys that do not exist, each with the nearest one, and for values of another type.
    """
    if not isinstance(cfg, (Mapping, DictConfig)):
        raise TypeError(f"exp_manager must be a mapping of keys to values, got {type(cfg).__name__}")
    plain: Any = OmegaConf.to_container(cfg, resolve=True) if isinstance(cfg, DictConfig) else dict(cfg)
    schema = OmegaConf.structured(ExpManagerConfig)
    problems = list(_unknown(plain, ExpManagerConfig, "exp_manager"))
    if problems:
        raise ValueError("; ".join(problems))
    given = {k: v for k, v in plain.items() if v is not None or not dataclasses.is_dataclass(_section(ExpManagerConfig, k))}
    try:
        return OmegaConf.merge(schema, given)
    except OmegaConfBaseException as error:
        where = ".".join(["exp_manager", *([str(error.full_key)] if getattr(error, "full_key", None) else [])])
        raise ValueError(f"{where}: {str(error).splitlines()[0]}") from error


def _section(schema: type, key: str) -> Any:
    """The schema of a key that is a section; None for others."""
    for f in dataclasses.fields(schema):
        if f.name == key and f.default_factory is not dataclasses.MISSING:
            return f.default_factory
    return None


def _unknown(given: Mapping[str, Any], schema: type, where: str) -> Iterator[str]:
    known = [f.name for f in dataclasses.fields(schema)]
    for key, value in given.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            yield f"{where} has no key {key!r}" + (f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(known)}")
        elif (section := _section(schema, key)) is not None and isinstance(value, Mapping):
            yield from _unknown(value, section, f"{where}.{key}")
