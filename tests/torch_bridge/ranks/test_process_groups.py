"""torch.distributed with backend "xla" on hosted worlds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_xla.distributed.xla_backend as xla_backend

from tests.torch_bridge.ranks import eager, exchanges
from torch_bridge.collectives import object_collectives
from torch_bridge.mesh import rank_numbers, world
from torch_bridge.script import rank_payloads

TP = [[0, 1], [2, 3]]
DP = [[0, 2], [1, 3]]


@pytest.fixture(autouse=True)
def four_ranks() -> Iterator[None]:
    world.configure(world.World(4))
    world.set_axes({"dp": 2, "tp": 2})
    dist.init_process_group("xla")
    yield
    dist.destroy_process_group()
    world.configure(None)


def _values(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return eager.each(lambda r: (torch.randn(shape, generator=torch.Generator().manual_seed(r)) * 3).to(dtype))


def _group(mesh: list[list[int]]) -> Any:
    return dist.new_group(mesh[0], pg_options={"xla_pg_options": {"mesh": mesh}})


def test_ranks_and_sizes() -> None:
    assert rank_numbers.per_rank(dist.get_rank()) == [0, 1, 2, 3] and dist.get_world_size() == 4
    assert dist.get_backend() == "xla"
    for mesh in (TP, DP, [[0, 3], [1, 2]]):
        group = _group(mesh)
        own = [exchanges.members(mesh, r).index(r) for r in range(4)]
        assert rank_numbers.per_rank(dist.get_rank(group)) == own and dist.get_world_size(group) == 2 and group.size() == 2
        assert rank_numbers.per_rank(dist.get_group_rank(group, dist.get_rank())) == own
        assert dist.get_process_group_ranks(group) == mesh[0]


@pytest.mark.parametrize(
    ("members", "mesh"),
    [
        ([0, 1], TP), ([0, 2], DP), ([0, 1, 2, 3], [[0, 1, 2, 3]]), ([0], [[0], [1], [2], [3]]),
    ],
)  # fmt: skip
def test_groups_from_their_members_alone(members: list[int], mesh: list[list[int]]) -> None:
    group = dist.new_group(members)
    assert sorted(map(list, group._mesh)) == sorted(mesh)
    values = _values(3)
    t = eager.on_xla(values)
    dist.all_reduce(t, group=group)
    eager.same(t, exchanges.all_reduce("sum", values, mesh))


def test_groups_without_the_first_hosted_rank() -> None:
    """As torch answers rank 0."""
    assert dist.new_group([2, 3]) == dist.GroupMember.NON_GROUP_MEMBER


def test_groups_made_in_a_loop() -> None:
    """What scripts do: every rank makes every group and keeps the one it is in."""
    mine = None
    for members in DP:
        group = dist.new_group(members)
        if dist.get_rank() in members:
            mine = group
    values = _values(2)
    t = eager.on_xla(values)
    dist.all_reduce(t, group=mine)
    eager.same(t, exchanges.all_reduce("sum", values, DP))


def test_strided_groups_that_are_no_lines() -> None:
    dist.destroy_process_group()
    world.configure(world.World(8))
    dist.init_process_group("xla")
    assert dist.new_group([0, 4])._mesh == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert dist.new_group([0, 1])._mesh == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert dist.new_group([0, 2, 4, 6])._mesh == [[0, 2, 4, 6], [1, 3, 5, 7]]
    with pytest.raises(ValueError, match=r"new_group\(\[0, 3\]\).*these ranks are no line of the mesh.*pg_options=.*xla_pg_options"):
        dist.new_group([0, 3])


OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.PRODUCT: "mul",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
}


@pytest.mark.parametrize("mesh", [None, TP, DP, [[0, 3], [1, 2]]], ids=str)
def test_collectives(mesh: list[list[int]] | None) -> None:
    group = None if mesh is None else _group(mesh)
    among = mesh or [[0, 1, 2, 3]]
    n = len(among[0])
    values = _values(4, 3)
    whole = _values(dtype=torch.int64)
    found: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for op, kind in OPS.items():
        t = eager.on_xla(values)
        assert dist.all_reduce(t, op, group) is None
        found.append((t, exchanges.all_reduce(kind, values, among)))
    t = eager.on_xla(values)
    work = dist.all_reduce(t, dist.ReduceOp.AVG, group, async_op=True)
    assert work.wait() and work.is_completed()
    found.append((t, [v / n for v in exchanges.all_reduce("sum", values, among)]))
    t = eager.on_xla(whole)
    dist.all_reduce(t, dist.ReduceOp.BOR, group)
    found.append((t, exchanges.all_reduce("or", whole, among)))

    x = eager.on_xla(values)
    parts = [torch.zeros(4, 3, device="xla") for _ in range(n)]
    dist.all_gather(parts, x, group)
    for k, part in enumerate(parts):
        found.append((part, exchanges.broadcast(values, among, k)))
    wide = torch.zeros(4 * n, 3, device="xla")
    dist.all_gather_into_tensor(wide, x, group)
    found.append((wide, exchanges.all_gather(values, among, 0)))
    narrow = torch.zeros(4 // n, 3, device="xla")
    dist.reduce_scatter_tensor(narrow, x, group=group)
    found.append((narrow, exchanges.reduce_scatter("sum", values, among, 0)))
    own = torch.zeros(4 // n, 3, device="xla")
    dist.reduce_scatter(own, list(x.chunk(n)), dist.ReduceOp.AVG, group)
    found.append((own, [v / n for v in exchanges.reduce_scatter("sum", values, among, 0)]))
    single = torch.zeros(4, 3, device="xla")
    dist.all_to_all_single(single, x, group=group)
    found.append((single, exchanges.all_to_all(values, among, 0, 0)))
    outs = [torch.zeros(4 // n, 3, device="xla") for _ in range(n)]
    dist.all_to_all(outs, list(x.chunk(n)), group)
    exchanged = exchanges.all_to_all(values, among, 0, 0)
    for k, out in enumerate(outs):
        found.append((out, [e.chunk(n)[k] for e in exchanged]))
    for source in {0, n - 1} if group is not None else {0, 2}:
        t = eager.on_xla(values)
        dist.broadcast(t, group=group, group_src=source) if group is not None else dist.broadcast(t, source)
        found.append((t, exchanges.broadcast(values, among, source)))
    out = torch.zeros(4 // n, 3, device="xla")
    dist.scatter(out, [c.contiguous() for c in x.chunk(n)], group=group, group_src=0)
    found.append((out, [v.chunk(n)[exchanges.members(among, r).index(r)] for r, v in enumerate(exchanges.broadcast(values, among, 0))]))
    t = eager.on_xla(values)
    dist.reduce(t, group=group, group_dst=0)
    found.append((t, exchanges.all_reduce("sum", values, among)))
    for k, (actual, expected) in enumerate(found):
        try:
            eager.same(actual, expected)
        except AssertionError as error:
            raise AssertionError(f"result {k}: {error}") from None


def test_broadcast_from_each_groups_first_rank() -> None:
    """`src` is a global rank, each group's own: what Megatron-style code passes as `get_tensor_model_parallel_src_rank()`."""
    group = _group(TP)
    values = _values(3)
    t = eager.on_xla(values)
    dist.broadcast(t, dist.get_rank() // 2 * 2, group=group)
    eager.same(t, exchanges.broadcast(values, TP, 0))
    t = eager.on_xla(values)
    dist.broadcast(t, dist.get_rank() // 2 * 2 + 1, group=group)
    eager.same(t, exchanges.broadcast(values, TP, 1))


def test_gathering_on_one_rank() -> None:
    values = _values(2)
    parts = [torch.zeros(2, device="xla") for _ in range(4)]
    dist.gather(eager.on_xla(values), parts)
    for k, part in enumerate(parts):
        eager.same(part, values[k])


def test_coalesced() -> None:
    group = _group(TP)
    first, second = _values(3), _values(2, 2)
    a, b = eager.on_xla(first), eager.on_xla(second)
    with pytest.warns(FutureWarning):
        dist.all_reduce_coalesced([a, b], group=group)
    eager.same(a, exchanges.all_reduce("sum", first, TP))
    eager.same(b, exchanges.all_reduce("sum", second, TP))


# -- objects --------------------------------------------------------------------------------------


def test_objects_of_all_ranks() -> None:
    r = dist.get_rank()
    own = torch.ones(2, device="xla") * r
    mine = {"rank": r, "half": r / 2, "loss": own.sum().item(), "t": own, "name": "x", "list": [r, (r,)]}
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, mine)
    for k, other in enumerate(found):
        assert (other["rank"], other["half"], other["loss"], other["name"], other["list"]) == (k, k / 2, 2.0 * k, "x", [k, (k,)])
        assert other["t"].tolist() == [float(k)] * 2 and other["t"].device.type == "cpu"


def test_objects_within_a_group() -> None:
    for mesh in (TP, DP):
        found: list[Any] = [None] * 2
        dist.all_gather_object(found, dist.get_rank(), group=_group(mesh))
        assert found == mesh[0]


def test_objects_from_one_rank() -> None:
    r = dist.get_rank()
    objs = [r, {"loss": (torch.ones((), device="xla") * r).item()}]
    dist.broadcast_object_list(objs, 2)
    assert objs == [2, {"loss": 2.0}]
    gathered: list[Any] = [None] * 4
    dist.gather_object(r, gathered, 0)
    assert gathered == [0, 1, 2, 3]


def test_numbers_and_tensors_of_sister_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has those of its own group; all had those of rank 0's."""
    group, r = _group(TP), dist.get_rank()
    found: list[Any] = [None] * 2
    monkeypatch.setattr(rank_payloads, "_seen", set())
    with pytest.warns(UserWarning, match="gives other ranks text made of a number that differs by rank"):
        dist.all_gather_object(found, {"n": r, "half": [r / 2], "t": torch.ones(2) * r, "name": f"rank {r}"}, group=group)
    assert [rank_numbers.own(found[1]["n"], k) for k in range(4)] == [1, 1, 3, 3]
    assert [rank_numbers.own(found[0]["half"][0], k) for k in range(4)] == [0.0, 0.0, 1.0, 1.0]
    eager.same(found[1]["t"].to("xla"), [torch.full((2,), float(v)) for v in (1, 1, 3, 3)])
    assert found[1]["name"] == "rank 0"
    mean = torch.ones((), device="xla") * (sum(f["n"] for f in found) / 2)
    eager.same(mean, [torch.tensor(v) for v in (0.5, 0.5, 2.5, 2.5)])


@pytest.mark.parametrize("source", [{"src": 1}, {"group_src": 1}, {"src": lambda r: r // 2 * 2 + 1}], ids=["plain", "place", "each"])
def test_objects_from_a_rank_of_each_group(source: dict[str, Any]) -> None:
    r = dist.get_rank()
    objs = [r, {"x": [r * 2]}]
    dist.broadcast_object_list(objs, group=_group(TP), **{k: v(r) if callable(v) else v for k, v in source.items()})
    assert [rank_numbers.own(objs[0], k) for k in range(4)] == [1, 1, 3, 3]
    assert [rank_numbers.own(objs[1]["x"][0], k) for k in range(4)] == [2, 2, 6, 6]


def test_objects_from_a_rank_of_another_group() -> None:
    with pytest.raises(ValueError, match=r"src=2 is not in the group \[0, 1\] of rank 0"):
        object_collectives.broadcast([1], [2] * 4, among=TP)


def test_numbers_that_are_scattered() -> None:
    out: list[Any] = [None]
    dist.scatter_object_list(out, [{"n": k, "t": torch.full((2,), k)} for k in range(4)], 0)
    assert [rank_numbers.own(out[0]["n"], k) for k in range(4)] == [0, 1, 2, 3]
    eager.same(out[0]["t"].to("xla"), [torch.full((2,), k) for k in range(4)])
    dist.scatter_object_list(out, [dist.get_rank() * 10 + k for k in range(2)], 1, group=_group(TP))
    assert [rank_numbers.own(out[0], k) for k in range(4)] == [10, 11, 30, 31]
    with pytest.raises(ValueError, match="rank 0 has to give a list of 4 objects, got None"):
        dist.scatter_object_list(out, None, 0)


def test_objects_cannot_differ_within_one_process() -> None:
    out: list[Any] = [None]
    dist.scatter_object_list(out, ["a"] * 4, 0)
    assert out == ["a"]
    with pytest.raises(NotImplementedError, match="one process runs for all ranks here"):
        dist.scatter_object_list(out, ["a", "b", "c", "d"], 0)


def test_barrier() -> None:
    assert dist.barrier() is None
    assert dist.barrier(async_op=True).wait()


# -- errors ---------------------------------------------------------------------------------------


def _x() -> torch.Tensor:
    return torch.zeros(4, 3, device="xla")


@pytest.mark.parametrize(
    ("use", "error", "text"),
    [
        (lambda: dist.all_reduce(torch.zeros(2)), Exception, "cpu|xla"),
        (lambda: dist.send(_x(), 1), NotImplementedError, "point-to-point transfers have no meaning.*xm.collective_permute"),
        (lambda: dist.recv(_x(), 1), NotImplementedError, "point-to-point transfers have no meaning"),
        (lambda: dist.all_to_all([_x()], [_x()]), ValueError, "in a group of 4 needs that many inputs and outputs, got 1 and 1"),
        (lambda: dist.all_to_all_single(_x(), _x(), [1, 1, 2, 0], [1, 1, 1, 1]), NotImplementedError, "pad them; .*use xm.collective_permute"),
        (lambda: dist.all_to_all_single(_x(), torch.zeros(6, 3, device="xla")), Exception, "does not divide|divide"),
        (lambda: dist.all_gather_into_tensor(torch.zeros(8, 3, device="xla"), _x()), Exception, "shape|size"),
        (lambda: dist.reduce_scatter_tensor(torch.zeros(3, 3, device="xla"), _x()), Exception, "shape|size"),
        (lambda: dist.new_group([0, 1], pg_options={"xla_pg_options": {"mesh": [[0, 1]]}}), ValueError, "leaves out this worker"),
        (lambda: dist.new_group([0, 3]), ValueError, "no line of the mesh"),
        (lambda: dist.all_reduce(_x(), dist.ReduceOp.BXOR), ValueError, "the xla backend has no reduction"),
    ],
)  # fmt: skip
def test_errors(use: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        use()


def test_a_list_that_the_first_rank_does_not_have() -> None:
    group: Any = dist.group.WORLD
    options = dist.ScatterOptions()
    options.rootRank = 1
    with pytest.raises(NotImplementedError, match="the first rank of this process has no input list.*pass the list on every rank"):
        group.scatter([_x()], [], options)


def test_a_world_that_is_larger_than_asked() -> None:
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="world_size"):
        xla_backend.ProcessGroupXla(None, 0, 8, None)
    dist.init_process_group("xla", rank=0, world_size=4)
    assert dist.get_world_size() == 4
