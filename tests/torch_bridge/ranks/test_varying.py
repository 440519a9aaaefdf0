"""Which mesh axes values vary over, and how tensors that differ among ranks are made, read, kept and moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm
from jax.sharding import PartitionSpec

import torch_bridge
from tests.torch_bridge.ranks import eager
from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.mesh import sharding, world
from torch_bridge.recorder import sharded
from torch_bridge.runtime import executor

TP = [[0, 1], [2, 3], [4, 5], [6, 7]]
DP = [[0, 2], [1, 3], [4, 6], [5, 7]]
ALL = [list(range(8))]


@pytest.fixture(autouse=True)
def cube(hosted: Hosted) -> None:
    hosted(8, pp=2, dp=2, tp=2)


def over(*axes: str) -> torch.Tensor:
    """A tensor that differs along these axes."""
    places = [world.coordinates(a) for a in axes]
    return sharded.from_ranks(lambda r: torch.arange(4.0) + sum(10**k * p[r] for k, p in enumerate(places)), axes)


AXES = {
    "shared": (lambda: torch.ones(4, device="xla") * 2, ()),
    "elementwise": (lambda: over("tp") + 1, ("tp",)),
    "union": (lambda: over("tp") * over("dp"), ("dp", "tp")),
    "reduction": (lambda: over("tp").sum(), ("tp",)),
    "rank": (lambda: torch.zeros((), device="xla") + world.rank(), ("pp", "dp", "tp")),
    "rank arithmetic": (lambda: torch.zeros((), device="xla") + world.rank() % 2, ("tp",)),
    "rank // 4": (lambda: torch.zeros((), device="xla") + world.rank() // 4, ("pp",)),
    "slice": (lambda: torch.arange(8.0, device="xla")[world.rank() : world.rank() + 1], ("pp", "dp", "tp")),
    "slice by tp": (lambda: torch.arange(8.0, device="xla")[world.rank() % 2 * 4 : world.rank() % 2 * 4 + 4], ("tp",)),
    "all_reduce tp": (lambda: xm.all_reduce("sum", over("tp"), groups=TP), ()),
    "all_reduce tp of dp, tp": (lambda: xm.all_reduce("sum", over("dp", "tp"), groups=TP), ("dp",)),
    "all_reduce dp of tp": (lambda: xm.all_reduce("sum", over("tp"), groups=DP), ("tp",)),
    "all_reduce everyone": (lambda: xm.all_reduce("max", over("pp", "dp", "tp")), ()),
    "all_reduce along no axis": (lambda: xm.all_reduce("sum", over("tp"), groups=[[0, 3], [1, 2], [4, 7], [5, 6]]), ("dp", "tp")),
    "all_gather": (lambda: xm.all_gather(over("tp", "pp"), 0, TP), ("pp",)),
    "reduce_scatter": (lambda: xm.reduce_scatter("sum", over("dp"), 1.0, 0, 2, TP), ("dp", "tp")),
    "reduce_scatter of shared": (lambda: xm.reduce_scatter("sum", torch.ones(4, device="xla"), 1.0, 0, 2, TP), ("tp",)),
    "all_to_all": (lambda: xm.all_to_all(over("dp"), 0, 0, 2, DP), ("dp",)),
    "permute": (lambda: xm.collective_permute(over("dp"), [[0, 1]]), ("pp", "dp", "tp")),
    "broadcast": (lambda: _broadcast(over("tp", "dp") + 0), ()),
    "where": (lambda: torch.where(over("tp") > 5, 1.0, 0.0), ("tp",)),
    "matmul": (lambda: over("dp").reshape(2, 2) @ over("tp").reshape(2, 2), ("dp", "tp")),
    "in place": (lambda: torch.zeros(4, device="xla").add_(over("tp")), ("tp",)),
    "overwritten": (lambda: (over("tp") + 0).copy_(torch.ones(4, device="xla")), ()),
    "zeroed": (lambda: over("tp").zero_(), ()),
    "a part overwritten": (lambda: _write_half(over("tp")), ("tp",)),
    "clone": (lambda: over("tp").clone(), ("tp",)),
    "cast": (lambda: over("tp").to(torch.bfloat16), ("tp",)),
    "view": (lambda: over("tp").view(2, 2).t(), ("tp",)),
    "empty_like": (lambda: torch.zeros_like(over("tp")), ()),
}  # fmt: skip


def _broadcast(t: torch.Tensor) -> torch.Tensor:
    xm.collective_broadcast([t])
    return t


def _write_half(t: torch.Tensor) -> torch.Tensor:
    t[:2] = 1.0
    return t


def test_axes() -> None:
    made = {name: make() for name, (make, _) in AXES.items()}
    assert {name: sharded.varying(t).axes for name, t in made.items()} == {name: axes for name, (_, axes) in AXES.items()}


def test_how_a_tensor_lies_on_the_mesh() -> None:
    x = sharded.from_ranks(lambda r: torch.full((2, 3), float(r % 2)), ("tp",), dim=1)
    found = torch_bridge.varying(x)
    assert found == (("tp",), PartitionSpec(None, "tp"), (2, 3), (2, 6))
    assert str(found) == f"shape [2, 3], different along tp: [2, 6] sharded as {found.spec}"
    assert str(sharded.varying(torch.ones(2, device="xla"))) == "shape [2], the same on all ranks"
    two = sharded.varying(over("tp", "dp"))
    assert two.spec == PartitionSpec(("dp", "tp")) and two.global_shape == (16,)
    number = sharded.varying(over("tp").sum())
    assert number.local_shape == () and number.axes == ("tp",)
    assert sharded.varying(over("tp").view(2, 2)[0]).local_shape == (2,)


def test_from_ranks_asks_once_for_each_place() -> None:
    asked: list[int] = []

    def of(r: int) -> torch.Tensor:
        asked.append(r)
        return torch.tensor([r // 2 % 2])

    x = sharded.from_ranks(of, ("dp",))
    assert asked == [0, 2] and [s.item() for s in sharded.shards(x)] == [0, 0, 1, 1] * 2


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)], ids=str)
def test_values_of_ranks_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = eager.each(lambda r: (torch.randn(shape, generator=torch.Generator().manual_seed(r)) * 3).to(dtype))
    eager.same(sharded.from_ranks(lambda r: values[r]), values, 0, 0)


def test_errors_of_from_ranks() -> None:
    with pytest.raises(
        ValueError, match=r"every rank needs a tensor of the same shape and dtype, got torch.float32\[1\] and torch.float32\[2\]"
    ):
        sharded.from_ranks(lambda r: torch.zeros(1 + r % 2), ("tp",))
    with pytest.raises(ValueError, match="same shape and dtype"):
        sharded.from_ranks(lambda r: torch.zeros(1, dtype=[torch.int32, torch.int64][r % 2]), ("tp",))
    with pytest.raises(TypeError, match="expected a tensor on xla, got one on cpu: a CPU tensor is the same for all ranks"):
        sharded.shards(torch.zeros(1))
    with pytest.raises(TypeError, match="expected a tensor on xla"):
        sharded.varying(torch.zeros(1))


# -- labels that stay -------------------------------------------------------------------------------


def test_a_parameters_label_stays_over_steps() -> None:
    """The blocks of a row-parallel weight lie side by side along dim 1, whatever computes its updates."""
    values = eager.each(lambda r: torch.randn(3, 2, generator=torch.Generator().manual_seed(r % 2)))
    w = torch.nn.Parameter(sharded.from_ranks(lambda r: values[r], ("tp",), dim=1))
    assert sharded.varying(w).spec == PartitionSpec(None, "tp")
    optimizer = torch.optim.AdamW([w], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (w**2).sum().backward()
        optimizer.step()
        xm.mark_step()
        assert sharded.varying(w).spec == PartitionSpec(None, "tp")
    with torch.no_grad():
        w.zero_()
        w.add_(1)
    assert sharded.varying(w).spec == PartitionSpec(None, "tp")
    whole = w._storage.array  # type: ignore[attr-defined]
    assert whole.shape == (3, 4)


def test_expect_declares_a_label() -> None:
    w = torch.nn.Parameter(torch.zeros(2, 4, device="xla"))
    sharded.expect(w, ("tp",), dim=1)
    with torch.no_grad():
        w.add_(world.rank() % 2)
    xm.mark_step()
    found = sharded.varying(w)
    assert found.axes == ("tp",) and found.spec == PartitionSpec(None, "tp") and found.global_shape == (2, 8)
    eager.same(w, eager.each(lambda r: torch.full((2, 4), float(r % 2))))
    with torch.no_grad():
        w.add_(world.rank() // 2 % 2)
    assert set(sharded.varying(w).axes) == {"tp", "dp"}
    eager.same(w, eager.each(lambda r: torch.full((2, 4), float(r % 2 + r // 2 % 2))))


def test_state_of_an_optimizer_varies_as_its_gradients() -> None:
    w = torch.nn.Parameter(over("tp"))
    optimizer = torch.optim.AdamW([w], lr=0.1)
    (w * 2).sum().backward()
    optimizer.step()
    assert sharded.varying(optimizer.state[w]["exp_avg"]).axes in ((), ("tp",))
    (w**2).sum().backward()
    optimizer.step()
    assert sharded.varying(optimizer.state[w]["exp_avg"]).axes == ("tp",)


# -- other axes -------------------------------------------------------------------------------------


def test_changing_axes_keeps_every_ranks_values() -> None:
    values = eager.each(lambda r: torch.tensor([float(r), 2.0 * r]))
    own = eager.on_xla(values)
    tp = over("tp")
    kept = eager.each(lambda r: torch.arange(4.0) + r % 2)
    shared = torch.arange(3.0, device="xla")
    pending = own * 3
    number = (torch.zeros((), device="xla") + world.rank()) * 2
    for axes in ({"dp": 8}, {"dp": 2, "tp": 4}, {"pp": 4, "tp": 2}, {"dp": 4, "cp": 1, "tp": 2}):
        world.set_axes(axes)
        eager.same(own, values)
        eager.same(tp, kept)
        eager.same(shared, torch.arange(3.0))
        eager.same(pending, [v * 3 for v in values])
        eager.same(number, eager.each(lambda r: torch.tensor(2.0 * r)))
        eager.same(own + tp[:2], [v + k[:2] for v, k in zip(values, kept, strict=True)])


def test_a_value_varies_over_the_axes_that_lie_as_its_old_ones() -> None:
    tp, both = over("tp"), over("dp", "tp")
    world.set_axes({"pp": 2, "dp": 1, "ep": 2, "tp": 2})
    assert sharded.varying(tp * 1).axes == ("tp",) and sharded.varying(both * 1).axes == ("ep", "tp")
    world.set_axes({"pp": 2, "tp": 4})
    assert sharded.varying(both * 1).axes == ("tp",)


def test_another_order_keeps_every_ranks_values() -> None:
    values = eager.each(lambda r: torch.tensor([float(r), 2.0 * r]))
    own, tp = eager.on_xla(values), over("tp")
    kept = eager.each(lambda r: torch.arange(4.0) + r % 2)
    host = own.cpu()
    for axes, order in (
        ({"dp": 2, "tp": 4}, (0, 2, 4, 6, 1, 3, 5, 7)),
        ({"pp": 2, "dp": 2, "tp": 2}, (7, 6, 5, 4, 3, 2, 1, 0)),
        ({"dp": 8}, None),
    ):
        world.set_axes(axes, order)
        eager.same(own, values)
        eager.same(tp, kept)
        eager.same(host.to("xla") * 2, [v * 2 for v in values])
        eager.same(torch.zeros(2, device="xla") + world.rank(), eager.each(lambda r: torch.full((2,), float(r))))
        eager.same(own + tp[:2], [v + k[:2] for v, k in zip(values, kept, strict=True)])
        eager.same(xm.all_reduce("sum", own), torch.tensor([28.0, 56.0]))
        eager.same(sharded.from_ranks(lambda r: torch.tensor(r)), eager.each(torch.tensor))
    with pytest.raises(ValueError, match="order must name each of the 8 ranks once"):
        world.set_axes({"dp": 8}, (0, 0, 1, 2, 3, 4, 5, 6))


def test_a_label_on_axes_that_are_gone() -> None:
    """A parameter that is known to differ along tp, in a world that has no tp any more."""
    w = torch.nn.Parameter(over("tp"))
    world.set_axes({"dp": 8})
    with torch.no_grad():
        w.mul_(2)
    xm.mark_step()
    eager.same(w, eager.each(lambda r: 2 * (torch.arange(4.0) + r % 2)))


def test_another_size_of_world() -> None:
    shared = torch.arange(3.0, device="xla")
    own = over("tp")
    executor.sync()
    world.configure(world.World(4))
    eager.same(shared + 1, torch.arange(3.0) + 1)
    with pytest.raises(RuntimeError, match="differs among 8 ranks cannot be used in a world of 4"):
        (own + 1).cpu()


# -- the host ---------------------------------------------------------------------------------------


def test_a_copy_on_the_cpu_remembers_the_ranks() -> None:
    values = eager.each(lambda r: torch.tensor([float(r), -1.0]))
    x = eager.on_xla(values)
    host = x.cpu()
    assert host.tolist() == [0.0, -1.0]
    eager.same(host.to("xla"), values)
    eager.same(torch.zeros(2, device="xla").copy_(host), values)
    eager.same(host.detach().to("xla"), values)
    eager.same(x[0].cpu().to("xla"), [v[0] for v in values])
    eager.same(host[:1].to("xla"), [v[:1] for v in values])
    assert sharded.varying(host[:1].to("xla")).axes == sharded.varying(x).axes


@pytest.mark.parametrize(
    "write", [lambda t: t.add_(1), lambda t: t.data.add_(1), lambda t: t[0].fill_(1), lambda t: t.mul_(t.sum())], ids=range(4)
)
def test_a_copy_may_be_written(write: Any) -> None:
    """Each rank's is written, and what it was copied from stays."""
    values = eager.each(lambda r: torch.tensor([float(r), -1.0]))
    x = eager.on_xla(values)
    host = x.cpu()
    write(host)
    expected = [v.clone() for v in values]
    for v in expected:
        write(v)
    eager.same(host.to("xla"), expected)
    eager.same(x, values)


def test_an_array_of_a_copy_is_the_first_ranks() -> None:
    """numpy computes once, and its array does not write to the tensor, of which other ranks have their own."""
    values = eager.each(lambda r: torch.tensor([float(r), -1.0]))
    host = eager.on_xla(values).cpu()
    array = host.numpy()
    array += 1
    assert array.tolist() == [1.0, 0.0]
    eager.same(host.to("xla"), values)


def test_computing_with_copies() -> None:
    """Losses that are gathered on the CPU, tokens that are appended there: each rank goes on with its own."""
    values = eager.each(lambda r: torch.tensor([float(r), -1.0]))
    copies = [(eager.on_xla(values) * k).cpu() for k in range(3)]
    eager.same(torch.stack(copies).mean(0).to("xla"), [v * 1.0 for v in values])
    tokens = torch.cat([torch.zeros(1), copies[1]])
    eager.same(tokens.to("xla"), [torch.cat([torch.zeros(1), v]) for v in values])
    total = torch.zeros(2, device="xla")
    total += copies[2].double().sqrt().nan_to_num(0).float().to("xla")
    eager.same(total, [(v * 2).double().sqrt().nan_to_num(0).float() for v in values])


def test_a_module_goes_to_the_cpu_and_back() -> None:
    model = torch.nn.Linear(3, 2).to("xla")
    values = eager.each(lambda r: torch.randn(2, 3, generator=torch.Generator().manual_seed(r)))
    with torch.no_grad():
        model.weight.copy_(eager.on_xla(values))
    assert model.cpu().weight.device.type == "cpu"
    eager.same(model.to("xla").weight, values)


@pytest.mark.parametrize(
    ("name", "view"),
    [
        ("transposed", lambda x: x.t()), ("part", lambda x: x[1:]), ("column", lambda x: x[:, 1]), ("flat", lambda x: x.view(-1)),
        ("expanded", lambda x: x[:1].expand(4, 3)),
    ],
)  # fmt: skip
def test_a_copy_of_a_view_on_the_cpu_remembers_the_ranks(name: str, view: Any) -> None:
    values = eager.each(lambda r: torch.arange(6.0).reshape(2, 3) + r)
    x = eager.on_xla(values)
    eager.same(view(x).cpu().to("xla"), [view(v) for v in values])


def test_specs_of_nothing() -> None:
    assert sharding.spec_for(()) == PartitionSpec() and sharding.axes_of(PartitionSpec()) == frozenset()
    assert sharding.global_shape((), PartitionSpec("tp")) == (2,)
    assert sharding.global_shape((2, 3), PartitionSpec(None, ("dp", "tp"))) == (2, 12)
