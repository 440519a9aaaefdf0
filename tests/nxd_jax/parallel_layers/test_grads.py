"""Norms and reductions of a divided model's gradients, against the undivided model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nxd_jax.parallel_layers import grads as nxd_grads
from nxd_jax.parallel_layers import parallel_state
from tests.nxd_jax.conftest import Nxd
from torch_bridge.recorder import sharded


def parameter(grad: Callable[[int], torch.Tensor], axes: list[str] | None = None, **attributes: Any) -> torch.nn.Parameter:
    """A parameter whose gradient is `grad(rank)`."""
    value = sharded.from_ranks(grad, axes)
    p = torch.nn.Parameter(torch.zeros_like(value))
    p.grad = value.clone()  # labelled as what it is computed from, like a gradient
    for name, x in attributes.items():
        setattr(p, name, x)
    return p


def same(t: torch.Tensor) -> torch.Tensor:
    parts = sharded.shards(t)
    assert all(torch.equal(p, parts[0]) for p in parts), parts
    return parts[0]


def norm_of(tensors: list[torch.Tensor], p: float) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.cat([t.reshape(-1) for t in tensors]), p).reshape(1)


def place(kind: str, rank: int) -> int:
    lists = getattr(parallel_state, f"get_{kind}_group")(as_list=True)
    return next(g.index(rank) for g in lists if rank in g)


def divided_model(full: dict[str, torch.Tensor]) -> list[torch.nn.Parameter]:
    """A column-parallel weight, a layer norm with sequence parallelism, a plain bias, and a copy that another stage counts."""
    tp = parallel_state.get_tensor_model_parallel_size()
    rows = full["column"].shape[0] // tp

    def part(rank: int) -> torch.Tensor:
        k = place("tensor_model_parallel", rank)
        return full["column"][k * rows : (k + 1) * rows]

    return [
        parameter(part, ["tp"], tensor_model_parallel=True),
        parameter(lambda r: full["norm"], [], sequence_parallel_enabled=True),
        parameter(lambda r: full["bias"], [], tensor_model_parallel=False),
        parameter(lambda r: full["shared"], [], shared=True),
        torch.nn.Parameter(torch.zeros(3, device="xla")),
    ]


def gradients() -> dict[str, torch.Tensor]:
    return {"column": torch.randn(8, 3), "norm": torch.randn(5), "bias": torch.randn(4), "shared": 100 * torch.randn(4)}


@pytest.mark.core(keep=8)
@pytest.mark.parametrize("norm_type", [2, 1, 3.0, "inf"])
@pytest.mark.parametrize("size", [{"size": 8, "tp": 4}, {"size": 8, "tp": 2, "cp": 2}, {"size": 1}])
@pytest.mark.parametrize("force_spmd", [True, False])
def test_norm(nxd: Nxd, size: dict[str, int], norm_type: Any, force_spmd: bool) -> None:
    nxd(**size)
    full = gradients()
    found = nxd_grads.get_grad_norm(iter(divided_model(full)), norm_type, force_spmd=force_spmd)
    assert found.shape == (1,)
    torch.testing.assert_close(same(found), norm_of([full["column"], full["norm"], full["bias"]], float(norm_type)))


@pytest.mark.parametrize("norm_type", [2, "inf"])
def test_norm_over_pipeline_stages(nxd: Nxd, norm_type: Any) -> None:
    nxd(4, pp=2, tp=2)
    stages = torch.randn(2, 5)
    found = nxd_grads.get_grad_norm([parameter(lambda r: stages[place("pipeline_model_parallel", r)], ["pp"])], norm_type)
    torch.testing.assert_close(same(found), norm_of([stages], float(norm_type)))


@pytest.mark.parametrize("norm_type", [2, "inf"])
@pytest.mark.parametrize("zero1", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_norm_of_experts(nxd: Nxd, norm_type: Any, zero1: bool, tp: int) -> None:
    nxd(8, tp=tp, ep=2)
    experts, dense, edp, dp = torch.randn(2, 8, 4), torch.randn(8, 3), 4 // tp, 8 // tp

    def expert(rank: int) -> torch.Tensor:
        own = experts[place("expert_model_parallel", rank)].chunk(tp)[place("tensor_model_parallel", rank)]
        return own.chunk(edp)[place("expert_data_parallel", rank)] if zero1 else own

    def plain(rank: int) -> torch.Tensor:
        return dense.chunk(dp)[place("data_parallel", rank)] if zero1 else dense

    params = [parameter(expert, expert_model_parallel=True, tensor_model_parallel=True), parameter(plain)]
    found = nxd_grads.get_grad_norm(params, norm_type, zero1_optimizer=zero1)
    torch.testing.assert_close(same(found), norm_of([experts, dense], float(norm_type)))
    if zero1:
        groups = parallel_state.get_expert_data_parallel_group(as_list=True)
        found = nxd_grads.get_grad_norm(params[:1], norm_type, zero1_optimizer=True, zero1_optimizer_groups=groups)
        torch.testing.assert_close(same(found), norm_of([experts], float(norm_type)))


def test_norm_of_shards(nxd: Nxd) -> None:
    """ZeRO-1 with context parallelism: shards over dp and cp."""
    nxd(8, tp=2, cp=2)
    full = torch.randn(8, 3)
    groups = parallel_state.get_zero1_sharding_groups()
    index = {r: k for g in groups for k, r in enumerate(g)}
    p = parameter(lambda r: full.chunk(4)[index[r]])
    for chosen in (None, groups):
        found = nxd_grads.get_grad_norm([p], zero1_optimizer=True, zero1_optimizer_groups=chosen)
        torch.testing.assert_close(same(found), norm_of([full], 2))


def test_norm_dtypes(nxd: Nxd) -> None:
    nxd(2, tp=2)
    g = torch.randn(1000).bfloat16()
    found = nxd_grads.get_grad_norm(parameter(lambda r: g, []))
    assert found.dtype == torch.float32
    torch.testing.assert_close(same(found), norm_of([g.float()], 2))
    wide = nxd_grads.get_grad_norm([parameter(lambda r: g.double(), []), parameter(lambda r: g, [])])
    torch.testing.assert_close(same(wide), norm_of([g.double(), g.double()], 2), rtol=1e-12, atol=0)


def test_norm_of_nothing(nxd: Nxd) -> None:
    nxd(2, tp=2)
    assert nxd_grads.get_grad_norm([]).tolist() == [0.0]
    found = nxd_grads.get_grad_norm([torch.nn.Parameter(torch.zeros(3, device="xla"))])
    assert found.device.type == "xla" and found.tolist() == [0.0]
    with pytest.raises(ValueError, match="norm_type must be a positive number or 'inf', got 0"):
        nxd_grads.get_grad_norm([], 0)


def test_main_grad_counts(nxd: Nxd) -> None:
    nxd(2, tp=2)
    p = torch.nn.Parameter(torch.zeros(3, device="xla"))
    p.main_grad = torch.full((3,), 2.0, device="xla")
    torch.testing.assert_close(nxd_grads.get_grad_norm([p]).cpu(), torch.tensor([12.0**0.5]))


@pytest.mark.parametrize(("max_norm", "scaled"), [(1.0, True), (1e6, False)])
def test_clip(nxd: Nxd, max_norm: float, scaled: bool) -> None:
    nxd(4, tp=2)
    full = gradients()
    params = divided_model(full)
    norm = norm_of([full["column"], full["norm"], full["bias"]], 2)
    factor = max_norm / (norm + 1e-6) if scaled else 1.0
    found = nxd_grads.clip_grad_norm(params, max_norm)
    torch.testing.assert_close(same(found), norm)  # the norm before clipping
    column, norm_weight = params[0].grad, params[1].grad
    assert column is not None and norm_weight is not None
    for rank, own in enumerate(sharded.shards(column)):
        torch.testing.assert_close(own, full["column"].chunk(2)[rank % 2] * factor)
    torch.testing.assert_close(same(norm_weight), full["norm"] * factor)
    assert params[4].grad is None


def test_clip_keeps_dtypes(nxd: Nxd) -> None:
    nxd(2, tp=2)
    g = torch.randn(100).bfloat16()
    p = parameter(lambda r: g, [])
    before = p.grad
    nxd_grads.clip_grads_with_norm([p], torch.tensor([10.0]).to("xla"), 1.0)
    assert p.grad is before and p.grad is not None and p.grad.dtype == torch.bfloat16
    torch.testing.assert_close(p.grad.cpu(), (g.float() * (1.0 / (10 + 1e-6))).bfloat16())
    nxd_grads.clip_grads_with_norm([], 10.0, 1.0)


def test_clip_in_a_world_of_one_on_the_cpu(nxd: Nxd) -> None:
    nxd(1)
    p = torch.nn.Parameter(torch.zeros(4))
    p.grad = torch.full((4,), 3.0)
    assert nxd_grads.clip_grad_norm(p, 1.0).item() == 6.0
    torch.testing.assert_close(p.grad, torch.full((4,), 0.5))


def test_needs_parallel_state() -> None:
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        nxd_grads.get_grad_norm([torch.nn.Parameter(torch.zeros(3))])


# -- reductions -------------------------------------------------------------------------------------


def test_average_over_data_parallel_ranks(nxd: Nxd) -> None:
    nxd(8, tp=2, cp=2)
    values = torch.randn(8, 3)
    first, second = sharded.from_ranks(lambda r: values[r]), sharded.from_ranks(lambda r: values[r].bfloat16())
    nxd_grads.bucket_allreduce_gradients([first, second])
    for group in parallel_state.get_data_parallel_group(as_list=True):
        for rank in group:
            torch.testing.assert_close(sharded.shards(first)[rank], values[group].mean(0))
            torch.testing.assert_close(
                sharded.shards(second)[rank], values[group].bfloat16().float().mean(0).bfloat16(), rtol=2e-2, atol=1e-2
            )
    with pytest.raises(TypeError, match="takes gradients, got"):
        nxd_grads.bucket_allreduce_gradients([None])


def test_average_with_experts(nxd: Nxd) -> None:
    nxd(8, tp=2, ep=2)
    values = torch.randn(8, 3)
    expert, dense = sharded.from_ranks(lambda r: values[r]), sharded.from_ranks(lambda r: values[r])
    nxd_grads.bucket_allreduce_gradients([expert])
    nxd_grads.bucket_allreduce_gradients([dense], reduce_over_ep_group=True)
    for group in parallel_state.get_expert_data_parallel_group(as_list=True):
        for rank in group:
            torch.testing.assert_close(sharded.shards(expert)[rank], values[group].sum(0) / 4)
    for group in parallel_state.get_data_parallel_group(as_list=True):
        for rank in group:
            torch.testing.assert_close(sharded.shards(dense)[rank], values[group].mean(0))


def test_experts_with_context_parallelism(nxd: Nxd) -> None:
    """Both reductions together are the mean over all data- and context-parallel ranks of what reaches an expert."""
    nxd(8, cp=2, ep=2)
    values = torch.randn(8, 3)
    p = parameter(lambda r: values[r], expert_model_parallel=True)
    nxd_grads.allreduce_context_parallel_gradients(torch.optim.SGD([p], lr=1.0))
    assert p.grad is not None
    nxd_grads.bucket_allreduce_gradients([p.grad])
    for group in parallel_state.get_expert_data_parallel_group(as_list=True):
        for rank in group:
            torch.testing.assert_close(sharded.shards(p.grad)[rank], values[group].sum(0) / 8)


def test_sequence_parallel_gradients(nxd: Nxd) -> None:
    nxd(4, tp=2)
    values = torch.randn(4, 3)
    norm, other = parameter(lambda r: values[r], sequence_parallel_enabled=True), parameter(lambda r: values[r])
    nxd_grads.allreduce_sequence_parallel_gradients(torch.optim.SGD([norm, other], lr=1.0))
    assert norm.grad is not None and other.grad is not None
    for rank in range(4):
        torch.testing.assert_close(sharded.shards(norm.grad)[rank], values[rank // 2 * 2 : rank // 2 * 2 + 2].sum(0))
        torch.testing.assert_close(sharded.shards(other.grad)[rank], values[rank])
    assert sharded.varying(norm.grad).axes == ("dp",)


def test_context_parallel_gradients(nxd: Nxd) -> None:
    nxd(8, tp=2, cp=2)
    values = torch.randn(8, 3)
    p = parameter(lambda r: values[r])
    nxd_grads.allreduce_context_parallel_gradients(torch.optim.SGD([p, torch.nn.Parameter(torch.zeros(1, device="xla"))], lr=1.0))
    assert p.grad is not None
    for group in parallel_state.get_context_model_parallel_group(as_list=True):
        for rank in group:
            torch.testing.assert_close(sharded.shards(p.grad)[rank], values[group].mean(0))


def test_shared_copies() -> None:
    p = torch.nn.Parameter(torch.zeros(1))
    assert nxd_grads.param_is_not_shared(p)
    p.shared = True
    assert not nxd_grads.param_is_not_shared(p)
