"""Traced mixtures of experts whose ranks share out the experts in groups of their own, as inference does."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from nxd_jax.modules.moe.expert_mlps import ExpertMLPs
from nxd_jax.modules.moe.moe_parallel_layers import ExpertFusedColumnParallelLinear, ExpertFusedRowParallelLinear
from nxd_jax.modules.moe.moe_process_group import (
    get_moe_ep_group,
    get_moe_tp_ep_group,
    init_tensor_expert_parallel_moe_process_groups,
)
from nxd_jax.modules.moe.routing import RouterTopK
from nxd_jax.parallel_layers import mappings, parallel_state
from nxd_jax.trace import ModelBuilder
from nxd_jax.trace import trace as trace_names
from nxd_jax.trace.functions import shard_checkpoint
from nxd_jax.trace.model_builder import BaseModelInstance
from nxd_jax.trace.parallel_context import NxDParallelState

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")
EXPERTS, HIDDEN, INTERMEDIATE = 8, 16, 32


class Net(nn.Module):
    def __init__(self, tp: int, ep: int) -> None:
        super().__init__()
        init_tensor_expert_parallel_moe_process_groups(tp, ep, tp, ep)
        self.router = RouterTopK(EXPERTS, 2, HIDDEN, sequence_dimension=0)
        self.expert_mlps = ExpertMLPs(
            EXPERTS,
            2,
            HIDDEN,
            INTERMEDIATE,
            "silu",
            True,
            None,
            bias=True,
            enable_spmd_rank=True,
            cte_tensor_model_parallel_group=get_moe_tp_ep_group(prefill=True),
            cte_expert_model_parallel_group=get_moe_ep_group(prefill=True),
            tkg_tensor_model_parallel_group=get_moe_tp_ep_group(prefill=False),
            tkg_expert_model_parallel_group=get_moe_ep_group(prefill=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, affinities, index = self.router(x)
        y = self.expert_mlps(x.view(-1, HIDDEN), affinities, index, x.shape[1]).view(x.shape)
        return mappings.reduce_from_tensor_model_parallel_region(y, process_group=parallel_state.get_world_group())


def full() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    shapes = {
        "router.linear_router.weight": (EXPERTS, HIDDEN),
        "expert_mlps.mlp_op.gate_up_proj.weight": (EXPERTS, HIDDEN, 2 * INTERMEDIATE),
        "expert_mlps.mlp_op.gate_up_proj.bias": (EXPERTS, 2 * INTERMEDIATE),
        "expert_mlps.mlp_op.down_proj.weight": (EXPERTS, INTERMEDIATE, HIDDEN),
        "expert_mlps.mlp_op.down_proj.bias": (EXPERTS, HIDDEN),
    }
    return {name: torch.randn(shape, generator=g) * 0.3 for name, shape in shapes.items()}


def by_hand(x: torch.Tensor) -> torch.Tensor:
    router, w1, b1, w2, b2 = full().values()
    tokens = x.view(-1, HIDDEN)
    weights, chosen = (tokens @ router.T).softmax(1).topk(2)
    found = torch.zeros_like(tokens)
    for n, token in enumerate(tokens):
        for weight, e in zip(weights[n], chosen[n], strict=True):
            gate, up = (token @ w1[e] + b1[e]).chunk(2)
            found[n] += weight * (nn.functional.silu(gate) * up @ w2[e] + b2[e])
    return found.view(x.shape)


@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (1, 4), (4, 1)])
def test_a_traced_model(tp: int, ep: int) -> None:
    """Prefill and decode; upstream's tests trace experts in such groups with tensor parallel size tp x ep."""
    prompt, step = torch.randn(2, 6, HIDDEN), torch.randn(8, 1, HIDDEN)
    builder = ModelBuilder(router=None, tp_degree=tp * ep, ep_degree=1, checkpoint_loader=full)
    instance = BaseModelInstance(module_cls=partial(lambda: Net(tp, ep).eval()), input_output_aliases={})
    builder.add("prefill", instance, [(prompt,)])
    builder.add("decode", instance, [(step,)])
    model = builder.trace(initialize_model_weights=True)
    for x in (prompt, step):
        torch.testing.assert_close(model(x).cpu(), by_hand(x))


def test_shares() -> None:
    """A rank's part of each weight, by both ways to cut a checkpoint."""
    column, row = torch.randn(4, 6, 8), torch.randn(4, 8, 6)
    with NxDParallelState(world_size=4, tensor_model_parallel_size=4):
        init_tensor_expert_parallel_moe_process_groups(1, 4, 2, 2)
        two, one = [
            {"tensor_model_parallel_group": get_moe_tp_ep_group(prefill), "expert_model_parallel_group": get_moe_ep_group(prefill)}
            for prefill in (True, False)
        ]
        module = nn.ModuleDict(
            {
                "prefill": ExpertFusedColumnParallelLinear(4, 6, 8, stride=2, **two),
                "decode": ExpertFusedRowParallelLinear(4, 8, 6, **one),
            }
        )
        checkpoint = {"prefill.weight": column, "decode.weight": row}
        shards = shard_checkpoint(checkpoint, module)
        for rank, part in enumerate(shards):
            k, e = rank % 2, rank // 2
            own = column[2 * e : 2 * e + 2]
            torch.testing.assert_close(
                part["prefill.weight"], torch.cat([own[..., 2 * k : 2 * k + 2], own[..., 4 + 2 * k : 6 + 2 * k]], -1)
            )
            torch.testing.assert_close(part["decode.weight"], row[rank : rank + 1])
            given = dict(checkpoint)
            trace_names.shard_children(module, given, "", None, rank, 4)
            assert all(torch.equal(given[name], t) for name, t in part.items())
