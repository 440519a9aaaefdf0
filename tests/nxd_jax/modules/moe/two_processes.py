"""What `test_moe_parallel_layers` runs in one process and in two: two expert parallel ranks take a step, each rank's values in a file.

python two_processes.py <folder>, started by nxd-run or torchrun.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import torch_bridge
import torch_bridge.torch_xla.core.xla_model as xm
import torch_bridge.torch_xla.distributed.xla_backend
from nxd_jax.modules.moe.experts import Experts
from nxd_jax.parallel_layers import parallel_state
from torch_bridge.mesh import world


def train() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters, and everything that is compared."""
    torch.manual_seed(5)
    experts = Experts(num_experts=4, hidden_size=8, intermediate_size=16, hidden_act="silu", glu_mlp=True, bias=True).to("xla")
    x = (torch.randn(12, 8) + xm.get_ordinal()).to("xla").requires_grad_()
    ends = (torch.tensor([3, 9]) + xm.get_ordinal()).to("xla")
    out = experts.rows(x, ends)
    out.square().sum().backward()
    found = {"out": out.detach(), "x.grad": x.grad, **{f"{n}.grad": p.grad for n, p in experts.named_parameters()}}
    torch.optim.SGD(experts.parameters(), lr=0.1).step()
    return {"gate_up": experts.gate_up_proj.weight, "down": experts.down_proj.weight}, {**found, **experts.state_dict()}


def main(folder: Path) -> None:
    dist.init_process_group("xla")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    weights, found = train()
    spec = {name: str(torch_bridge.varying(w).spec).removeprefix("Partition").replace("Spec", "P") for name, w in weights.items()}
    each = {name: torch_bridge.shards(t.detach()) for name, t in found.items()}
    for place, rank in enumerate(world.current().hosted):
        torch.save({"spec": spec, **{name: own[place] for name, own in each.items()}}, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
