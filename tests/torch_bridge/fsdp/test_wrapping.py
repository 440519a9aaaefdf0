"""Which modules policies wrap, and what the wrapper says of options and modules that do not fit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import nn
from torch.distributed.fsdp import wrap as torchs
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP
from torch_xla.distributed.fsdp import checkpoint_module
from torch_xla.distributed.fsdp.wrap import (
    always_wrap_policy,
    lambda_auto_wrap_policy,
    recursive_wrap,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from tests.torch_bridge.fsdp.models import Block, batch, net
from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.mesh import spmd, world

POLICIES: dict[str, tuple[Any, set[str]]] = {
    "always": (
        always_wrap_policy,
        {"embed", "head", "blocks.0", "blocks.1", *(f"blocks.{k}.{m}" for k in (0, 1) for m in ("norm", "up", "down"))},
    ),
    "blocks": (functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}), {"blocks.0", "blocks.1"}),
    "torch's": (functools.partial(torchs.transformer_auto_wrap_policy, transformer_layer_cls={Block}), {"blocks.0", "blocks.1"}),
    "size": (functools.partial(size_based_auto_wrap_policy, min_num_params=80), {"blocks.0", "blocks.0.up", "blocks.1", "blocks.1.up"}),
    "large": (size_based_auto_wrap_policy, set()),
    "lambda": (functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Embedding)), {"embed"}),
}

COUNTS = {"always": 66 + 77 + 2 * 168, "blocks": 2 * 168, "torch's": 2 * 168, "size": 2 * 168, "large": 0, "lambda": 66}
"""How many numbers are wrapped: 66 in the embedding, 77 in the head, 168 in a block."""


class Named(nn.Module):
    """A wrapper that does nothing."""

    def __init__(self, inner: nn.Module, **options: Any):
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize("name", POLICIES)
def test_policies(name: str) -> None:
    policy, expected = POLICIES[name]
    if name == "always":
        policy = lambda module, recurse, unwrapped_params: recurse or not isinstance(module, nn.ModuleList)  # noqa: E731
    model, count = recursive_wrap(net(), policy, Named, only_wrap_children=True, option=1)
    found = {path.replace("inner.", "") for path, m in model.named_modules() if isinstance(m, Named) and m.options == {"option": 1}}
    assert found == expected and count == COUNTS[name]


def test_modules_that_occur_twice_are_left_alone_or_have_options_of_their_own() -> None:
    shared, plain = nn.Linear(2, 2), nn.Linear(2, 2)
    plain._wrap_overrides = {"option": 2}  # type: ignore[assignment]
    model = nn.Sequential(shared, shared, plain, left := nn.Linear(2, 2))
    recursive_wrap(model, always_wrap_policy, Named, ignored_modules=[left], ignored_params=list(left.parameters()), option=1)
    assert model[0] is model[1] and isinstance(model[0], Named) and model[2].options == {"option": 2} and model[3] is left
    with pytest.raises(ValueError, match=r"these are wrapped in Named already: 0, 2\. Give it the module without wrappers"):
        recursive_wrap(model, always_wrap_policy, Named)


def test_another_wrapper_for_modules_inside(hosted: Hosted) -> None:
    hosted(2)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    model: Any = FSDP(
        net(),
        flatten_parameters=True,
        auto_wrap_policy=policy,
        auto_wrapper_callable=lambda m, *args, **kwargs: FSDP(checkpoint_module(m), *args, **kwargs),
    )
    assert all(
        isinstance(b, FSDP) and b.flatten_parameters and hasattr(b.module, "_xla_checkpointed_forward_original") for b in model.blocks
    )
    model(batch(0)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_options_that_do_not_fit(hosted: Hosted) -> None:
    hosted(4)
    rank = xm.get_ordinal()
    groups = [[0, 1], [2, 3]]
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"reshard": True}, TypeError, r"unknown options reshard; it knows .*reshard_after_forward"),
        ({"_debug_dummy_all_gather_op": True}, NotImplementedError, "_debug_dummy_all_gather_op would train on wrong numbers: leave it out"),
        ({"compute_dtype": torch.float64}, ValueError, "compute_dtype must be one of torch.float32, torch.float16, torch.bfloat16, not torch.float64"),
        ({"buffer_dtype": torch.int8}, ValueError, "buffer_dtype must be one of"),
        ({"sharding_groups": groups}, ValueError, "sharding_groups need sharding_rank .* and sharding_world_size"),
        ({"sharding_groups": groups, "sharding_rank": rank % 2, "sharding_world_size": 4}, ValueError, "sharding_world_size=4, but .* have 2 ranks"),
        ({"sharding_groups": groups, "sharding_rank": rank, "sharding_world_size": 2}, ValueError, r"0 for rank 0, 1 for rank 1, 0 for rank 2.*is 0, 1, 2, 3"),
        ({"sharding_groups": groups, "sharding_rank": 0, "sharding_world_size": 2}, ValueError, "Work it out from xm.get_ordinal"),
        ({"sharding_world_size": 2}, ValueError, "are for sharding_groups, which are not given: .* among all 4 ranks"),
    ]  # fmt: skip
    for options, error, text in cases:
        with pytest.raises(error, match=text):
            FSDP(nn.Linear(2, 2), **options)
    FSDP(nn.Linear(2, 2), sharding_rank=rank, sharding_world_size=4, pin_layout_in_collective_ops=False, _debug_msg="x")


def test_modules_that_cannot_be_wrapped(hosted: Hosted) -> None:
    hosted(2)
    with pytest.raises(RuntimeError, match="wrapped already: for nested wrappers, wrap modules inside first"):
        FSDP(FSDP(nn.Linear(2, 2)))
    with pytest.raises(RuntimeError, match="ModuleList has no forward of its own.*wrap the modules in it"):
        FSDP(nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(
        TypeError, match=r"only fp32 parameters are supported, these are not: weight \(torch.bfloat16\), bias .*compute_dtype="
    ):
        FSDP(nn.Linear(2, 2, dtype=torch.bfloat16))
    tied = net(tied=True)
    tied.embed = FSDP(tied.embed)
    with pytest.raises(
        ValueError, match="head.weight is tied to weight of a module that is wrapped already.*wrap both modules in one wrapper"
    ):
        FSDP(tied)
    with pytest.raises(ValueError, match="these are wrapped in XlaFullyShardedDataParallel already: 0"):
        FSDP(nn.Sequential(FSDP(nn.Linear(2, 2))), auto_wrap_policy=always_wrap_policy)

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, device="meta"))

        def forward(self) -> None:
            pass

    with pytest.raises(
        ValueError, match=r"the module \(Bare\) has parameters on the meta device and no reset_parameters\(\): pass param_init_fn="
    ):
        FSDP(Bare())
    with pytest.raises(ValueError, match="param_init_fn left parameters on the meta device: w"):
        FSDP(Bare(), param_init_fn=lambda m: None)


def test_what_is_for_the_outermost_wrapper(hosted: Hosted) -> None:
    hosted(2)
    model = FSDP(nn.Sequential(inner := FSDP(nn.Linear(2, 2))))
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(\) is for the outermost wrapper"):
        inner.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match=r"no_sync\(\) is for the outermost wrapper"), inner.no_sync():
        pass
    with pytest.raises(AttributeError, match="nothing"):
        model.nothing  # noqa: B018


def test_parameters_that_change_before_the_backward_pass(hosted: Hosted) -> None:
    hosted(2)
    model = FSDP(nn.Sequential(FSDP(nn.Linear(2, 2)), nn.Linear(2, 2)), disable_reshard_on_root=False)
    loss = model(torch.ones(1, 2, device="xla")).sum()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    with pytest.raises(RuntimeError, match=r"changed between its forward and its backward pass .*run backward\(\) first, or pass reshard"):
        loss.backward()


def test_after_use_spmd() -> None:
    """There are no ranks then."""
    world.configure(world.World(2))
    try:
        xr.use_spmd()
        with pytest.raises(
            RuntimeError, match=r"XlaFullyShardedDataParallel shares parameters out among ranks.*use SpmdFullyShardedDataParallel"
        ):
            FSDP(nn.Linear(2, 2))
    finally:
        spmd.stop()
