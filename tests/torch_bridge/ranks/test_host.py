"""Values that differ among ranks on the host: ops that run there, printing, files, copies."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm

from tests.torch_bridge.ranks import eager
from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.mesh import world
from torch_bridge.recorder import fallback, first_rank_files, sharded


@pytest.fixture(autouse=True)
def four_ranks(hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    hosted(4, dp=2, tp=2)
    monkeypatch.setattr(first_rank_files, "_noted", False)


def values(*shape: int) -> list[torch.Tensor]:
    return eager.each(lambda r: torch.randn(shape, generator=torch.Generator().manual_seed(r)))


HOST = {
    "nonzero": lambda r, x: (x > x.median()).nonzero(),
    "masked_select": lambda r, x: x[x > x.flatten().sort().values[7]],
    "unique": lambda r, x: torch.unique((torch.arange(6, device=x.device) + r) % 6),
    "unique with counts": lambda r, x: torch.unique(
        (torch.arange(6, device=x.device) + r) // 2 % 3, return_counts=True, return_inverse=True
    )[0],
    "bincount": lambda r, x: torch.bincount(torch.arange(8, device=x.device) % (5 - r % 1), minlength=9),
    "repeat_interleave": lambda r, x: x.detach()[0].repeat_interleave((torch.arange(5, device=x.device) + r) % 5 + 1),
    "where": lambda r, x: torch.where(x > x.median())[1],
    "index by mask": lambda r, x: x.detach()[(torch.arange(4, device=x.device) + r) % 4 < 2],
    "histc": lambda r, x: torch.histc(x.detach(), 4, -3, 3),
}


@pytest.mark.parametrize("name", HOST)
def test_ops_whose_shape_depends_on_values(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ops without a lowering say so
        eager.agree(HOST[name], values(4, 5))


def test_unequal_counts_are_refused() -> None:
    x = eager.on_xla(values(4, 5))
    with pytest.raises(
        RuntimeError, match=r"gives tensors of different shapes \[.*\] on different ranks \(at .*test_host.py:.*torch.where.*torchrun"
    ):
        (x > 0.3).nonzero()


def test_shared_values_go_through_the_host_once() -> None:
    x = torch.arange(6.0, device="xla")
    found = x[x > 2]
    assert sharded.varying(found).axes == () and found.tolist() == [3.0, 4.0, 5.0]


def test_in_place_ops_on_the_host() -> None:
    def put(r: Any, x: torch.Tensor) -> torch.Tensor:
        out = x.detach().clone()
        out.put_(torch.arange(3, device=x.device) + r, torch.ones(3, device=x.device))
        return out

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager.agree(put, values(2, 4))


def test_an_output_on_the_host_takes_the_size_of_the_result() -> None:
    own = values(4, 5)
    mask = torch.arange(20).view(4, 5) % 3 == 0
    out = torch.empty(0, device="xla")
    assert torch.masked_select(eager.on_xla(own), mask.to("xla"), out=out) is out
    eager.same(out, [v.masked_select(mask) for v in own])


def test_an_op_without_a_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank's own result, and one warning."""
    monkeypatch.setattr(fallback, "_WARNED", set())
    own = values(6)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        out = fallback.on_host(torch.ops.aten.cumsum.default, (eager.on_xla(own), 0), {})
        fallback.on_host(torch.ops.aten.cumsum.default, (eager.on_xla(own), 0), {})
    eager.same(out, [v.cumsum(0) for v in own])
    assert sum("no JAX lowering" in str(w.message) for w in found) == 1


def test_values_of_the_host() -> None:
    x = eager.on_xla(values(2, 3))
    first = values(2, 3)[0]
    assert torch.equal(x.cpu(), first) and x.tolist() == first.tolist() and (x.numpy(force=True) == first.numpy()).all()
    assert repr(x) == repr(first)[:-1] + ", device='xla:0')"
    assert f"{x[0, 0]:.3f}" == f"{first[0, 0]:.3f}" and f"{x.sum()}" == f"{first.sum()}"
    assert torch.equal(x.to("cpu", torch.float64), first.double())
    assert torch.allclose(x, x) and torch.equal(x, x)


def test_comparisons_answer_for_the_first_rank() -> None:
    x = torch.zeros(2, device="xla") + world.rank()
    assert torch.equal(x, torch.zeros(2, device="xla")) in (True, False)
    assert bool((x == 0).all()) and not bool((x == 1).all())


@pytest.mark.parametrize("trip", ["pickle", "torch.save", "deepcopy", "copy"])
def test_copies_of_tensors(trip: str) -> None:
    own = values(2, 3)
    x = sharded.from_ranks(lambda r: own[r], dim=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = _copied(x, trip)
    expected = own[0] if trip in ("pickle", "torch.save") else own
    eager.same(y, expected)


def _copied(x: torch.Tensor, trip: str) -> torch.Tensor:
    if trip == "pickle":
        return pickle.loads(pickle.dumps(x))
    elif trip == "torch.save":
        buffer = io.BytesIO()
        torch.save(x, buffer)
        buffer.seek(0)
        return torch.load(buffer)
    return getattr(copy, trip)(x)


def test_files_hold_the_first_ranks_values() -> None:
    """One process writes one file: what rank 0 alone would write."""
    x = eager.on_xla(values(3))
    buffer = io.BytesIO()
    with pytest.warns(
        UserWarning, match=r"shape \[3\], different along dp, tp.*saved as rank 0 holds it.*save_checkpoint keeps all of them"
    ):
        xm.save({"x": x, "rank": world.rank(), "loss": x.sum().item()}, buffer, master_only=False)
    xm.save({"x": x}, io.BytesIO(), master_only=False)  # said once
    buffer.seek(0)
    found = torch.load(buffer, weights_only=False)
    assert torch.equal(found["x"], values(3)[0]) and found["rank"] == 0 and type(found["rank"]) is int and type(found["loss"]) is float


def test_what_only_the_master_saves_is_the_first_ranks() -> None:
    """As it is with a process for each rank: statistics of batch norms, which differ by rank, are not worth a word."""
    layer = torch.nn.BatchNorm1d(3).to("xla")
    layer(eager.on_xla([v.reshape(1, 3) + torch.arange(2.0)[:, None] for v in values(3)]))
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        xm.save(layer.state_dict(), buffer)
    buffer.seek(0)
    alone = torch.nn.BatchNorm1d(3)
    alone(values(3)[0].reshape(1, 3) + torch.arange(2.0)[:, None])
    torch.testing.assert_close(torch.load(buffer), alone.state_dict())


def test_loading_gives_every_rank_the_same() -> None:
    model = torch.nn.Linear(3, 2).to("xla")
    with torch.no_grad():
        model.weight.copy_(eager.on_xla(values(2, 3)))
    buffer = io.BytesIO()
    with pytest.warns(UserWarning, match="the other ranks' values are not in the file"):
        torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    model.load_state_dict(torch.load(buffer, map_location="cpu"))
    eager.same(model.weight, values(2, 3)[0])


def test_state_of_modules_and_optimizers() -> None:
    class Net(torch.nn.Module):
        def __init__(self, fill: float) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(sharded.from_ranks(lambda r: torch.full((2, 3), fill + r % 2), ("tp",), dim=1))

    model = Net(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    (model.weight**2).sum().backward()
    optimizer.step()
    twin = Net(5.0)
    twin.load_state_dict(model.state_dict())
    other = torch.optim.AdamW(twin.parameters(), lr=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    eager.same(twin.weight, sharded.shards(model.weight.detach()))
    moments = sharded.shards(optimizer.state[model.weight]["exp_avg"])
    assert not torch.equal(moments[0], moments[1])
    eager.same(other.state[twin.weight]["exp_avg"], moments)
    for m, o in ((model, optimizer), (twin, other)):
        o.zero_grad()
        (m.weight**2).sum().backward()
        o.step()
    eager.same(twin.weight, sharded.shards(model.weight.detach()))
    copied = copy.deepcopy(model)
    assert sharded.varying(copied.weight).spec == sharded.varying(model.weight).spec
    eager.same(copied.weight, sharded.shards(model.weight.detach()))


def test_numpy_of_a_loader_and_lists() -> None:
    x = torch.tensor([[1, 2], [3, 4]], device="xla") + world.rank()
    assert [row.tolist() for row in x] == [[1, 2], [3, 4]] and len(x) == 2
    assert [int(v) for v in x.flatten()] == [1, 2, 3, 4] and max(x.flatten().tolist()) == 4
