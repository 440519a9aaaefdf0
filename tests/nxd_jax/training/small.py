"""A small model of a user's, its data and its configuration, as subclasses of the package's classes."""

from __future__ import annotations

import os
from typing import Any

import neuronx_distributed as nxd
import torch
from neuronx_distributed.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, parallel_state
from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from nxd_jax.training import environment
from nxd_jax.training.lightning_modules.data.base import BaseDataModule
from nxd_jax.training.lightning_modules.model.base import BaseModelModule
from nxd_jax.training.lightning_modules.nlp_overrides import NLPDDPStrategy, NLPTrainer

WORDS, WIDTH, LENGTH, ROWS, LAYERS = 64, 16, 8, 64, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, 2 * WIDTH, bias=False, gather_output=False)
        self.down = RowParallelLinear(2 * WIDTH, WIDTH, bias=False, input_is_parallel=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Predicts the word before from each word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = ParallelEmbedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = ColumnParallelLinear(WIDTH, WORDS, bias=False, gather_output=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.words(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        wide = torch.float64 if os.environ.get("XLA_DOWNCAST_BF16") == "1" else torch.float32
        return parallel_cross_entropy(logits.to(wide), labels).mean(), hidden


class Module(BaseModelModule):
    """Keeps what was logged in `seen`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[dict[str, Any]] = []

    def build_model(self) -> Any:
        assert self.nxd_config is not None
        self.nxd_config["pipeline_config"].update(
            transformer_layer_cls=Layer, output_loss_value_spec=(True, False), input_names=["input_ids", "labels"]
        )
        return nxd.initialize_parallel_model(self.nxd_config, Net)

    def setup_optimizer_param_groups(self) -> None:
        self._optimizer_param_groups = [{"params": list(self.model.parameters())}]

    def log_metrics(
        self,
        log_fn: Any,
        loss_mean: Any,
        misc_metrics: Any,
        lr: Any,
        global_step: Any,
        consumed_samples: Any,
        grad_norm: Any,
        param_norm: Any,
        throughput: Any,
        throughput_peak: Any,
        trainer: Any,
    ) -> None:
        super().log_metrics(
            log_fn,
            loss_mean,
            misc_metrics,
            lr,
            global_step,
            consumed_samples,
            grad_norm,
            param_norm,
            throughput,
            throughput_peak,
            trainer,
        )
        numbers = {"loss": loss_mean, "grad": grad_norm, "param": param_norm}
        self.seen.append(
            {
                "step": global_step,
                "lr": lr,
                "samples": consumed_samples,
                **{k: None if v is None else float(v) for k, v in numbers.items()},
            }
        )


def rows() -> torch.Tensor:
    return torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


class Data(BaseDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        ids = rows()
        data = TensorDataset(ids, ids.roll(1, 1))
        size = parallel_state.get_data_parallel_size()
        sampler = DistributedSampler(data, size, parallel_state.get_data_parallel_rank(), shuffle=False, drop_last=True)
        return DataLoader(data, self.config.data.global_batch_size // size, sampler=sampler, collate_fn=_collate)

    val_dataloader = test_dataloader = train_dataloader

    def get_batch_length(self, batch: Any) -> int:
        return len(batch["input_ids"])

    def process_global_batch(self, global_batch: Any, global_batch_size: int | None = None) -> Any:
        return global_batch


def _collate(found: list[tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[k] for row in found]) for k, name in enumerate(("input_ids", "labels"))}


def config(*changes: str) -> Any:
    """The configuration, with `key=value` words."""
    base = {
        "name": "small",
        "model_source": "hf",
        "seed": 1,
        "trainer": {
            "devices": 1,
            "num_nodes": 1,
            "max_epochs": -1,
            "max_steps": 4,
            "log_every_n_steps": 1,
            "val_check_interval": 100,
            "check_val_every_n_epoch": None,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 2,
            "gradient_clip_val": 1.0,
        },
        "exp_manager": {"log_parameter_norm": True, "log_gradient_norm": True},
        "distributed_strategy": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "zero1": True},
        "data": {"global_batch_size": 8, "micro_batch_size": 1},
        "model": {
            "encoder_seq_length": LENGTH,
            "fusions": {},
            "optim": {
                "name": "adamw_fp32OptState",
                "lr": 1e-2,
                "weight_decay": 0.01,
                "betas": [0.9, 0.99],
                "sched": {"name": "LinearAnnealingWithWarmUp", "warmup_steps": 1},
            },
        },
        "precision": {"type": "fp32"},
    }
    return OmegaConf.merge(OmegaConf.create(base), OmegaConf.from_dotlist(list(changes)))


LAYOUTS = {
    "one rank": (),
    "tp 2, dp 2": ("trainer.devices=4", "distributed_strategy.tensor_model_parallel_size=2"),
    "pp 2, dp 2": ("trainer.devices=4", "distributed_strategy.pipeline_model_parallel_size=2"),
}


def train(*changes: str, module: Any = Module, ckpt_path: Any = None) -> tuple[Any, Any]:
    """The Trainer and the module after training."""
    cfg = config(*changes)
    environment.process_config(cfg)
    trainer = NLPTrainer(strategy=NLPDDPStrategy(), enable_progress_bar=False, **OmegaConf.to_container(cfg.trainer))
    data, model = Data(cfg, trainer), module(cfg, trainer)
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    return trainer, model
