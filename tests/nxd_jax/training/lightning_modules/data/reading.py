"""A module that trains nothing and remembers what every rank was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import neuronx_distributed as nxd
import torch
from neuronx_distributed.lightning import NeuronLTModule, NeuronXLAStrategy
from omegaconf import OmegaConf
from pytorch_lightning import Trainer
from torch import nn

from nxd_jax.lightning import layout
from nxd_jax.tensor_parallel import parallel_groups
from nxd_jax.training.lightning_modules.data.hf_data_module import HFDataModule
from tests.nxd_jax.lightning import jobs
from torch_bridge.mesh import world
from torch_bridge.recorder import rank_tensor

WIDTH = 4


def config(train_dir: Any, *, tp: int = 1, gbs: int = 4, mbs: int = 1, seed: int = 5, model: Any = None, **data: Any) -> Any:
    """As a YAML file has it."""
    return OmegaConf.create(
        {
            "seed": seed,
            "data": {"train_dir": str(train_dir), "global_batch_size": gbs, "micro_batch_size": mbs, **data},
            "model": {"encoder_seq_length": WIDTH, **(model or {})},
            "distributed_strategy": {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": 1},
        }
    )


class Reader(NeuronLTModule):
    """`batches`: of each data-parallel rank, the first ids of its rows. init_global_step: as of BaseModelModule."""

    runs_backward = True

    def __init__(self, tp: int = 1):
        super().__init__(
            nxd_config=nxd.neuronx_distributed_config(tensor_parallel_size=tp),
            model_fn=nn.Linear,
            model_args=(1, 1),
            opt_cls=torch.optim.SGD,
            opt_kwargs={"lr": 0.1},
            manual_opt=True,
        )
        self.batches: list[list[list[int]]] = []
        self.columns: list[tuple[str, Any, Any]] = []
        self.checked: list[int] = []
        self.init_global_step = 0

    def on_train_start(self) -> None:
        self.init_global_step = self.trainer.global_step

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.batches.append(each_rank(batch["input_ids"]))
        self.columns = [(name, values.dtype, tuple(values.shape)) for name, values in batch.items()]
        assert batch["input_ids"].device.type == "cpu"
        self.optimizers().step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.checked.append(sum(map(len, each_rank(batch["input_ids"]))))

    def on_train_batch_end(self, *args: Any) -> None:
        """Nothing is logged."""

    def samples(self) -> list[list[int]]:
        """The first ids of each step's rows in the set's order."""
        return [[value for row in zip(*ranks, strict=True) for value in row] for ranks in self.batches]


def each_rank(ids: torch.Tensor) -> list[list[int]]:
    """Of each data-parallel rank, the first ids of its rows."""
    places = parallel_groups.places("dp")
    hosted = list(world.current().hosted)
    found = {places[rank]: rank_tensor.own(ids, hosted.index(rank))[:, 0].tolist() for rank in reversed(hosted)}
    return [found[k] for k in sorted(found)]


def trainer(folder: Path, tp: int = 1, devices: int = 1, **options: Any) -> Trainer:
    """A Trainer whose ranks are counted."""
    chosen = nxd.neuronx_distributed_config(tensor_parallel_size=tp)
    made = jobs.trainer(folder, strategy=NeuronXLAStrategy(nxd_config=chosen), devices=devices, **options)
    layout.set_world(devices, 1, chosen)
    return made


def read(
    folder: Path, cfg: Any, devices: int = 1, ckpt_path: Any = None, kind: Any = HFDataModule, **options: Any
) -> tuple[Reader, Any, Trainer]:
    """Train: (what was read, the data module, the Trainer)."""
    tp = cfg.distributed_strategy.tensor_model_parallel_size
    made = trainer(folder, tp, devices, **options)
    data, module = kind(cfg, made), Reader(tp)
    made.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module, data, made
