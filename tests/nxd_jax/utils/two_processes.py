"""What `test_torchrun` runs in two processes: python -m torch.distributed.run --nproc_per_node=2 two_processes.py <directory>."""

from __future__ import annotations

import pathlib
import sys

import torch
import torch.distributed as dist
from torch import nn

from nxd_jax import parallel_layers
from nxd_jax.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_jax.optimizer import NeuronZero1Optimizer
from nxd_jax.parallel_layers import parallel_state
from nxd_jax.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from nxd_jax.utils.full_weights import gather_full, scatter_full
from nxd_jax.utils.model_utils import get_model_sequential
from torch_bridge.recorder import sharded


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(4, 8, stride=2, gather_output=False, keep_master_weight=True)
        self.qkv = GQAQKVColumnParallelLinear(4, [8, 4], bias=False, kv_size_multiplier=2)
        self.down = RowParallelLinear(8, 4, input_is_parallel=True)


def make(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def check_equal(a: nn.Module, b: nn.Module) -> None:
    for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True):
        pairs = [(x, y)] if x.device.type == "cpu" else zip(sharded.shards(x), sharded.shards(y), strict=True)
        assert all(torch.equal(s, t) for s, t in pairs)


def rewrite(model: Model) -> None:
    """Replace a full weight."""
    master = model.up.master_weight
    assert master is not None and torch.equal(gather_full(model.up.weight), master)  # type: ignore[arg-type]
    new = torch.arange(32.0).reshape(8, 4)
    scatter_full(model.up.weight, new)
    assert torch.equal(gather_full(model.up.weight), new)  # type: ignore[arg-type]


def checkpoints(model: Model, path: pathlib.Path, where: str, xser: bool) -> None:
    """Save, and load into another model."""
    other = make(2)
    if where == "xla":
        other.to("xla")
    directory = path / (f"{where}_xser" if xser else where)
    parallel_layers.save({"model": model.state_dict(), "rank": dist.get_rank()}, directory, save_xser=xser)
    assert parallel_layers.load(directory, other, load_xser=xser) == {"rank": dist.get_rank()}
    check_equal(model, other)
    if where == "xla":
        assert sharded.varying(other.down.weight).axes == ("tp",)


def full_checkpoint(model: Model, where: str, path: pathlib.Path) -> None:
    """Join the parts to a file with full weights; load that."""
    found = {name: gather_full(p) for name, p in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save({"model": {name: torch.cat(t) if isinstance(t, tuple) else t for name, t in found.items()}}, path / "full.pt")
    dist.barrier()
    other = make(3)
    if where == "xla":
        other.to("xla")
    parallel_layers.load(path / "full.pt", other, sharded=False)
    check_equal(model, other)
    dist.barrier()


def zero1() -> torch.Tensor:
    """Three steps of ZeRO-1 over two data-parallel ranks with gradients that differ, and rows that do not divide."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    p = nn.Parameter(torch.arange(15.0).reshape(5, 3).to("xla"))
    optimizer = NeuronZero1Optimizer([p], torch.optim.AdamW, lr=0.1, max_norm=0.5)
    for step in range(3):
        p.grad = sharded.from_ranks(lambda r, k=step: torch.arange(15.0).reshape(5, 3).cos() * (r + 1 + k), ("dp",))  # type: ignore[misc]
        optimizer.step()
    return torch.cat([p.detach().cpu().reshape(-1), optimizer.grad_norm.cpu()])  # type: ignore[union-attr]


def main(path: pathlib.Path) -> None:
    import torch_bridge.torch_xla.distributed.xla_backend  # noqa: F401

    dist.init_process_group("xla")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    for where in ("cpu", "xla"):
        model = make(0)
        if where == "xla":
            get_model_sequential(model, "xla", 1)
        assert model.up.weight.device.type == where
        rewrite(model)
        checkpoints(model, path, where, xser=False)
        full_checkpoint(model, where, path)
    checkpoints(model, path, "xla", xser=True)
    torch.save(zero1(), path / f"zero1_{dist.get_rank()}.pt")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
