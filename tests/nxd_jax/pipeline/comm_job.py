"""What `test_comm` runs in several processes (python -m torch.distributed.run ... comm_job.py <folder> <pp> ...): messages round the ring of pipeline ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.pipeline import comm
from neuronx_distributed.utils.serialization import SerializationManager

from torch_bridge.mesh import rank_numbers, world
from torch_bridge.recorder import sharded

MESSAGES = 3


def meta(*size: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> Any:
    """What `recv_from` is told of a tensor."""
    (found,) = SerializationManager().serialize(torch.empty(size, dtype=dtype, requires_grad=requires_grad))[2]
    return found


def of_ranks(t: torch.Tensor) -> list[list[float]]:
    """The values of each rank of this process."""
    return [block.flatten().tolist() for block in sharded.shards(t.detach())]


def each() -> torch.Tensor:
    """10 x rank, on each rank of this process."""
    return sharded.from_ranks(lambda r: torch.tensor(10.0 * r), tuple(world.current().axes))


def tensors() -> dict[str, Any]:
    """Several tensors to the next rank and one back, before anybody receives; then their sums, a gradient, and a collective with what came."""
    x = torch.arange(6.0, device="xla").reshape(2, 3) + each()
    given = [comm.send(x * (k + 1)) for k in range(MESSAGES)]
    back = comm.send((x[0].requires_grad_() * -1).sum(), send_next=False)
    found = [comm.recv_from(meta(2, 3, requires_grad=True)) for _ in range(MESSAGES)]
    behind = comm.recv_from(meta(requires_grad=False), recv_prev=False)
    (found[0] * found[2] + x).sum().backward()
    total = xm.all_reduce("sum", found[0].detach(), groups=parallel_state.get_pipeline_model_parallel_group(as_list=True))
    return {
        "given": of_ranks(given[1]),
        "found": [of_ranks(t) for t in found],
        "behind": of_ranks(behind),
        "gradient": of_ranks(found[0].grad),
        "total": of_ranks(total),
        "history": [back.requires_grad, back.is_leaf, found[0].requires_grad, found[0].is_leaf],
        "integers": of_ranks(integers()),
    }


def integers() -> torch.Tensor:
    """int64 beyond 32 bits, from the rank before."""
    comm.send(torch.tensor([1 << 40, -3], device="xla"))
    return comm.recv_from(meta(2, dtype=torch.int64))


def only_some_ranks() -> Any:
    """A script that branches on the rank: the first sends to the second, which goes on computing with it."""
    rank = int(parallel_state.get_pipeline_model_parallel_rank())
    if rank == 0:
        comm.send(torch.full((4,), 7.0, device="xla"))
        return comm.recv_python_object(recv_prev=False)
    if rank == 1:
        found = float((comm.recv_from(meta(4)) * 2).sum())
        comm.send_python_object(found, send_next=False)
        return found
    return None


def objects() -> list[Any]:
    """Python objects both ways, by both methods."""
    rank = int(rank_numbers.per_rank(parallel_state.get_pipeline_model_parallel_rank())[world.first()])
    comm.send_python_object({"from": rank, "shape": torch.Size([2])})
    comm.send_python_object((rank, 1), send_next=False, method="gloo")
    comm.send_python_object("second", method="gloo")
    return [comm.recv_python_object(), comm.recv_python_object(recv_prev=False, method="gloo"), comm.recv_python_object(method="gloo")]


def mistakes() -> dict[str, str]:
    """What is said of wrong arguments, and of a tensor of another shape."""
    comm.send(torch.ones(2, 2, device="xla"))
    return {
        "shape": refused(comm.recv_from, meta(3, dtype=torch.bfloat16)),
        "cpu": refused(comm.send, torch.ones(2)),
        "number": refused(comm.send, 3.0),
        "large": refused(comm.send_python_object, bytes(comm.MAX_LENGTH), method="gloo"),
        "method": refused(comm.recv_python_object, method="nccl"),
    }


def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The error of a call."""
    try:
        return f"no error: {call(*args, **kwargs)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(folder: str, *layouts: str) -> None:
    """For each layout (pp x tp), what this process saw."""
    dist.init_process_group("xla")
    found = []
    for layout in layouts:
        pp, tp = map(int, layout.split("x"))
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
        if pp == world.size() and len(world.current().hosted) > 1:
            found.append({"refused": refused(comm.recv_python_object)})
            continue
        seen = {"tensors": tensors(), "objects": objects()}
        found.append(seen if len(world.current().hosted) > 1 else seen | {"some": only_some_ranks(), "mistakes": mistakes()})
    Path(folder, f"{world.process_index()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
