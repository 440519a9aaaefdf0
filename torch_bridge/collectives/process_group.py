"""The "xla" process group: torch.distributed's calls as collectives of the bridge."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.types import Device

from torch_bridge.collectives import functional, reducers, rooted_gradients, torchs_zero
from torch_bridge.mesh import groups as rank_groups
from torch_bridge.mesh import processes, world
from torch_bridge.mesh.groups import Groups

Tensors = list[torch.Tensor]

_REDUCTIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "sum",
    dist.ReduceOp.PRODUCT: "mul",
    dist.ReduceOp.BAND: "and",
    dist.ReduceOp.BOR: "or",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
}


_Base: Any = dist.ProcessGroup
"""Untyped, because torch's declarations of its methods differ between the releases we support."""


class ProcessGroupXla(_Base):
    """`torch_xla.distributed.xla_backend.ProcessGroupXla`. `_mesh` lists the ranks of this group and its sisters; empty: all ranks are one
    group.
    """

    def __init__(self, prefix_store: Any, rank: int, size: int, timeout: datetime.timedelta):
        super().__init__(rank, size)
        if size > world.size():
            raise ValueError(f"init_process_group('xla', world_size={size}), but the world has {world.size()} rank(s): {world.KNOB}")
        self.prefix_store = prefix_store
        self.timeout = timeout
        self._mesh: list[list[int]] = []
        self._name = ""

    def _groups(self) -> Groups:
        """This group and its sisters."""
        return rank_groups.resolve(self._mesh)

    def rank(self) -> Any:
        """This rank's place in the group; each rank's own if the process hosts several."""
        among = self._groups()
        if among.size > 1:
            torchs_zero.refuse()
            rooted_gradients.refuse()
        return world.current().table(among.index)

    def size(self) -> int:
        """Ranks in the group."""
        return self._groups().size

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessGroupXla:
        """Copies of a layer belong to the same group."""
        return self

    def getBackendName(self) -> str:
        return "xla"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """torch's name of the group, by which `destroy_process_group` forgets it."""
        return self._name

    def _reduce(self, opts: Any, tensors: Tensors) -> tuple[str, float]:
        """The kind of a reduction and what to multiply its result by."""
        op = opts.reduceOp
        kind = next((name for known, name in _REDUCTIONS.items() if op == known), None)
        if kind is None:
            raise ValueError(f"the xla backend has no reduction {getattr(op, 'op', op)}; use SUM, AVG, PRODUCT, MIN, MAX, BAND or BOR")
        return kind, 1.0 / self._groups().size if op == dist.ReduceOp.AVG else 1.0

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        if len(tensors) == 1 and reducers.sum_map(tensors[0], self._mesh):
            return _done(tensors)
        kind, scale = self._reduce(opts, tensors) if opts is not None else ("sum", 1.0)
        functional.all_reduce(kind, tensors, scale, self._mesh)
        return _done(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        """As `allreduce`: the result on the other ranks is undefined in torch.distributed, here it is the same."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Tensors, opts: Any) -> Any:
        among = self._groups()
        if len(tensors) == 1 and reducers.take_order(tensors[0], opts.rootRank, self._mesh):
            return _done(tensors)
        if among.size > 1:
            functional.broadcast_from(tensors, opts.rootRank, among)
        return _done(tensors)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        for outs, t in zip(outputs, inputs, strict=True):
            gathered = functional.all_gather(t.reshape(1, *t.shape), 0, self._mesh)
            _copy(outs, gathered.unbind(0))
        return _done([t for outs in outputs for t in outs])

    allgather_coalesced = allgather

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        flat = input if input.dim() else input.reshape(1)
        _copy([output], [functional.all_gather(flat, 0, self._mesh).reshape(output.shape)])
        return _done([output])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        for output, input in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, input)
        return _done(outputs)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        gathered = [functional.all_gather(t.reshape(1, *t.shape), 0, self._mesh) for t in inputs]
        with self._by_itself():
            for outs, found in zip(outputs, gathered, strict=False):
                _copy(outs, found.unbind(0))
        return _done([t for outs in outputs for t in outs])

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Any:
        for out, parts in zip(outputs, inputs or [[]], strict=True):
            among = self._groups()
            if among.size == 1:
                _copy([out], [parts[0]])
                continue
            if not parts and world.process_count() == 1:
                raise NotImplementedError(
                    "scatter: the first rank of this process has no input list, and its choice is taken for all of them; pass the list on every rank"
                )
            with self._by_itself():
                given = torch.stack(list(parts)) if parts else out.new_zeros((among.size, *out.shape))
                at_root = torch.zeros((), device=out.device) + self.rank() == opts.rootRank
                stacked = torch.where(at_root, given, torch.zeros_like(given))  # differs by rank in every process, whatever the list is
            functional.broadcast_from([stacked], opts.rootRank, among)
            _copy([out], [stacked[self.rank()]])
        return _done(outputs)

    @contextlib.contextmanager
    def _by_itself(self) -> Iterator[None]:
        """Where ranks in several processes do different things, without collectives: a program of its own, so that those with collectives are alike."""
        from torch_bridge.runtime import executor  # importing starts no JAX

        apart = world.process_count() > 1 and self.size() > 1
        if apart:
            executor.sync()
        yield
        if apart:
            executor.sync()

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Any:
        for output, parts in zip(outputs, inputs, strict=True):
            shapes = {tuple(t.shape) for t in parts}
            if len(shapes) != 1:
                raise ValueError(f"reduce_scatter needs inputs of one shape, got {sorted(shapes)}")
            self.reduce_scatter_single(output, torch.stack(list(parts)).reshape(-1), opts)
        return _done(outputs)

    reduce_scatter_coalesced = reduce_scatter

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
        kind, scale = self._reduce(opts, [input])
        count = self._groups().size
        flat = input.reshape(-1) if input.dim() == 0 or input.shape[0] % count else input
        _copy([output], [functional.reduce_scatter(kind, flat, scale, 0, count, self._mesh).reshape(output.shape)])
        return _done([output])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        for output, input in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, input, opts)
        return _done(outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        if len(inputs) != self.size() or len(outputs) != self.size():
            raise ValueError(
                f"all_to_all in a group of {self.size()} needs that many inputs and outputs, got {len(inputs)} and {len(outputs)}"
            )
        if self.size() == 1:
            _copy(outputs, inputs)
            return _done(outputs)
        if len({tuple(t.shape) for t in (*inputs, *outputs)}) != 1:
            raise NotImplementedError("all_to_all with parts of different shapes: XLA needs equal parts; pad them")
        exchanged = functional.all_to_all(torch.stack(list(inputs)), 0, 0, self.size(), self._mesh)
        _copy(outputs, exchanged.unbind(0))
        return _done(outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
        opts: Any = None,
    ) -> Any:
        check_equal_parts(output_split_sizes, input_split_sizes)
        _copy([output], [functional.all_to_all(input, 0, 0, self.size(), self._mesh)])
        return _done([output])

    # What torch before 2.13 calls the last few.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start_coalescing(self, device: Device) -> None:
        """Collectives until `_end_coalescing` may be combined; the compiler does that anyway."""

    def _end_coalescing(self, device: Device) -> Any:
        return _done([])

    def barrier(self, opts: Any = None) -> Any:
        """Wait for the other processes that host members, if there are any. What is recorded runs first: the collectives among it need all of them."""
        self.monitored_barrier()
        return _done([])

    def monitored_barrier(self, *args: object, **kwargs: object) -> None:
        """As `barrier`."""
        with self._by_itself():
            processes.barrier("process group", self._groups().processes())

    def send(self, tensors: Tensors, dst_rank: int, tag: int = 0) -> Any:
        self._no_peer("send to", dst_rank)

    def recv(self, tensors: Tensors, src_rank: int, tag: int = 0) -> Any:
        self._no_peer("recv from", src_rank)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        self._no_peer("recv from", "any rank")

    def _no_peer(self, what: str, rank: Any) -> NoReturn:
        if self.size() > 1:
            raise NotImplementedError(
                f"{what} {rank}: point-to-point transfers have no meaning in a program that all ranks run together; use "
                "xm.collective_permute(tensor, [[source, target], ...]), which every rank of the group calls"
            )
        raise ValueError(f"{what} {rank}: the group of rank {self.rank()} has {self.size()} member, so there is no other rank")


def check_equal_parts(output_split_sizes: Sequence[int] | None, input_split_sizes: Sequence[int] | None) -> None:
    """Raises NotImplementedError unless an `all_to_all_single` exchanges equal parts."""
    for name, sizes in (("output_split_sizes", output_split_sizes), ("input_split_sizes", input_split_sizes)):
        if sizes and len(set(sizes)) > 1:
            raise NotImplementedError(
                f"all_to_all_single with uneven {name}={list(sizes)}: XLA needs equal parts; pad them; to move whole tensors (permute_tensor), "
                "use xm.collective_permute(tensor, [[source, target], ...])"
            )


def _copy(outputs: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for out, value in zip(outputs, values, strict=True):
            if out.shape != value.shape:
                raise ValueError(f"output has shape {list(out.shape)}, the result has {list(value.shape)}")
            out.copy_(value)


class _Work(dist.Work):
    """A finished collective: the graph holds its order, so nobody has to wait."""

    def __init__(self, tensors: Tensors):
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> Tensors:
        return self._tensors

    def get_future(self) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


def _done(tensors: Tensors) -> Any:
    return _Work(tensors)
