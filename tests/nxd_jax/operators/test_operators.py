"""argmax and top-k of divided tensors are those of the whole: ties, NaN, dims, dtypes, stages, gradients, and graphs made of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import torch_bridge
from nxd_jax.operators import argmax, shards
from nxd_jax.operators.topk import topk
from nxd_jax.parallel_layers import parallel_state
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.parallel_layers.parts import own, per_rank, tp_groups, tp_place

NAN, INF = math.nan, math.inf
SHAPES = {"one": (16,), "two": (3, 24), "three": (2, 3, 16)}
"""Of the whole tensor; its last dim is divided."""


def whole(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Few different values, so that there are ties within parts and between them."""
    return torch.randint(0, 5, shape).to(dtype)


def divided(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Every rank's part of a tensor."""
    tp = parallel_state.get_tensor_model_parallel_size()
    world = sum(len(g) for g in tp_groups())
    return own([x.chunk(tp, dim)[tp_place(r)].contiguous() for r in range(world)])


def best(x: torch.Tensor, k: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest along a dim, the first of equal ones first: a stable sort of the whole."""
    values, places = torch.sort(x, dim=dim, descending=True, stable=True)
    return values.narrow(dim, 0, k), places.narrow(dim, 0, k)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    for value in per_rank(found):
        torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.core(keep=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_argmax(nxd: Nxd, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    nxd(8, tp=4)
    x = whole(shape, dtype)
    mine, last = divided(x), len(shape) - 1
    kept = argmax(mine, -1, -1, keepdim=True)
    for found in [argmax(mine, dim, gather_dim) for dim, gather_dim in ((-1, -1), (last, -1), (-1, last))]:
        assert found.dtype == torch.int64
        same(found, best(x, 1, -1)[1].squeeze(-1))
    same(kept, best(x, 1, -1)[1])


@pytest.mark.thorough(keep=9)
@pytest.mark.core(keep=3)
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_topk(nxd: Nxd, shape: tuple[int, ...], dtype: torch.dtype, stages: int) -> None:
    """k may be more than a rank has."""
    nxd(8, tp=8)
    x = whole(shape, dtype)
    mine = divided(x)
    sizes = (1, 5, shape[-1])
    found = [topk(mine, k, dim=-1, gather_dim=len(shape) - 1, stages=stages) for k in sizes]
    for k, (values, places) in zip(sizes, found, strict=True):
        expected = best(x, k, -1)
        assert values.dtype == dtype and places.dtype == torch.int64
        same(values, expected[0])
        same(places, expected[1])


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("tp", [2, 6, 7, 12, 32, 64])
def test_topk_of_any_number_of_ranks(nxd: Nxd, tp: int, stages: int) -> None:
    nxd(tp, tp=tp)
    x = whole((2, 3 * tp))
    values, places = topk(divided(x), 8 if tp > 2 else 6, -1, -1, stages=stages, rank_id=None, use_topk_rotated_kernel=stages == 1, lnc=1)
    same(values, best(x, values.shape[-1], -1)[0])
    same(places, best(x, values.shape[-1], -1)[1])


def test_stages_meet_all_ranks(nxd: Nxd) -> None:
    nxd(64, tp=32)
    group = parallel_state.get_tensor_model_parallel_group()
    sizes = [[len(some._mesh[0]) for some in shards.sub_groups(group, stages)] for stages in (1, 2, 3)]
    assert sizes == [[32], [4, 8], [4, 2, 4]]
    first, second = shards.sub_groups(group, 2)
    assert (
        [0, 1, 2, 3] in first._mesh and [1, 5, 9, 13, 17, 21, 25, 29] in second._mesh and [33, 37, 41, 45, 49, 53, 57, 61] in second._mesh
    )


def test_another_dim_than_the_divided_one(nxd: Nxd) -> None:
    """The batch is divided: each rank's own results, side by side."""
    nxd(4, tp=4)
    x = whole((8, 6))
    same(argmax(divided(x, 0), dim=1, gather_dim=0), best(x, 1, 1)[1].squeeze(1))
    same(argmax(divided(x, 0), dim=1, gather_dim=0, keepdim=True), best(x, 1, 1)[1])
    for stages in (1, 2):
        values, places = topk(divided(x, 0), 3, dim=-1, gather_dim=0, stages=stages)
        same(values, best(x, 3, 1)[0])
        same(places, best(x, 3, 1)[1])


SPECIAL = {
    "NaN is largest, the first one counts": [1.0, INF, 2.0, NAN, 3.0, NAN, 0.0, 1.0],
    "all alike": [0.5] * 8,
    "nothing above -inf": [-INF] * 8,
    "the last rank has it": [0.0] * 7 + [1.0],
}


@pytest.mark.core(keep=2)
@pytest.mark.parametrize("values", SPECIAL.values(), ids=SPECIAL)
def test_special_values(nxd: Nxd, values: list[float]) -> None:
    nxd(4, tp=4)
    x = torch.tensor(values)
    same(argmax(divided(x), 0, 0), torch.argmax(x))
    found, places = topk(divided(x), 8, 0, 0, stages=2)
    expected = sorted(range(8), key=lambda i: (not math.isnan(values[i]), 0.0 if math.isnan(values[i]) else -values[i], i))
    same(places, torch.tensor(expected))
    same(found, x[expected])


def test_zeros_of_both_signs_are_equal(nxd: Nxd) -> None:
    nxd(4, tp=4)
    x = torch.tensor([-1.0, -0.0, 0.0, -0.0, -1.0, 0.0, 0.0, -0.0])
    same(argmax(divided(x), 0, 0), torch.tensor(1))


def test_other_groups(nxd: Nxd) -> None:
    """Along data parallel ranks, of which rank r has what its place in that group says."""
    nxd(8, tp=2)
    group = parallel_state.get_data_parallel_group()
    lists = parallel_state.get_data_parallel_group(as_list=True)
    x = whole((2, 12))
    mine = own([x.chunk(4, -1)[next(g.index(r) for g in lists if r in g)].contiguous() for r in range(8)])
    same(argmax(mine, -1, -1, process_group=group), best(x, 1, -1)[1].squeeze(-1))
    same(topk(mine, 4, -1, -1, process_group=group, stages=2)[1], best(x, 4, -1)[1])


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_a_group_of_one(nxd: Nxd, device: str) -> None:
    nxd(2, tp=1)
    x = whole((2, 3, 40))
    mine = x.to(device)
    found = [argmax(mine, 2, -1), argmax(mine, 1, 2, keepdim=True), *(topk(mine, 7, 2, 2, stages=stages)[1] for stages in (1, 2, 3))]
    expected = [best(x, 1, -1)[1].squeeze(-1), best(x, 1, 1)[1], *[best(x, 7, -1)[1]] * 3]
    for one, wanted in zip(found, expected, strict=True):
        assert torch.equal(one.cpu(), wanted)


@pytest.mark.parametrize("stages", [1, 3])
def test_gradients_of_values(nxd: Nxd, stages: int) -> None:
    nxd(8, tp=8)
    x = torch.randperm(32).float().reshape(2, 16).requires_grad_()
    weights = torch.tensor([1.0, 2.0, 3.0])
    (best(x, 3, -1)[0] * weights).sum().backward()
    mine = divided(x.detach()).requires_grad_()
    (topk(mine, 3, -1, -1, stages=stages)[0] * weights.to("xla")).sum().backward()
    for rank, grad in enumerate(per_rank(mine.grad)):
        torch.testing.assert_close(grad, x.grad.chunk(8, -1)[rank])
    assert not argmax(mine, -1, -1).requires_grad


class OnXla(torch.fx.Interpreter):
    """Runs a captured graph on xla tensors, constants of the graph included."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = super().call_function(target, args, kwargs)
        return found.to("xla") if isinstance(found, torch.Tensor) else found


def test_graphs(nxd: Nxd) -> None:
    """No value is read: a module that picks tokens can be captured."""

    class Picks(torch.nn.Module):
        def forward(self, logits: torch.Tensor) -> Any:
            return argmax(logits, -1, -1), *topk(logits, 3, -1, -1, stages=2)

    nxd(4, tp=4)
    graph = torch_bridge.capture(Picks(), torch.zeros(2, 5))
    targets = [str(node.target) for node in graph.graph.nodes]
    assert sum("all_gather" in t for t in targets) == 6  # a pair for argmax and for each stage
    x = whole((2, 20))
    picked, values, places = OnXla(graph).run(divided(x))
    same(picked, best(x, 1, -1)[1].squeeze(-1))
    same(values, best(x, 3, -1)[0])
    same(places, best(x, 3, -1)[1])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: argmax(x, 2, 1), IndexError, r"dim=2 is not a dim of a tensor of shape \[2, 3\]: use -2 to 1"),
        (lambda x: topk(x, 1, 1, -3), IndexError, r"gather_dim=-3 is not a dim of a tensor of shape \[2, 3\]"),
        (lambda x: topk(x, 13, 1, 1), ValueError, "k=13 must be between 0 and 12, the size of dim 1 over all ranks"),
        (lambda x: topk(x, 3, 0, 1), ValueError, "k=3 must be between 0 and 2"),
        (lambda x: topk(x, -1, 1, 1), ValueError, "k=-1 must be between"),
        (lambda x: topk(x, 1, 1, 1, stages=4), ValueError, "stages=4 must be 1, 2 or 3"),
    ],
)
def test_errors(nxd: Nxd, call: Any, error: type[Exception], text: str) -> None:
    nxd(4, tp=4)
    with pytest.raises(error, match=text):
        call(torch.zeros(2, 3, device="xla"))


def test_nothing_is_asked_for(nxd: Nxd) -> None:
    nxd(4, tp=4)
    values, places = topk(torch.zeros(2, 3, device="xla"), 0, 1, 1)
    assert values.shape == places.shape == (2, 0)
