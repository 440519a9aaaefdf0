"""What others do with gradients of shards: torch's clipping, and sums over ranks, as accelerate and scripts call them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm
from torch import nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP

from tests.torch_bridge.fsdp.models import batch, ids, nested, net
from tests.torch_bridge.ranks.conftest import Hosted


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_torchs_clipping_is_by_the_norm_of_whole_gradients(norm_type: float, hosted: Hosted) -> None:
    """Together with those of parameters that all ranks have whole."""
    expected = nn.ModuleList([net(), nn.Linear(1, 3)])
    (sum(expected[0](ids(0, rank)) for rank in range(4)) / 4).backward()
    expected[1](torch.ones(2, 1)).square().sum().backward()
    norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.3, norm_type).item()
    hosted(4)
    model = nested(net())
    added = nn.Linear(1, 3).to("xla")
    added.load_state_dict(expected[1].state_dict())
    params = [*model.parameters(), *added.parameters()]
    model(batch(0)).backward()
    added(torch.ones(2, 1, device="xla")).square().sum().backward()
    assert nn.utils.get_total_norm([p.grad for p in params if p.grad is not None], norm_type).item() == pytest.approx(norm, rel=1e-5)
    assert nn.utils.clip_grad_norm_(params, 0.3, norm_type, error_if_nonfinite=True).item() == pytest.approx(norm, rel=1e-5)
    assert nn.utils.clip_grad_norm_(params, 1.0, norm_type).item() == pytest.approx(0.3, rel=1e-4)
    torch.testing.assert_close(added.weight.grad.cpu(), expected[1].weight.grad)  # type: ignore[union-attr]
    assert nn.utils.clip_grad_norm_(added.parameters(), 1e9).item() < 0.3 or norm_type == math.inf


def test_norms_that_are_none(hosted: Hosted) -> None:
    hosted(2)
    model = FSDP(nn.Linear(2, 2))
    model(torch.full((1, 2), math.inf, device="xla")).sum().backward()
    with pytest.raises(RuntimeError, match=r"total norm of order 2.0 of gradients is non-finite \(inf\).*Pass error_if_nonfinite=False"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    for clip in (nn.utils.clip_grad_norm_, lambda _, *args: model.clip_grad_norm_(*args)):
        with pytest.raises(
            ValueError, match="norm_type=0.0: the norm of gradients that are shared out among ranks is one with p > 0, or inf"
        ):
            clip(model.parameters(), 1.0, 0.0)  # type: ignore[operator]


def test_each_group_has_a_norm(hosted: Hosted) -> None:
    """Of the whole gradient, which its ranks have together; all ranks have the same one if groups have the same batches."""
    norms = []
    for options in ({}, {"sharding_groups": [[0, 1], [2, 3]], "sharding_world_size": 2}):
        hosted(4)
        if options:
            options["sharding_rank"] = xm.get_ordinal() % 2
        torch.manual_seed(0)
        model = FSDP(nn.Linear(2, 2), **options)  # type: ignore[arg-type]
        model(torch.ones(1, 2, device="xla")).square().sum().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


SUMS: list[Callable[[Any, Any], Any]] = [
    lambda optimizer, groups: xm.optimizer_step(optimizer, groups=groups),
    lambda optimizer, groups: xm.reduce_gradients(optimizer, groups),
    lambda optimizer, groups: xm.all_reduce("sum", xm._fetch_gradients(optimizer), 0.25, groups),
    lambda optimizer, groups: xm.all_reduce("sum", optimizer.param_groups[0]["params"][0].grad, 0.25, groups),
    lambda optimizer, groups: xm.all_reduce_bucketized_gradients(xm._fetch_gradients(optimizer), 0.25, groups),
]


@pytest.mark.core(keep=2)
@pytest.mark.parametrize("call", SUMS)
def test_gradients_are_not_averaged_twice(call: Callable[[Any, Any], Any], hosted: Hosted) -> None:
    """But across groups that have the same parts they may be, which is data parallelism around."""
    hosted(4)
    options: dict[str, Any] = {"sharding_groups": [[0, 1], [2, 3]], "sharding_rank": xm.get_ordinal() % 2, "sharding_world_size": 2}
    model = FSDP(nn.Linear(2, 2), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 2, device="xla") * xm.get_ordinal()).sum().backward()
    for groups in (None, [[0, 1], [2, 3]]):
        with pytest.raises(
            ValueError, match=r"xm\..* would add up gradients of different parts of a parameter.*so call optimizer.step\(\)"
        ):
            call(optimizer, groups)
    call(optimizer, [[0, 2], [1, 3]])


def test_averaging_over_groups_with_the_same_parts(hosted: Hosted) -> None:
    hosted(4)
    options: dict[str, Any] = {"sharding_groups": [[0, 1], [2, 3]], "sharding_rank": xm.get_ordinal() % 2, "sharding_world_size": 2}
    model = FSDP(nn.Linear(2, 2), **options)
    model(torch.ones(1, 2, device="xla") * xm.get_ordinal()).sum().backward()
    xm.reduce_gradients(torch.optim.SGD(model.parameters(), lr=1.0), [[0, 2], [1, 3]])
    assert next(model.parameters()).grad[:2].tolist() == [1.5, 1.5]  # type: ignore[index]


def test_what_accelerate_averages(hosted: Hosted) -> None:
    """Not shards of all ranks, which are averaged; but a parameter beside them."""
    hosted(2)
    model, added = FSDP(nn.Linear(2, 2)), nn.Linear(1, 1).to("xla")
    optimizer = torch.optim.SGD([*model.parameters(), *added.parameters()], lr=1.0)
    (model(torch.ones(1, 2, device="xla")).sum() + added(torch.ones(1, 1, device="xla") * xm.get_ordinal()).sum()).backward()
    before = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    gradients = xm._fetch_gradients(optimizer)
    assert [g.shape for g in gradients] == [(1, 1), (1,)]
    xm.all_reduce("sum", gradients, scale=0.5)
    assert added.weight.grad.item() == 0.5  # type: ignore[union-attr]
    assert all(torch.equal(p.grad.cpu(), g.cpu()) for p, g in zip(model.parameters(), before, strict=True))  # type: ignore[union-attr]
