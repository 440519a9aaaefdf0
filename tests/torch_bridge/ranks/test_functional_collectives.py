"""torch's functional collectives of xla tensors, on hosted worlds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from tests.torch_bridge.ranks import eager, exchanges
from torch_bridge.collectives import backend  # noqa: F401  (it registers backend "xla")
from torch_bridge.mesh import world

ALL = [[0, 1, 2, 3]]
TP = [[0, 1], [2, 3]]


@pytest.fixture(autouse=True)
def four_ranks() -> Iterator[None]:
    world.configure(world.World(4))
    dist.init_process_group("xla")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has given them other names
        yield
    dist.destroy_process_group()
    world.configure(None)


def test_values() -> None:
    values = eager.each(lambda r: torch.arange(8.0) + r)
    x = eager.on_xla(values)
    group = dist.group.WORLD
    pair = dist.new_group(TP[0])
    ops = torch.ops._c10d_functional
    in_place = x.clone()
    ops.all_reduce_(in_place, "sum", group.group_name)
    total = exchanges.all_reduce("sum", values, ALL)
    wanted = [
        (funcol.all_reduce(x, "sum", group), total),
        (funcol.all_reduce(x, "avg", group), [v / 4 for v in total]),
        (funcol.all_reduce(x, "max", pair), exchanges.all_reduce("max", values, TP)),
        (ops.wait_tensor(ops.all_reduce(x, "product", "")), exchanges.all_reduce("mul", values, ALL)),
        (in_place, total),
        (funcol.all_reduce_coalesced([x, x], "sum", pair)[1], exchanges.all_reduce("sum", values, TP)),
        (funcol.all_gather_tensor(x.reshape(2, 4), 1, pair), exchanges.all_gather([v.reshape(2, 4) for v in values], TP, 1)),
        (funcol.reduce_scatter_tensor(x, "sum", 0, group), exchanges.reduce_scatter("sum", values, ALL, 0)),
        (funcol.all_to_all_single(x, None, None, group), eager.each(lambda r: torch.cat([v[2 * r : 2 * r + 2] for v in values]))),
        (funcol.broadcast(x, 3, group), [values[3]] * 4),
    ]
    for found, expected in wanted:
        eager.same(found, expected)


def test_gradients() -> None:
    """The sum over ranks of all losses' gradients."""
    values = eager.each(lambda r: torch.arange(4.0) + r)
    x = eager.on_xla(values).requires_grad_()
    gathered = funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    (gathered * gathered).sum().backward()
    assert x.grad is not None
    eager.same(x.grad, [8.0 * v for v in values])


def test_errors() -> None:
    x = torch.ones(4, device="xla")
    with pytest.raises(ValueError, match="no reduction 'premul_sum'; use sum, avg"):
        funcol.all_reduce(x, "premul_sum", dist.group.WORLD)
    with pytest.raises(NotImplementedError, match=r"uneven output_split_sizes=\[1, 1, 1, 2\].*pad them"):
        torch.ops._c10d_functional.all_to_all_single(torch.ones(5, device="xla"), [1, 1, 1, 2], [1, 1, 1, 2], dist.group.WORLD.group_name)
