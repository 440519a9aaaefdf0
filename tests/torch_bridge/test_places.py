"""Tensors at places of the mesh: ops run where their inputs lie, and numbers are those of the whole mesh."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import nn

from tests.torch_bridge.ranks.conftest import Hosted, hosted  # noqa: F401
from torch_bridge.mesh import places, world
from torch_bridge.mesh.places import HERE, Place, along
from torch_bridge.passes.place_nodes import place
from torch_bridge.recorder import placed, sharded
from torch_bridge.runtime import session

A, B = Place("a"), Place("b")


class Op:
    """Stands for an entry: a call with this many results."""

    def __init__(self, n_outs: int = 1):
        self.n_outs = n_outs


# -- where nodes run ------------------------------------------------------------------------------


def test_a_node_runs_where_its_inputs_lie() -> None:
    nodes = [(Op(), -1, -2), (Op(), 0, -3), (Op(2), -3), (Op(), 2, 1)]
    assert place(nodes, [A, None, B], [4]) == [A, HERE, B, B]


def test_what_lies_nowhere_is_computed_where_it_is_needed() -> None:
    nodes = [(Op(),), (Op(), 0), (Op(), 1, -1), (Op(),), (Op(), 3, -1), (Op(), 3, -2), (Op(),)]
    assert place(nodes, [A, B], [2, 4, 5, 6]) == [A, A, A, HERE, A, B, HERE]


def test_what_lies_nowhere_and_is_asked_for_is_computed_at_home() -> None:
    nodes = [(Op(),), (Op(), 0), (Op(), 0, -1), (Op(),), (Op(), 3, -1), (Op(), 3, -2)]
    assert place(nodes, [A, B], [1, 2, 4, 5], A) == [A, A, A, HERE, A, B]
    assert place(nodes[:2], [], [1], B) == [B, B] and place(nodes[:2], [], [1]) == [HERE, HERE]


def test_the_mesh_of_the_world_is_at_every_place() -> None:
    """A value of two places lies on the whole mesh; what is made of it and of a place's tensor is at that place."""
    nodes = [(Op(), -1, -2), (Op(), 0, -1), (Op(), 0, -2), (Op(), 0)]
    assert place(nodes, [A, B], [1, 2, 3]) == [HERE, A, B, HERE]


def test_a_collective_with_ranks_elsewhere_is_on_the_mesh_of_the_world(hosted: Hosted) -> None:  # noqa: F811
    """Also if only one place needs what it gives, as in one of several processes, whose stage scales its gradients by the norm of all."""
    hosted(4, pp=2, tp=2)
    x = placed.moved(torch.ones(3).to("xla"), along("pp", 1))
    total = xm.all_reduce("sum", torch.full((3,), 2.0).to("xla"), groups=[[0, 2], [1, 3]])
    own = xm.all_reduce("sum", torch.full((3,), 2.0).to("xla"), groups=[[0, 1], [2, 3]])
    y = x * total + own
    del total, own
    torch_xla.sync()
    assert devices(y) == {2, 3} and y.tolist() == [8, 8, 8]
    assert {p.spec.part.place for p in session.current().recent if p.executions} >= {HERE, along("pp", 1)}


# -- tensors --------------------------------------------------------------------------------------


def devices(t: torch.Tensor) -> set[int]:
    """The devices that hold a tensor, which is computed first."""
    sharded.varying(t)
    return {d.id for d in t._storage.held.sharding.device_set}  # type: ignore[attr-defined]


def test_moving_there_and_back(hosted: Hosted) -> None:  # noqa: F811
    hosted(8, pp=2, dp=2, tp=2)
    x = sharded.from_ranks(lambda r: torch.full((2, 3), float(r)), ("pp", "tp"))
    first, second = (placed.moved(x, along("pp", k)) for k in range(2))
    assert (devices(x), devices(first), devices(second)) == (set(range(8)), {0, 1, 2, 3}, {4, 5, 6, 7})
    assert placed.place_of(first) == along("pp", 0) and placed.place_of(x) is None
    seen = [[s[0, 0].item() for s in sharded.shards(t)] for t in (x, first, second)]
    assert seen[0] == [0, 1, 0, 1, 4, 5, 4, 5] or seen[0] == [float(r) for r in range(8)]
    back = placed.moved(second, HERE)
    assert devices(back) == set(range(8))
    assert [s[0, 0].item() for s in sharded.shards(back)] == seen[2] == [s[0, 0].item() for s in sharded.shards(x)][4:] * 2


def test_what_a_place_has_of_an_array_is_found_once(hosted: Hosted) -> None:  # noqa: F811
    """A mask that every micro-batch reads is looked at once, also if somebody takes its buffer over in between; nothing of it stays when it goes."""
    hosted(8, pp=2, dp=2, tp=2)
    x = sharded.from_ranks(lambda r: torch.full((2, 3), float(r)), ("pp", "tp"))
    mesh = along("pp", 1).mesh
    assert mesh is not None
    array = x._storage.array  # type: ignore[attr-defined]
    first = places.put(array, mesh)
    assert places.put(array, mesh) is first
    first.delete()
    kept = len(places._PARTS._found)
    del first, array, x
    gc.collect()
    assert len(places._PARTS._found) < kept


def test_what_reads_nothing_is_computed_at_home(hosted: Hosted) -> None:  # noqa: F811
    """In a pass of a stage: its rotary tables, say. Afterwards such values are those of all ranks again."""
    hosted(4, pp=2, tp=2)
    placed.compute_at(along("pp", 1))
    x = torch.arange(4, device="xla").float().cos()
    torch_xla.sync()
    y = torch.arange(4, device="xla").float().cos()
    assert devices(x) == {2, 3} and devices(y) == {0, 1, 2, 3}
    torch.testing.assert_close(x.cpu(), torch.arange(4).float().cos())


def test_a_tensor_of_a_place_of_an_earlier_layout(hosted: Hosted) -> None:  # noqa: F811
    """All ranks have the value of the rank there that was in the same place along the other axes, whichever axes they have now."""
    hosted(8, pp=2, dp=2, tp=2)
    x = sharded.from_ranks(lambda r: torch.full((2,), float(r)), ("pp", "tp"))
    there = placed.moved(x, along("pp", 1))
    expected = [s[0].item() for s in sharded.shards(placed.moved(there, HERE))]
    world.set_axes({"pp": 4, "tp": 2})
    assert [s[0].item() for s in sharded.shards(there)] == expected
    assert [s[0].item() for s in sharded.shards(there + 1)] == [x + 1 for x in expected] and len(set(expected)) == 2


def test_what_is_computed_stays_where_it_is(hosted: Hosted) -> None:  # noqa: F811
    hosted(4, pp=2, tp=2)
    w = sharded.from_ranks(lambda r: torch.full((3,), 1.0 + r % 2), ("tp",))
    at = along("pp", 1)
    placed.move_(w, at)
    y = xm.all_reduce("sum", w * torch.arange(3.0).to("xla") + 1, groups=[[0, 1], [2, 3]])
    w.mul_(2)
    assert placed.place_of(y) == placed.place_of(w) == at
    torch_xla.sync()
    assert devices(y) == devices(w) == {2, 3} and y.tolist() == [2, 5, 8]
    assert [p.spec.part.place for p in session.current().recent if p.executions and p.spec.part.place != HERE][-1] == at


def test_tables_and_draws_of_ranks_are_those_of_the_place(hosted: Hosted) -> None:  # noqa: F811
    hosted(4, pp=2, tp=2)
    x = torch.zeros(2).to("xla") + xm.get_ordinal()
    y = placed.moved(torch.zeros(2).to("xla"), along("pp", 1))
    y = y + xm.get_ordinal()
    torch_xla.sync()
    assert [s[0].item() for s in sharded.shards(x)] == [0, 1, 2, 3]
    assert [s[0].item() for s in sharded.shards(y)] == [2, 3, 2, 3]


def train(
    where: list[int] | None, optimizer_class: type = torch.optim.AdamW, **options: object
) -> tuple[list[float], list[np.ndarray], Any]:
    """Losses, weights and model of three steps with gradients cut between layers, the layers at these pp ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1)).to("xla")
    if where is not None:
        for k, layer in zip(where, (0, 2, 4), strict=True):
            for p in model[layer].parameters():
                placed.move_(p, along("pp", k))
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
    x = torch.randn(5, 6).to("xla")
    losses = []
    for step in range(3):
        hidden = x * (step + 1)
        outs = []
        for k, layer in enumerate(model):
            if where is not None and k in (0, 2, 4):
                hidden = hidden.detach() if k else hidden
                hidden = placed.moved(hidden, along("pp", where[k // 2])).requires_grad_()
            elif where is None and k in (0, 2, 4):
                hidden = hidden.detach().requires_grad_()
            outs.append((hidden, layer(hidden)))
            hidden = outs[-1][1]
        loss = hidden.square().mean()
        loss.backward()
        grad = outs[4][0].grad
        grad = grad if where is None else placed.moved(grad, along("pp", where[1]))
        outs[3][1].backward(grad)
        grad = outs[2][0].grad
        grad = grad if where is None else placed.moved(grad, along("pp", where[0]))
        outs[1][1].backward(grad)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        xm.mark_step()
        losses.append(loss.item())
    return losses, [p.detach().cpu().numpy() for p in model.parameters()], model


@pytest.mark.core(keep=2)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.Adam, {"fused": True}),
    ],
    ids=["AdamW", "SGD", "Adagrad", "RMSprop", "AdamW one by one", "Adam fused"],
)
def test_an_optimizer_over_several_places(hosted: Hosted, kind: type, options: dict[str, object]) -> None:  # noqa: F811
    hosted(4, pp=2, tp=2)
    losses, weights, _ = train(None, kind, **options)
    found, moved, model = train([0, 1, 1], kind, **options)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for a, b in zip(moved, weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)
    assert [devices(p) for p in model.parameters()] == [{0, 1}, {0, 1}, {2, 3}, {2, 3}, {2, 3}, {2, 3}]


def test_a_state_lies_where_its_parameter_does(hosted: Hosted) -> None:  # noqa: F811
    hosted(4, pp=2, tp=2)
    layer = nn.Linear(3, 3).to("xla")
    for p in layer.parameters():
        placed.move_(p, along("pp", 1))
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(placed.moved(torch.ones(2, 3).to("xla"), along("pp", 1))).sum().backward()
    optimizer.step()
    xm.mark_step()
    assert {frozenset(devices(t)) for s in optimizer.state.values() for n, t in s.items() if n != "step"} == {frozenset({2, 3})}


def test_a_collective_over_ranks_that_have_no_value(hosted: Hosted) -> None:  # noqa: F811
    hosted(4, pp=2, tp=2)
    x = placed.moved(torch.ones(3).to("xla"), along("pp", 0))
    y = xm.all_reduce("sum", x)
    with pytest.raises(NotImplementedError, match=r"names ranks along pp, and its tensor lies at 'pp 0' alone \(a pipeline stage, say\)"):
        torch_xla.sync()
    assert y is not None and x.tolist() == [1, 1, 1]


def test_no_such_place(hosted: Hosted) -> None:  # noqa: F811
    hosted(4, pp=2, tp=2)
    with pytest.raises(ValueError, match="no ranks at index 2 of axis 'pp' of the mesh"):
        along("pp", 2)
    assert not places.in_use() or world.size() == 4
