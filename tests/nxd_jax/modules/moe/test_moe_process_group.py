"""Groups of experts for prefill and decode: who is in them, and that layers work in them."""

from __future__ import annotations

import pytest
import torch

from nxd_jax.modules.moe import moe_process_group
from nxd_jax.modules.moe.moe_process_group import (
    destroy_moe_model_parallel,
    get_moe_ep_group,
    get_moe_tp_ep_group,
    init_tensor_expert_parallel_moe_process_groups,
)
from nxd_jax.parallel_layers import parallel_state
from nxd_jax.tensor_parallel import layer_groups, regions
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.parallel_layers.parts import close, own, per_rank


def test_members(nxd: Nxd) -> None:
    """Both are splits of one world: neighbours for tp, every tp-th rank for ep."""
    nxd(8, tp=8)
    init_tensor_expert_parallel_moe_process_groups(2, 4, 4, 2)
    assert get_moe_tp_ep_group(prefill=False)._mesh == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert get_moe_ep_group(prefill=False)._mesh == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert get_moe_tp_ep_group()._mesh == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert get_moe_ep_group()._mesh == [[0, 4], [1, 5], [2, 6], [3, 7]]
    mesh = parallel_state.initialize_model_parallel(2, expert_model_parallel_size=4, mesh_only=True)
    assert mesh is not None and mesh.tp_groups == get_moe_tp_ep_group(False)._mesh and mesh.ep_model_groups == get_moe_ep_group(False)._mesh
    assert layer_groups.size(get_moe_ep_group(prefill=False)) == 4


def test_work_in_them(nxd: Nxd) -> None:
    nxd(8, tp=8)
    init_tensor_expert_parallel_moe_process_groups(2, 4, 4, 2)
    values = [torch.full((1,), float(r)) for r in range(8)]
    total = regions.reduce_from_tensor_model_parallel_region(own(values), get_moe_ep_group(prefill=False))
    assert [v.item() for v in per_rank(total)] == [12.0, 16.0] * 4
    torch.manual_seed(0)
    layer = ColumnParallelLinear(4, 8, bias=False, tensor_model_parallel_group=get_moe_tp_ep_group(prefill=False)).to("xla")
    torch.manual_seed(0)
    whole = torch.nn.Linear(4, 8, bias=False)
    assert layer.weight.shape == (4, 4)
    x = torch.randn(3, 4)
    close(layer(x.to("xla")), whole(x).detach())


def test_again_and_after_destroying(nxd: Nxd) -> None:
    nxd(8, tp=8)
    init_tensor_expert_parallel_moe_process_groups(2, 4, 4, 2)
    before = get_moe_ep_group()
    init_tensor_expert_parallel_moe_process_groups(2, 4, 4, 2)
    assert get_moe_ep_group() is before
    with pytest.raises(
        RuntimeError, match=r"the tp groups of experts for cte have 4 ranks, 2 were asked for: .*destroy_moe_model_parallel\(\)"
    ):
        init_tensor_expert_parallel_moe_process_groups(2, 4, 2, 4)
    destroy_moe_model_parallel()
    init_tensor_expert_parallel_moe_process_groups(2, 4, 2, 4)
    assert get_moe_tp_ep_group()._mesh == get_moe_tp_ep_group(prefill=False)._mesh
    parallel_state.destroy_model_parallel()
    with pytest.raises(RuntimeError, match="tp groups of experts for cte are not initialized"):
        get_moe_tp_ep_group()


def test_errors(nxd: Nxd) -> None:
    nxd(8, tp=4)
    for prefill, phase in ((True, "cte"), (False, "tkg")):
        with pytest.raises(
            RuntimeError, match=f"the tp groups of experts for {phase} are not initialized: call .*init_tensor_expert_parallel_moe"
        ):
            get_moe_tp_ep_group(prefill)
        with pytest.raises(RuntimeError, match=f"the ep groups of experts for {phase} are not initialized"):
            get_moe_ep_group(prefill=prefill)
    destroy_moe_model_parallel()
    with pytest.raises(RuntimeError, match="expert_model_parallel_size must divide 4"):
        init_tensor_expert_parallel_moe_process_groups(2, 3, 2, 4)
    assert moe_process_group.__doc__
