"""From a configuration to a trained model: `train(cfg)` of the original's training.py."""

from __future__ import annotations

import logging
import os
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nxd_jax import lightning  # noqa: F401  (one Lightning under both names, before anything imports it)
from nxd_jax.training import registry
from nxd_jax.training.config.loading import plain
from nxd_jax.training.lightning_modules.nlp_overrides import NLPCheckpointIO, NLPDDPStrategy, NLPTrainer
from nxd_jax.training.utils.exp_manager import exp_manager

logger = logging.getLogger("nxd_jax")


def train(cfg: DictConfig) -> Any:
    """Train what a configuration describes, after `environment.process_config(cfg)`; returns the Trainer.

    Raises what the parts raise for a configuration that does not fit: `nxdt-train --check` says all of it before.
    """
    entry = registry.find(cfg)
    logger.debug("configuration:\n%s", OmegaConf.to_yaml(cfg))
    trainer = make_trainer(cfg)
    exp_manager(trainer, cfg.exp_manager)
    data = entry.data(cfg, trainer)
    model = entry.model(cfg, trainer)
    trainer.fit(model, datamodule=data, ckpt_path=trainer.ckpt_path)
    return trainer


def make_trainer(cfg: DictConfig) -> NLPTrainer:
    """The Trainer of `trainer`, with the strategy and checkpoint files of `exp_manager`."""
    manager = cfg.exp_manager
    io = NLPCheckpointIO(
        manager.get("async_checkpointing", False),
        cfg.model.get("weight_init_only", False),
        manager.get("ckpt_ptl_version") or "2.5.0",
    )
    strategy = NLPDDPStrategy(checkpoint_io=io, restore_path=manager.get("resume_from_checkpoint"))
    options = plain(cfg.trainer)
    if os.environ.get("WORLD_SIZE") and options.get("devices") is None:
        options.pop("devices")
    return NLPTrainer(strategy=strategy, **options)
