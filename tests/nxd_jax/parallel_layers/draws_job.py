"""What `test_draws` runs, in one process and in four: random numbers at tp 2 x dp 2, each rank's own in a file.

python draws_job.py <folder>, started by nxd-run or torchrun.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import torch_bridge
import torch_bridge.torch_xla.core.xla_model as xm
import torch_bridge.torch_xla.distributed.xla_backend
from nxd_jax.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, parallel_state
from nxd_jax.parallel_layers.random import get_xla_rng_tracker, model_parallel_xla_manual_seed
from torch_bridge.mesh import world

WIDTH = 8


class Model(nn.Module):
    """Parallel layers, with dropout where activations differ along dp, and where they differ along tp, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = ParallelEmbedding(16, WIDTH)
        self.qkv = ColumnParallelLinear(WIDTH, 3 * 2 * WIDTH, gather_output=False)
        self.out = RowParallelLinear(2 * WIDTH, WIDTH, input_is_parallel=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.embed(ids), 0.3)
        q, k, v = self.qkv(x).unflatten(-1, (2, 3 * WIDTH // 2)).transpose(1, 2).chunk(3, -1)
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
        return F.dropout(self.out(F.dropout(attended.transpose(1, 2).flatten(2), 0.2)), 0.1)


def draw_weights(model: Model) -> None:
    """As Hugging Face's `_init_weights` does."""
    for module in model.modules():
        if hasattr(module, "weight"):
            module.weight.data.normal_(mean=0.0, std=0.2)
        if getattr(module, "bias", None) is not None:
            nn.init.uniform_(module.bias, -0.1, 0.1)


def draw() -> dict[str, torch.Tensor]:
    """Everything random, by name."""
    model_parallel_xla_manual_seed(3)
    model = Model()
    draw_weights(model)
    model.bfloat16().float()
    model.qkv.weight.data.normal_(std=0.3)
    model.to("xla")
    found = {f"cpu {name}": p.detach().clone() for name, p in model.named_parameters()}
    loss = model((torch.arange(12).reshape(2, 6) + parallel_state.get_data_parallel_rank()).to("xla")).square().mean()
    loss.backward()
    found |= {"loss": loss.detach(), **{f"gradient {name}": p.grad for name, p in model.named_parameters()}}
    draw_weights(model)
    found |= {f"xla {name}": p.detach().clone() for name, p in model.named_parameters()}
    local = model.qkv.weight.detach()
    found |= {"rand_like": torch.rand_like(local), "rand": torch.rand(5, device="xla"), "bernoulli": torch.bernoulli(local.sigmoid())}
    with get_xla_rng_tracker().fork():
        found["tracker"] = F.dropout(torch.ones(32, device="xla"), 0.5)
    torch.manual_seed(11)
    found |= {"cpu": torch.rand(3).to("xla"), "again": F.dropout(local, 0.5)}
    return found | draw_own()


def draw_own() -> dict[str, torch.Tensor]:
    """After seeds that differ by rank."""
    torch.manual_seed(20 + xm.get_ordinal())
    model = Model()
    found = {f"own first {name}": p.detach().clone().to("xla") for name, p in model.named_parameters()}
    draw_weights(model)
    model.to("xla")
    found |= {f"own {name}": p.detach().clone() for name, p in model.named_parameters()}
    local = model.qkv.weight.detach()
    return found | {"own cpu": torch.rand(3).to("xla"), "own dropout": F.dropout(local, 0.5), "own rand": torch.rand(5, device="xla")}


def main(folder: Path) -> None:
    dist.init_process_group("xla")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    each = {name: torch_bridge.shards(t) for name, t in draw().items()}
    for place, rank in enumerate(world.current().hosted):
        torch.save({name: own[place] for name, own in each.items()}, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
