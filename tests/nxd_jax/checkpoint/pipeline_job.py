"""A small job in a pipeline: layers, what comes before and after them (defined in another order than it runs), a buffer in each layer, ties if asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

import neuronx_distributed as nxd
import torch
import torch_xla
from neuronx_distributed.parallel_layers import ColumnParallelLinear, RowParallelLinear, parallel_state
from torch import nn

from tests.nxd_jax.checkpoint import job
from torch_bridge.mesh import rank_numbers, world
from torch_bridge.recorder import sharded

HIDDEN, WORDS, ROWS, LAYERS = 8, 16, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = ColumnParallelLinear(HIDDEN, 2 * HIDDEN, gather_output=False)
        self.down = RowParallelLinear(2 * HIDDEN, HIDDEN, input_is_parallel=True, bias=False)
        self.register_buffer("scale", torch.tensor([1.0, 0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale[1] * self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """The head and the last norm are defined before the layers."""

    def __init__(self, tied: bool = False, dropout: float = 0.0, layers: int = LAYERS, more: bool = False):
        super().__init__()
        self.dropout = dropout
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)
        self.norm = nn.LayerNorm(HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        if more:
            self.layers[-1].gate = nn.Linear(HIDDEN, HIDDEN)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.embedding(ids), self.dropout, self.training)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of a world. stages: virtual_pipeline_size."""

    ranks: int
    pp: int = 1
    tp: int = 1
    stages: int = 1
    zero1: bool = False
    schedule: str | None = None

    @property
    def dp(self) -> int:
        return self.ranks // (self.pp * self.tp)

    def start(self, nxd_world: Any) -> None:
        nxd_world(self.ranks, tp=self.tp, pp=self.pp)

    def config(self) -> Any:
        pipeline = {
            "transformer_layer_cls": Block,
            "num_microbatches": 2,
            "virtual_pipeline_size": self.stages,
            "output_loss_value_spec": True,
            "input_names": ["ids", "labels"],
            "auto_partition": True,
            "use_zero1_optimizer": self.zero1,
            "use_optimizer_wrapper": True,
            "broadcast_and_average_loss": True,
            "schedule": self.schedule,
        }
        return nxd.neuronx_distributed_config(
            tensor_parallel_size=self.tp,
            pipeline_parallel_size=self.pp,
            pipeline_config=pipeline if self.pp > 1 else None,
            optimizer_config={"zero_one_enabled": self.zero1, "grad_clipping": True, "max_grad_norm": 0.5},
        )

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float32, **how: Any) -> Any:
        """(model, optimizer, scheduler): matrices decay, vectors do not."""
        torch.manual_seed(seed)
        config = self.config()
        model = nxd.initialize_parallel_model(config, lambda: Model(**how).to(dtype))
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, groups, lr=0.01)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (k + 1))

    def _batch(self, step: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(step)
        batch = {name: torch.randint(0, WORDS, (ROWS, 4), generator=draw) for name in ("ids", "labels")}
        if self.dp > 1 and len(world.current().hosted) == 1:
            batch = {name: t.chunk(self.dp)[int(parallel_state.get_data_parallel_rank())] for name, t in batch.items()}
        elif self.dp > 1:
            place = rank_numbers.per_rank(parallel_state.get_data_parallel_rank())
            batch = {name: sharded.from_ranks(lambda r, t=t: t.chunk(self.dp)[place[r]], ("dp",)) for name, t in batch.items()}
        return {name: t.to("xla") for name, t in batch.items()} if self.pp == 1 else batch

    def train(self, made: Any, first: int, last: int) -> list[float]:
        """Steps of a job; the losses for the global batch."""
        model, optimizer, scheduler = made
        losses = []
        for step in range(first, last):
            loss = model.run_train(**self._batch(step))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            torch_xla.sync()
            held = sharded.shards(loss.detach()) if loss.device.type == "xla" else [loss]
            losses.append(sum(float(v) for v in held) / len(held))
        return losses


def values(made: Any) -> dict[str, torch.Tensor]:
    """Full weights and optimizer state by name."""
    return {name: t.clone() for name, t in {**job.weights(made[0]), **job.moments(*made[:2])}.items()}
