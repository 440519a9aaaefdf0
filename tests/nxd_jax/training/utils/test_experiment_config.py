"""The keys of `exp_manager`: all that the original knows, and what is said of others."""

from __future__ import annotations

import re
from typing import Any

import pytest
from omegaconf import OmegaConf

from nxd_jax.training.utils import experiment_config
from nxd_jax.training.utils.exp_manager import CallbackParams, ExpManagerConfig

CONFIG_FILE = """
explicit_log_dir: null
exp_dir: null
name: hf_llama
create_wandb_logger: False
wandb_logger_kwargs: {project: null, name: null}
resume_if_exists: True
resume_ignore_no_checkpoint: True
create_checkpoint_callback: True
checkpoint_callback_params: {monitor: step, save_top_k: 1, mode: max, save_last: False, filename: "x--{step}-{consumed_samples}", every_n_train_steps: 10,
  model_parallel_size: "${multiply:2, 4}", use_master_weights_in_ckpt: False}
log_parameter_norm: True
log_gradient_norm: True
enable_recovery_time_instrumentation: False
save_xser: True
load_xser: True
async_checkpointing: False
resume_from_checkpoint: null
log_local_rank_0_only: True
"""


def test_a_file_of_the_original() -> None:
    from nxd_jax.training.config.loading import register_resolvers

    register_resolvers()
    cfg = experiment_config.read(OmegaConf.create(CONFIG_FILE))
    params = cfg.checkpoint_callback_params
    assert (cfg.name, cfg.use_datetime_version, cfg.disable_validation_on_resume, params.model_parallel_size) == ("hf_llama", True, True, 8)
    assert (params.every_n_epochs, params.train_time_interval, params.save_on_train_epoch_end, params.dirpath) == (0, None, False, None)


def test_defaults_where_a_section_is_null() -> None:
    cfg = experiment_config.read({"checkpoint_callback_params": None, "ema": None, "files_to_copy": None})
    assert (
        cfg.checkpoint_callback_params.monitor == "val_loss" and cfg.checkpoint_callback_params.save_top_k == 3 and cfg.ema.decay == 0.999
    )
    assert cfg == OmegaConf.structured(ExpManagerConfig) and CallbackParams().save_last is True


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"resume_if_exist": True}, "exp_manager has no key 'resume_if_exist'; did you mean 'resume_if_exists'?"),
        (
            {"checkpoint_callback_params": {"save_topk": 1, "every_n_train_step": 2}},
            "exp_manager.checkpoint_callback_params has no key 'save_topk'; did you mean 'save_top_k'?; exp_manager.checkpoint_callback_params has no key "
            "'every_n_train_step'; did you mean 'every_n_train_steps'?",
        ),
        ({"ema": {"zzz": 1}}, "exp_manager.ema has no key 'zzz'; it takes enable, decay,"),
        (
            {"checkpoint_callback_params": {"save_top_k": "many"}},
            "exp_manager.checkpoint_callback_params.save_top_k: Value 'many' of type 'str'",
        ),
    ],
)
def test_keys_and_values_that_do_not_fit(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        experiment_config.read(given)


def test_what_is_no_mapping() -> None:
    with pytest.raises(TypeError, match="exp_manager must be a mapping of keys to values, got list"):
        experiment_config.read([1])
