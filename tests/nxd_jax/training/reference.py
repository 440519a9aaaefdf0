"""A run's training as a plain loop: transformers' own model, eager, on the CPU, from the same first weights."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import nn

from tests.nxd_jax.training import yaml_runs

Batch = Any
"""What `batch(step)` gives and `loss(model, batch)` takes."""


def losses(
    file: Path, *changes: str, batch: Callable[[int], Batch] | None = None, loss: Callable[[Any, Batch], torch.Tensor] | None = None
) -> list[float]:
    """The loss of every step of a run with fp32 precision, on one device, the whole batch in one piece.

    batch: of a step; by default the next rows of `yaml_runs.rows`, in order. loss: of a batch; by default that of next tokens.
    """
    from nxd_jax.training.config import loading
    from nxd_jax.training.optim.registry import get_optimizer, make_scheduler, optimizer_options
    from nxd_jax.training.utils.model_utils import get_param_groups_by_weight_decay

    cfg = loading.load(file, list(changes))
    model = _model(cfg)
    optim = cfg.model.optim
    options = optimizer_options(optim)
    groups = get_param_groups_by_weight_decay(model, ["bias", "norm"], options["weight_decay"])
    optimizer = get_optimizer(optim.name)(groups, **options)
    scheduler = make_scheduler(optimizer, {**loading.plain(optim.sched), "max_steps": cfg.trainer.max_steps})
    size, found = cfg.data.global_batch_size, []
    ids = yaml_runs.rows()
    for step in range(cfg.trainer.max_steps):
        rows = ids[(step * size) % len(ids) :][:size] if batch is None else batch(step)
        now = _loss(model, rows, cfg) if loss is None else loss(model, rows)
        optimizer.zero_grad()
        now.backward()
        nn.utils.clip_grad_norm_(model.parameters(), cfg.trainer.gradient_clip_val)
        optimizer.step()
        scheduler.step()
        found.append(float(now.detach()))
    return found


def _loss(model: Any, batch: torch.Tensor, cfg: Any) -> torch.Tensor:
    """The mean over micro-batches: the auxiliary loss of experts is not linear in the tokens."""
    found = []
    for rows in batch.split(cfg.data.micro_batch_size):
        out = model(input_ids=rows, labels=rows)
        experts = getattr(model.config, "num_local_experts", 0)
        if not experts:
            found.append(out.loss)
            continue
        k = model.config.num_experts_per_tok
        coefficient = cfg.model.moe.router_aux_loss_coef
        logits = nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
        found.append(logits + coefficient * out.aux_loss / k)
    return torch.stack(found).mean()


@contextlib.contextmanager
def _module(cfg: Any) -> Iterator[Any]:
    """The module of a run with the weights that it begins with, on one rank."""
    from nxd_jax.parallel_layers import parallel_state
    from nxd_jax.training import registry
    from nxd_jax.training.lightning_modules.nlp_overrides import NLPTrainer
    from torch_bridge.mesh import world

    cfg = cfg.copy()
    OmegaConf.set_struct(cfg, False)
    cfg.trainer.devices = 1
    for name in ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model"):
        cfg.distributed_strategy[f"{name}_parallel_size"] = 1
    cfg.distributed_strategy.sequence_parallel = False
    cfg.distributed_strategy.kv_replicator = 1
    variables = {name: os.environ.pop(name, None) for name in ("XLA_DOWNCAST_BF16", "XLA_USE_BF16")}
    trainer = NLPTrainer(devices=1, max_steps=1, logger=False)
    module = registry.find(cfg).model(cfg, trainer)
    trainer.strategy.connect(module)
    module.setup()
    yield module
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    world.configure(None)
    os.environ.update({name: value for name, value in variables.items() if value is not None})


def _model(cfg: Any) -> Any:
    """transformers' model with the weights that the run begins with, in PEFT's if it has adapters."""
    plain = cfg.copy()
    OmegaConf.set_struct(plain, False)
    peft = (plain.get("model_alignment_strategy") or {}).pop("peft", None)
    model = _base_model(plain)
    return model if peft is None else _with_adapters(model, peft, cfg)


def _base_model(cfg: Any) -> Any:
    import transformers

    from nxd_jax.training.models.hf_models import hf_weights

    with _module(cfg) as module:
        kind = transformers.MixtralForCausalLM if "mixtral" in cfg.name else transformers.LlamaForCausalLM
        config = module.model_config
        config.output_router_logits = True
        config._attn_implementation = "eager"
        model = kind(config).float()
        missing = model.load_state_dict({k: v.float() for k, v in hf_weights.to_hf_weights(module.model).items()}, strict=False)
    assert not missing.unexpected_keys and all("rotary" in name or "lm_head" in name for name in missing.missing_keys), missing
    model.train()
    return model


def _with_adapters(model: Any, peft: Any, cfg: Any) -> Any:
    """With the run's own A of each adapter; B is zero."""
    from peft import LoraConfig, get_peft_model

    with _module(cfg) as module:
        drawn = {name: p.detach().cpu() for name, p in module.model.named_parameters() if ".lora_A." in name}
    made = get_peft_model(
        model, LoraConfig(r=peft.lora_rank, lora_alpha=peft.lora_alpha, lora_dropout=0.0, target_modules=list(peft.target_modules))
    )
    own = {name: p for name, p in made.named_parameters() if ".lora_A." in name}
    assert len(own) == len(drawn) > 0
    for name, value in drawn.items():
        (found,) = (p for other, p in own.items() if name.partition("layers.")[2].partition(".lora_A")[0] in other)
        found.data.copy_(value)
    return made
