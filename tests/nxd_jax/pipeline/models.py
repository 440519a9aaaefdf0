"""A small language model with parallel layers, the layouts that it is trained in, and the same training without any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import neuronx_distributed as nxd_api
import torch
import torch_xla
from neuronx_distributed.parallel_layers import ColumnParallelLinear, RowParallelLinear, mappings
from torch import nn

from nxd_jax.tensor_parallel import grads
from torch_bridge.recorder import sharded

HIDDEN, WORDS = 8, 16


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, sequence_parallel: bool = False):
        super().__init__()
        options = {"sequence_parallel_enabled": sequence_parallel, "sequence_dimension": 1 if sequence_parallel else None}
        self.norm = nn.LayerNorm(HIDDEN)
        if sequence_parallel:
            for p in self.norm.parameters():
                p.sequence_parallel_enabled = True
        self.up = ColumnParallelLinear(HIDDEN, 2 * HIDDEN, gather_output=False, bias=False, **options)
        self.down = RowParallelLinear(2 * HIDDEN, HIDDEN, input_is_parallel=True, bias=False, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Layer(nn.Module):
    """A layer without anything parallel, for models of 4 entries."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    """tied: the embedding is the head. skip: a value of the first stage is used in the last."""

    def __init__(self, layers: int = 8, tied: bool = False, skip: bool = False, sequence_parallel: bool = False):
        super().__init__()
        self.skip, self.sequence_parallel = skip, sequence_parallel
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleList(Block(sequence_parallel) for _ in range(layers))
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = x = self.embedding(ids)
        if self.sequence_parallel:
            x = mappings.scatter_to_sequence_parallel_region(x, 1)
        for layer in self.layers:
            x = layer(x)
        if self.sequence_parallel:
            x = mappings.gather_from_sequence_parallel_region(x, 1, to_model_parallel=False)
        out = self.head(x + first if self.skip else x)
        return nn.functional.cross_entropy(out.reshape(-1, WORDS), labels.reshape(-1)), out


@dataclass(frozen=True)
class Layout:
    """How a model is trained. ranks: of the world; stages: virtual_pipeline_size."""

    ranks: int
    pp: int
    microbatches: int
    schedule: str | None = None
    stages: int = 1
    tp: int = 1
    cp: int = 1
    zero1: bool = False
    checkpoint: bool = False
    tied: bool = False
    skip: bool = False
    sequence_parallel: bool = False
    layers: int = 8

    def __str__(self) -> str:
        flags = [name for name in ("zero1", "checkpoint", "tied", "skip", "sequence_parallel") if getattr(self, name)]
        return f"{self.ranks} pp{self.pp}x{self.stages} tp{self.tp} cp{self.cp} M{self.microbatches} {self.schedule} {' '.join(flags)}"

    @property
    def dp(self) -> int:
        return self.ranks // (self.pp * self.tp * self.cp)

    def config(self) -> dict[str, Any]:
        pipeline = {
            "transformer_layer_cls": Block,
            "num_microbatches": self.microbatches,
            "virtual_pipeline_size": self.stages,
            "output_loss_value_spec": (True, False),
            "input_names": ["ids", "labels"],
            "auto_partition": True,
            "use_zero1_optimizer": self.zero1,
            "use_optimizer_wrapper": True,
            "broadcast_and_average_loss": True,
            "schedule": self.schedule,
        }
        return nxd_api.neuronx_distributed_config(
            tensor_parallel_size=self.tp,
            pipeline_parallel_size=self.pp,
            context_parallel_size=self.cp,
            pipeline_config=pipeline if self.pp > 1 else None,
            optimizer_config={"zero_one_enabled": self.zero1, "grad_clipping": True, "max_grad_norm": 0.5},
            activation_checkpoint_config=Block if self.checkpoint else None,
            sequence_parallel=self.sequence_parallel,
        )

    def make(self) -> tuple[Any, Any]:
        """Model and optimizer, from the same seed in every layout."""
        torch.manual_seed(0)
        config = self.config()
        model = nxd_api.initialize_parallel_model(
            config, lambda: Model(self.layers, self.tied, self.skip, self.sequence_parallel and self.tp > 1)
        )
        return model, nxd_api.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=0.01)

    def batch(self) -> dict[str, torch.Tensor]:
        """The global batch: two rows for each micro-batch of each data-parallel rank."""
        draw = torch.Generator().manual_seed(1)
        return {name: torch.randint(0, WORDS, (2 * self.microbatches * self.dp, 4), generator=draw) for name in ("ids", "labels")}

    def local(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What each data-parallel rank has of it."""
        if self.dp == 1:
            return batch
        from neuronx_distributed.parallel_layers import parallel_state

        ranks = parallel_state.get_data_parallel_rank()
        from torch_bridge.mesh import rank_numbers

        place = rank_numbers.per_rank(ranks)
        return {name: sharded.from_ranks(lambda r, t=t: t.chunk(self.dp)[place[r]], ("dp",)) for name, t in batch.items()}

    def alone(self) -> Layout:
        """The same training on one rank."""
        return Layout(1, 1, self.microbatches, tied=self.tied, skip=self.skip, layers=self.layers)


@dataclass
class Trained:
    """losses, norms: of each step; gradients, weights: full ones by name, of the first step and after the last."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def train(layout: Layout, batch: dict[str, torch.Tensor], steps: int = 3) -> tuple[Trained, Any, Any]:
    """Train in the world that there is; what came out, the model and the optimizer."""
    model, optimizer = layout.make()
    found = Trained([], [], {}, {})
    for step in range(steps):
        given = layout.local(batch)
        if layout.pp == 1:
            given = {name: t.to("xla") for name, t in given.items()}
        loss = model.run_train(**given)
        if not step and not layout.zero1:
            grads.allreduce_sequence_parallel_gradients(optimizer)
            if layout.dp > 1:
                grads.bucket_allreduce_gradients([p.grad for p in model.parameters()], reduce_over_ep_group=True)
            found.gradients = {name: full(p.grad, p, layout) for name, p in model.named_parameters()}
            for p in model.parameters():  # the step reduces sums of what is the same already: undo that for those it would add up
                if getattr(p, "sequence_parallel_enabled", False):
                    p.grad.div_(layout.tp)
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        found.losses.append(float(loss.detach()))
        found.norms.append(float(optimizer.grad_norm))
    found.weights = {name: full(p.detach(), p, layout) for name, p in model.named_parameters()}
    return found, model, optimizer


def full(t: torch.Tensor, parameter: Any, layout: Layout) -> torch.Tensor:
    """The full tensor of what ranks hold parts of."""
    parts = sharded.shards(t)[: layout.tp]
    if layout.tp > 1 and getattr(parameter, "tensor_model_parallel", False):
        return torch.cat(parts, dim=parameter.partition_dim)
    return parts[0]


def agree(found: Trained, expected: Trained, rtol: float = 1e-4) -> None:
    """Losses, norms, every gradient and every weight."""
    torch.testing.assert_close(found.losses, expected.losses, rtol=rtol, atol=1e-6)
    torch.testing.assert_close(found.norms, expected.norms, rtol=rtol, atol=1e-6)
    for name in found.gradients:
        torch.testing.assert_close(found.gradients[name], expected.gradients[name], rtol=rtol, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=rtol, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
