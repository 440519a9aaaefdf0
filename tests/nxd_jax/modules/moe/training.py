"""A small language model with mixtures of experts, the layouts that it is trained in, and the same training on one rank under the same drop rule."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import neuronx_distributed as nxd_api
import torch
import torch_xla
from neuronx_distributed.modules.moe import (
    ExpertMLPs,
    GroupLimitedRouter,
    MoE,
    RouterSinkhorn,
    RouterTopK,
    SharedExperts,
    load_balancing_loss_func,
)
from neuronx_distributed.modules.rms_norm import RMSNorm
from neuronx_distributed.parallel_layers import ColumnParallelLinear, RowParallelLinear, mappings
from torch import nn

from nxd_jax.tensor_parallel import parallel_groups
from torch_bridge.collectives import functional
from torch_bridge.recorder import sharded

HIDDEN, WORDS, EXPERTS, SEQUENCE = 8, 16, 4, 4
STEPS = 5


@dataclass(frozen=True)
class Layout:
    """How the model is trained. ranks: of the world. factor: capacity. rows: of each micro-batch of a data-parallel rank. aux: how much auxiliary losses
    count; they are of the tokens that a rank sees, so that a shuffle changes them."""

    ranks: int
    tp: int = 1
    ep: int = 1
    pp: int = 1
    cp: int = 1
    factor: float | None = None
    k: int = 2
    router: str = "top_k"
    shared: bool = False
    sequence_parallel: bool = False
    router_sp: bool = False
    zero1: bool = False
    checkpoint: bool = False
    shuffle: int = 1
    microbatches: int = 1
    schedule: str | None = None
    rows: int = 2
    aux: float = 0.1

    def __str__(self) -> str:
        said = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default and f.name != "ranks"
        ]
        return f"{self.ranks} {' '.join(said)}"

    @property
    def dp(self) -> int:
        return self.ranks // (self.pp * self.tp * self.cp)

    def config(self) -> dict[str, Any]:
        pipeline = {
            "transformer_layer_cls": Block,
            "num_microbatches": self.microbatches,
            "output_loss_value_spec": True,
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
            expert_parallel_size=self.ep,
            context_parallel_size=self.cp,
            pipeline_config=pipeline if self.pp > 1 else None,
            optimizer_config={"zero_one_enabled": self.zero1, "grad_clipping": True, "max_grad_norm": 0.5},
            activation_checkpoint_config=MoE if self.checkpoint else None,
            sequence_parallel=self.sequence_parallel,
        )

    def make(self) -> tuple[Any, Any]:
        """Model and optimizer, from the same seed in every layout."""
        torch.manual_seed(0)
        config = self.config()
        model = nxd_api.initialize_parallel_model(config, lambda: Model(self))
        return model, nxd_api.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=0.01)

    def batches(self) -> list[dict[str, torch.Tensor]]:
        """The global batch of each step."""
        draw = torch.Generator().manual_seed(1)
        shape = (self.rows * self.microbatches * self.dp, SEQUENCE)
        return [{name: torch.randint(0, WORDS, shape, generator=draw) for name in ("ids", "labels")} for _ in range(STEPS)]

    def local(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What each data-parallel rank has of it."""
        place = parallel_groups.places("dp")
        axes = sharded.axes_of(parallel_groups.group("dp"))
        return {name: sharded.from_ranks(lambda r, t=t: t.chunk(self.dp)[place[r]], axes) for name, t in batch.items()}


def moe(layout: Layout) -> MoE:
    """Experts by the layout."""
    sequence = {"sequence_parallel_enabled": layout.sequence_parallel}
    of_router = {"sequence_parallel_enabled": layout.router_sp, "sequence_dimension": 0 if layout.router_sp else None}
    router: Any
    if layout.router == "group":
        router = GroupLimitedRouter(EXPERTS, layout.k, HIDDEN, n_group=2, topk_group=2, norm_topk_prob=True, **of_router)
    elif layout.router == "sinkhorn":
        router = RouterSinkhorn(EXPERTS, layout.k, HIDDEN, **of_router)
    else:
        router = RouterTopK(EXPERTS, layout.k, HIDDEN, **of_router)
    experts = ExpertMLPs(
        num_experts=EXPERTS,
        top_k=layout.k,
        hidden_size=HIDDEN,
        intermediate_size=12,
        hidden_act="silu",
        glu_mlp=True,
        capacity_factor=layout.factor,
        normalize_top_k_affinities=layout.k > 1 and layout.router == "top_k",
        **sequence,
    )
    shared = SharedExperts(HIDDEN, 12, 1, "silu") if layout.shared else None
    dim = 0 if layout.sequence_parallel else None
    return MoE(
        router, experts, shared, **sequence, sequence_dimension=dim, return_router_logits=True, token_shuffle_group_size=layout.shuffle
    )


class Block(nn.Module):
    """A dense residual layer, and one of experts. x: [B, S, H]; with sequence parallelism this rank's part of [S, B, H]."""

    def __init__(self, layout: Layout):
        super().__init__()
        sp = layout.sequence_parallel
        options = {"sequence_parallel_enabled": sp, "sequence_dimension": 0 if sp else None, "bias": False}
        self.k = layout.k
        self.norms = nn.ModuleList(RMSNorm(HIDDEN, sequence_parallel_enabled=sp) for _ in range(2))
        self.up = ColumnParallelLinear(HIDDEN, 2 * HIDDEN, gather_output=False, **options)
        self.down = RowParallelLinear(2 * HIDDEN, HIDDEN, input_is_parallel=True, **options)
        self.mlp = moe(layout)

    def forward(self, x: torch.Tensor, aux: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.down(torch.tanh(self.up(self.norms[0](x))))
        out, logits = self.mlp(self.norms[1](x))
        return x + out, aux + load_balancing_loss_func(logits, EXPERTS, self.k)


class Model(nn.Module):
    """Loss with the auxiliary losses of its layers. The sequence comes first: where tokens are dropped, that order says whose."""

    def __init__(self, layout: Layout):
        super().__init__()
        self.sequence_parallel, self.coefficient = layout.sequence_parallel, layout.aux
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleList(Block(layout) for _ in range(2))
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids).transpose(0, 1)
        if self.sequence_parallel:
            x = mappings.scatter_to_sequence_parallel_region(x, 0)
        aux = x.new_zeros(())
        for layer in self.layers:
            x, aux = layer(x, aux)
        if self.sequence_parallel:
            x = mappings.gather_from_sequence_parallel_region(x, 0, to_model_parallel=False)
        out = self.head(x.transpose(0, 1))
        return nn.functional.cross_entropy(out.reshape(-1, WORDS), labels.reshape(-1)) + self.coefficient * aux


@dataclass
class Trained:
    """losses: of the global batch, by step; norms: of gradients; weights: of the undivided model, at the end."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def train(layout: Layout) -> tuple[Trained, Any, Any]:
    """Train in a world that is laid out so, and that this process hosts."""
    model, optimizer = layout.make()
    losses, norms = steps(layout, model, optimizer)
    return Trained(losses, norms, undivided(model)), model, optimizer


def steps(layout: Layout, model: Any, optimizer: Any) -> tuple[list[float], list[float]]:
    """The losses of the global batch and the norms of its gradients, by step."""
    losses, norms = [], []
    for batch in layout.batches():
        given = layout.local(batch)
        if layout.pp > 1:
            loss = model.run_train(**given)
        else:
            loss = model(**{name: t.to("xla") for name, t in given.items()})
            loss.backward()
            loss = loss.detach()
        optimizer.step()
        norms.append(float(torch.as_tensor(optimizer.grad_norm).reshape(-1)[0]))
        optimizer.zero_grad()
        torch_xla.sync()
        mean = functional.all_reduce("sum", loss.to("xla"), 1.0 / layout.dp, parallel_groups.group("dp")) if layout.dp > 1 else loss
        losses.append(float(sharded.shards(mean.to("xla"))[0]))
    return losses, norms


def train_alone(layout: Layout) -> Trained:
    """The same on one rank: the parts of the batch that ranks see at once, one after the other, gradients added up."""
    alone = dataclasses.replace(
        layout, ranks=1, tp=1, ep=1, pp=1, cp=1, sequence_parallel=False, router_sp=False, zero1=False, checkpoint=False, shuffle=1
    )
    model, optimizer = alone.make()
    losses, norms = [], []
    for batch in layout.batches():
        parts = layout.dp * layout.microbatches
        total = 0.0
        for ids, labels in zip(batch["ids"].chunk(parts), batch["labels"].chunk(parts), strict=True):
            loss = model(ids.to("xla"), labels.to("xla")) / parts
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        norms.append(float(torch.as_tensor(optimizer.grad_norm).reshape(-1)[0]))
        optimizer.zero_grad()
        torch_xla.sync()
        losses.append(total)
    return Trained(losses, norms, undivided(model))


def undivided(model: Any) -> dict[str, torch.Tensor]:
    """Every parameter of the whole model, from the parts that ranks hold; ranks that hold the same part must agree."""
    ep, tp = parallel_groups.places("ep"), parallel_groups.places("tp")
    found = {}
    for name, p in model.named_parameters():
        name = name.replace("module.", "", 1) if name.startswith("module.") else name
        is_cut, of_experts = getattr(p, "tensor_model_parallel", False), getattr(p, "expert_model_parallel", False)
        parts: dict[tuple[int, int], torch.Tensor] = {}
        for rank, shard in enumerate(sharded.shards(p.detach())):
            key = (ep[rank] if of_experts else 0, tp[rank] if is_cut else 0)
            torch.testing.assert_close(parts.setdefault(key, shard), shard, rtol=0, atol=0, msg=lambda t, name=name: f"{name}: {t}")
        rows = []
        for e in sorted({key[0] for key in parts}):
            mine = [parts[key] for key in sorted(parts) if key[0] == e]
            blocks = [m.chunk(getattr(p, "partition_stride", 1), p.partition_dim) for m in mine] if is_cut else []
            rows.append(torch.cat([b[s] for s in range(len(blocks[0])) for b in blocks], p.partition_dim) if is_cut else mine[0])
        found[name] = torch.cat(rows)
    return found


def agree(found: Trained, wanted: Trained, rtol: float = 1e-4) -> None:
    """Losses, norms and weights."""
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(wanted.losses), rtol=rtol, atol=1e-5)
    torch.testing.assert_close(torch.tensor(found.norms), torch.tensor(wanted.norms), rtol=10 * rtol, atol=1e-5)
    assert found.weights.keys() == wanted.weights.keys()
    for name, w in wanted.weights.items():
        torch.testing.assert_close(found.weights[name], w, rtol=10 * rtol, atol=2e-4, msg=lambda t, name=name: f"{name}: {t}")
