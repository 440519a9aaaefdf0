"""A step of a configuration on shapes alone: what it needs on every core of a machine that is not at hand."""

from __future__ import annotations

import math
from typing import Any

import torch
from omegaconf import DictConfig, open_dict

from nxd_jax.abstract import AbstractReport, abstract_run
from nxd_jax.training import environment, launching, registry
from nxd_jax.training.batch_sizes import parallel_sizes
from nxd_jax.training.lightning_modules.nlp_overrides import NLPTrainer
from torch_bridge.runtime import steps


def abstract_step(cfg: DictConfig) -> AbstractReport:
    """Run two optimizer steps without values and report programs, collectives and memory by core.

    Of all micro-batches of a step there are two, with a pipeline as many as it has stages: others are computed by the same programs. Data
    is not read. Arrays are as wide as they are here: with `precision.type: mixed_precision`, whose bfloat16 numbers this machine holds as
    float32 (and float32 ones as float64), twice as wide as on a NeuronCore; `--check` has its sizes.
    """
    cfg = cfg.copy()
    nodes = int(cfg.trainer.get("num_nodes") or 1)
    ranks = int(cfg.trainer.devices) * nodes
    instance, _ = launching.machine(int(cfg.trainer.devices), cfg.trainer.get("lnc"))
    sizes = parallel_sizes(cfg)
    pp = sizes["pp"]
    dp, size, count = ranks // math.prod(sizes.values()), int(cfg.data.micro_batch_size), max(2, pp)
    with open_dict(cfg):
        cfg.data.global_batch_size = size * dp * count
    environment.process_config(cfg)
    with abstract_run(ranks, instance=instance, nodes=nodes) as run:
        module = _module(cfg)
        ids = torch.zeros(size * count, int(cfg.model.encoder_seq_length), dtype=torch.int64, device="cpu" if pp > 1 else "xla")
        for _ in range(2):
            module._optimizer.zero_grad()
            with module._autocast():
                module.forward_backward_step({"input_ids": ids, "labels": ids}, is_training=True)
            module._optimizer.step()
            steps.mark()
        return run.report()


def _module(cfg: DictConfig) -> Any:
    """The module with its model and its optimizer, as a Trainer would have it."""
    trainer = NLPTrainer(devices=cfg.trainer.devices, num_nodes=cfg.trainer.get("num_nodes") or 1, max_steps=2, enable_progress_bar=False)
    trainer.gradient_clip_val = cfg.trainer.get("gradient_clip_val")
    module = registry.find(cfg).model(cfg, trainer)
    trainer.strategy.connect(module)
    module.setup()
    module.configure_optimizers()
    return module
