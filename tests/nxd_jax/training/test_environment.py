"""From a configuration to environment variables."""

from __future__ import annotations

import os
from typing import Any

import pytest
from omegaconf import OmegaConf

from nxd_jax.training import environment

pytestmark = pytest.mark.usefixtures("variables")

NAMES = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "NEURON_RT_STOCHASTIC_ROUNDING_EN")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "NEURON_CC_FLAGS", "COMPILE", "TRAIN_ITERS", "NEURON_COMPILE_CACHE_URL", "BUCKET_CAP_MB"):
        monkeypatch.delenv(name, raising=False)


def config(**changes: Any) -> Any:
    base = {
        "trainer": {"max_steps": 100},
        "exp_manager": {"create_tensorboard_logger": True, "create_checkpoint_callback": True},
        "distributed_strategy": {"virtual_pipeline_model_parallel_size": None},
        "model": {"fusions": {"softmax": True}},
        "precision": {"type": "mixed_precision"},
        "compiler_flags": "--model-type transformer",
        "compiler_cache_url": "~/neuron_cache",
        "aync_exec_max_inflight_requests": 5,
        "bucket_size_collectives": 1024,
        "neuron_rt_exec_timeout": 100,
        "neuron_experimental_compress_rg": False,
    }
    return OmegaConf.merge(OmegaConf.create(base), changes)


ACCUMULATE = "--enable-mixed-precision-accumulation"
TABLE = {
    "mixed_precision": ("0", "1", "0", ACCUMULATE),
    "mixed_precisionSR": ("0", "1", "1", ACCUMULATE),
    "mixed_precision_SR": ("0", "1", "1", ACCUMULATE),
    "bf16SR": ("1", "0", "1", ACCUMULATE),
    "fp32": ("0", "0", None, "--auto-cast none"),
    "autocast": ("0", "0", "0", f"{ACCUMULATE} --auto-cast none"),
}


@pytest.mark.parametrize("kind", TABLE)
def test_each_precision_sets_its_variables(kind: str) -> None:
    environment.process_config(config(precision={"type": kind}))
    *values, flags = TABLE[kind]
    assert [os.environ.get(name) for name in NAMES] == values
    assert os.environ["NEURON_CC_FLAGS"] == f"--model-type transformer {flags}"


@pytest.mark.parametrize("kind", ["mixed_precision", "mixed_precisionSR", "mixed_precision_SR", "bf16SR"])
def test_mixed_precision_keeps_master_weights(kind: str) -> None:
    """(q) In the original the spelling that its code takes, mixed_precision_SR, has none."""
    assert environment.precision_of(config(precision={"type": kind})).masters == (kind != "bf16SR")


def test_manual_precision_says_everything_itself() -> None:
    said = {
        "type": "manual",
        "xla_use_bf16": "0",
        "xla_downcast_bf16": 1,
        "neuron_rt_stochastic_rounding_en": False,
        "master_weights": True,
    }
    cfg = config(precision=said)
    environment.process_config(cfg)
    assert [os.environ.get(name) for name in NAMES] == ["0", "1", "0"]
    assert environment.precision_of(cfg).masters
    environment.process_config(config(precision={"type": "manual"}))
    assert [os.environ.get(name) for name in NAMES] == [None, None, None]
    with pytest.raises(ValueError, match=r"precision.xla_use_bf16: 'yes' must be '0' or '1'"):
        environment.process_config(config(precision={"type": "manual", "xla_use_bf16": "yes"}))


def test_an_unknown_precision() -> None:
    with pytest.raises(
        ValueError, match=r"precision.type: 'bf16' must be one of mixed_precision, mixed_precisionSR, bf16SR, fp32, autocast, manual"
    ):
        environment.process_config(config(precision={"type": "bf16"}))


def test_other_variables() -> None:
    cfg = environment.process_config(config())
    assert os.environ["NEURON_FUSE_SOFTMAX"] == "1"
    assert os.environ["NEURON_EXPERIMENTAL_COMPRESS_RG"] == "0"
    assert os.environ["NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"] == "5"
    assert os.environ["BUCKET_CAP_MB"] == "1024"
    assert os.environ["NEURON_RT_EXEC_TIMEOUT"] == "100"
    assert os.environ["NEURON_COMPILE_CACHE_URL"] == os.path.expanduser("~/neuron_cache")
    assert cfg.distributed_strategy.virtual_pipeline_model_parallel_size == 1


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_DOWNCAST_BF16", "0")
    monkeypatch.setenv("NEURON_CC_FLAGS", "--mine")
    environment.process_config(config())
    environment.process_config(config())  # flags are not added twice
    assert os.environ["XLA_DOWNCAST_BF16"] == "0"
    assert os.environ["NEURON_CC_FLAGS"] == f"--mine --model-type transformer {ACCUMULATE}"


def test_a_second_configuration_replaces_the_first_ones_values() -> None:
    environment.process_config(config())
    environment.process_config(config(precision={"type": "fp32"}, compiler_flags="--other"))
    assert [os.environ.get(name) for name in NAMES] == ["0", "0", None]
    assert os.environ["NEURON_CC_FLAGS"] == "--other --auto-cast none"


def test_compile_and_train_iters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILE", "1")
    cfg = environment.process_config(config())
    assert (cfg.trainer.max_steps, cfg.exp_manager.create_tensorboard_logger, cfg.exp_manager.create_checkpoint_callback) == (
        10,
        False,
        False,
    )
    monkeypatch.setenv("COMPILE", "0")
    monkeypatch.setenv("TRAIN_ITERS", "7")
    assert environment.process_config(config()).trainer.max_steps == 7
    monkeypatch.setenv("TRAIN_ITERS", "many")
    with pytest.raises(ValueError, match="TRAIN_ITERS='many' must be a number of steps"):
        environment.process_config(config())
    monkeypatch.delenv("COMPILE")
    assert environment.process_config(config()).trainer.max_steps == 100
