"""The grouped-query QKV projection, fused and not, with K/V copies in both orders, against three plain linears; RMSNorm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nxd_jax.modules.qkv_linear import GQAQKVColumnParallelLinear, gqa_qkv_linear_with_async_allreduce
from nxd_jax.modules.rms_norm import RMSNorm
from nxd_jax.parallel_layers import parallel_state
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.parallel_layers.parts import close, collectives_run, own, per_rank, tp_place
from torch_bridge.mesh import world

IN, Q, KV, HEAD = 12, 16, 8, 4  # 4 heads of Q, 2 of K and V
TP = 4


@pytest.fixture(params=["trn1", "trn2"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", request.param)
    return str(request.param)


def kv_part(rank: int, order: str, times: int) -> int:
    """Which K/V part a rank holds: copies go round the ranks on trn1 and stand side by side on trn2."""
    place = tp_place(rank)
    return place % (TP // times) if order == "trn1" else place // times


def references(bias: bool) -> list[torch.nn.Linear]:
    torch.manual_seed(9)
    weights = [torch.nn.init.kaiming_uniform_(torch.empty(n, IN), a=5**0.5) for n in (Q, KV, KV)]
    biases = [torch.empty(n).uniform_(-(IN**-0.5), IN**-0.5) if bias else None for n in (Q, KV, KV)]
    found = []
    for w, b in zip(weights, biases, strict=True):
        layer = torch.nn.Linear(IN, len(w), bias=bias)
        with torch.no_grad():
            layer.weight.copy_(w)
            if b is not None:
                layer.bias.copy_(b)
        found.append(layer)
    return found


def parts_of(full: list[torch.Tensor], rank: int, order: str, times: int) -> list[torch.Tensor]:
    """A rank's q, k and v rows (or columns: last dim first) of full tensors."""
    k = kv_part(rank, order, times)
    return [full[0].chunk(TP)[tp_place(rank)], full[1].chunk(TP // times)[k], full[2].chunk(TP // times)[k]]


def rank_rows(layer: Any, kind: str, grad: bool = False) -> list[list[torch.Tensor]]:
    """For each rank, its rows of q, k and v."""

    def of(name: str) -> list[torch.Tensor]:
        p = getattr(layer, name)
        return per_rank(p.grad if grad else p)

    if layer.fuse_qkv:
        sizes = [layer.q_output_size_per_partition] + [layer.kv_output_size_per_partition] * 2
        return [list(p.split(sizes)) for p in of(f"{kind}_qkv")]
    return [list(t) for t in zip(*(of(f"{kind}_{p}") for p in "qkv"), strict=True)]


@pytest.mark.thorough(keep=10)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("times", [1, 2, 4])
@pytest.mark.parametrize("fuse", [True, False])
def test_values_and_gradients(nxd: Nxd, order: str, fuse: bool, times: int, bias: bool) -> None:
    nxd(8, tp=TP)
    torch.manual_seed(9)
    layer = GQAQKVColumnParallelLinear(IN, [Q, KV], bias=bias, gather_output=False, kv_size_multiplier=times, fuse_qkv=fuse).to("xla")
    full = references(bias)
    x = torch.randn(3, 2, IN)
    expected, given = x.clone().requires_grad_(), x.to("xla").requires_grad_()
    outs = [f(expected) for f in full]
    q, k, v = layer(given)

    # every rank weighs its part by numbers of its own; a copied K/V head then has the sum of its copies' weights
    weights = [[torch.randn(3, 2, t.shape[-1]) for t in (q, k, v)] for _ in range(TP)]
    loss = torch.zeros(())
    for r in range(8):
        mine = [p.movedim(0, -1) for p in parts_of([o.detach().movedim(-1, 0) for o in outs], r, order, times)]
        for out, part in zip((q, k, v), mine, strict=True):
            torch.testing.assert_close(per_rank(out)[r], part, rtol=1e-4, atol=1e-5)
    for r in range(TP):
        mine = [p.movedim(0, -1) for p in parts_of([o.movedim(-1, 0) for o in outs], r, order, times)]
        loss = loss + sum((m * w).sum() for m, w in zip(mine, weights[r], strict=True))
    loss.backward()
    pulled = [own([weights[tp_place(r)][n] for r in range(8)], ["tp"]) for n in range(3)]
    torch.autograd.backward([q, k, v], pulled)

    close(given.grad, expected.grad, atol=1e-4)
    for kind in ("weight", "bias") if bias else ("weight",):
        values = [getattr(f, kind).detach() for f in full]
        grads = [getattr(f, kind).grad for f in full]
        for r in range(8):
            for got, want in zip(rank_rows(layer, kind)[r], parts_of(values, r, order, times), strict=True):
                assert torch.equal(got, want)
            for got, want in zip(rank_rows(layer, kind, grad=True)[r], parts_of(grads, r, order, times), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("times", [1, 2])
def test_sequence_parallelism(nxd: Nxd, fuse: bool, dim: int, times: int) -> None:
    nxd(4, tp=TP)
    torch.manual_seed(9)
    layer = GQAQKVColumnParallelLinear(
        IN,
        [Q, KV],
        bias=False,
        gather_output=False,
        sequence_parallel_enabled=True,
        sequence_dimension=dim,
        kv_size_multiplier=times,
        fuse_qkv=fuse,
    ).to("xla")
    full = references(False)
    x = torch.randn(4, 4, IN)
    expected = x.clone().requires_grad_()
    sum(f(expected).square().sum() * n for f, n in zip(full, (1, times, times), strict=True)).backward()
    given = own([c.contiguous() for c in x.chunk(TP, dim)], ["tp"]).requires_grad_()
    q, k, v = layer(given)
    assert collectives_run() == {"all_gather": 1}
    torch.autograd.backward([q.square().sum(), k.square().sum(), v.square().sum()])
    counts = collectives_run()
    if times == 1:
        assert counts == {"all_gather": 1, "reduce_scatter": 1}
    torch.testing.assert_close(torch.cat(per_rank(given.grad), dim), expected.grad, rtol=1e-4, atol=1e-4)
    for r in range(TP):
        for got, want in zip(
            rank_rows(layer, "weight", grad=True)[r], parts_of([f.weight.grad for f in full], r, "trn1", times), strict=True
        ):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_gathered_outputs(nxd: Nxd, order: str) -> None:
    nxd(4, tp=TP)
    torch.manual_seed(9)
    layer = GQAQKVColumnParallelLinear(IN, [Q, KV], kv_size_multiplier=2).to("xla")
    full = references(True)
    x = torch.randn(3, 2, IN)
    q, k, v = layer(x.to("xla"))
    close(q, full[0](x).detach())
    for got, layer_of in ((k, full[1]), (v, full[2])):
        heads = layer_of(x).detach().unflatten(-1, (KV // HEAD, HEAD))
        copied = heads.repeat(1, 1, 2, 1) if order == "trn1" else heads.repeat_interleave(2, dim=-2)
        close(got, copied.flatten(-2))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_one_seed_gives_the_same_weights_for_every_tp(nxd: Nxd, tp: int) -> None:
    nxd(4, tp=tp)
    torch.manual_seed(9)
    layer = GQAQKVColumnParallelLinear(IN, [Q, KV], bias=False, keep_master_weight=True, dtype=torch.bfloat16)
    for master, full in zip((layer.master_weight_q, layer.master_weight_k, layer.master_weight_v), references(False), strict=True):
        assert torch.equal(master, full.weight.detach().bfloat16())
    assert layer.weight_qkv.dtype == torch.bfloat16
    assert layer.weight_qkv.shape == ((Q + 2 * KV) // tp, IN)


def test_attributes(nxd: Nxd) -> None:
    """The fused weight is marked as shared out too, which NxD's is not."""
    nxd(4, tp=TP)
    fused = GQAQKVColumnParallelLinear(IN, [Q, KV], kv_size_multiplier=2).to("xla")
    w = fused.weight_qkv
    assert (w.tensor_model_parallel, w.partition_dim, w.partition_stride, w.num_partitions, w.qkv_partition) == (True, 0, 1, 4, (4, 4, 2))
    assert fused.bias_qkv.tensor_model_parallel
    apart = GQAQKVColumnParallelLinear(IN, [Q, KV], kv_size_multiplier=2, fuse_qkv=False)
    assert (apart.weight_q.num_partitions, apart.weight_k.num_partitions, apart.weight_v.num_partitions) == (4, 2, 2)
    assert list(apart.state_dict()) == ["weight_q", "weight_k", "weight_v", "bias_q", "bias_k", "bias_v"]
    assert "kv_size_multiplier=2" in repr(apart)


def test_meta_until_initialize(nxd: Nxd) -> None:
    nxd(4, tp=TP)
    for fuse in (True, False):
        layer = GQAQKVColumnParallelLinear(IN, [Q, KV], device="meta", fuse_qkv=fuse, kv_size_multiplier=2)
        before = dict(layer.named_parameters())
        assert all(p.is_meta and p.tensor_model_parallel for p in before.values())
        torch.manual_seed(9)
        layer.initialize_weight_biases() if fuse else layer.init_weight_cpu()
        assert all(p is before[n] for n, p in layer.named_parameters())
        for r in range(TP):
            for got, want in zip(
                rank_rows(layer, "weight")[r], parts_of([f.weight.detach() for f in references(True)], r, "trn1", 2), strict=True
            ):
                assert torch.equal(got, want)


def test_init_method_and_bfloat16(nxd: Nxd) -> None:
    nxd(4, tp=TP)
    layer = GQAQKVColumnParallelLinear(
        IN, [Q, KV], gather_output=False, init_method=torch.nn.init.ones_, dtype=torch.bfloat16, kv_size_multiplier=2
    )
    layer = layer.to("xla")
    assert not layer.bias_qkv.any()
    x = torch.ones(2, 2, IN, dtype=torch.bfloat16, device="xla").requires_grad_()
    q, k, v = layer(x)
    assert {t.dtype for t in (q, k, v)} == {torch.bfloat16}
    (q.sum() + k.sum() + v.sum()).backward()
    close(x.grad.float(), torch.full((2, 2, IN), float(Q + 2 * 2 * KV)))


def test_errors(nxd: Nxd) -> None:
    nxd(4, tp=TP)
    with pytest.raises(AssertionError, match="4 is not divisible by 3: kv_size_multiplier"):
        GQAQKVColumnParallelLinear(IN, [Q, KV], kv_size_multiplier=3)
    with pytest.raises(AssertionError, match=r"2 is not divisible by 4: the outputs of K \(2\) times kv_size_multiplier=1"):
        GQAQKVColumnParallelLinear(IN, [Q, 2])
    with pytest.raises(AssertionError, match="10 is not divisible by 4: the outputs of Q"):
        GQAQKVColumnParallelLinear(IN, [10, KV])
    layer = GQAQKVColumnParallelLinear(IN, [Q, KV], sequence_parallel_enabled=True)
    with pytest.raises(AssertionError, match="gather_output=True cannot be combined"):
        layer(torch.zeros(1, 1, IN, device="xla"))
    GQAQKVColumnParallelLinear(IN, [Q, KV], kv_size_multiplier=2)
    with pytest.raises(AssertionError, match="single KV size"):
        GQAQKVColumnParallelLinear(IN, [Q, KV], kv_size_multiplier=4)
    nothing: list[Any] = [None] * 6
    with pytest.raises(ValueError, match="needs weight_qkv"):
        gqa_qkv_linear_with_async_allreduce(torch.zeros(1), *nothing, True, False, fuse_qkv=True)
    with pytest.raises(ValueError, match="needs weight_q, weight_k"):
        gqa_qkv_linear_with_async_allreduce(torch.zeros(1), *nothing, True, False)


def test_a_world_of_one(nxd: Nxd) -> None:
    nxd(1)
    torch.manual_seed(9)
    layer = GQAQKVColumnParallelLinear(IN, [Q, KV], bias=False)
    x = torch.randn(2, 3, IN)
    for out, full in zip(layer(x), references(False), strict=True):
        torch.testing.assert_close(out, full(x))
    assert parallel_state.get_tensor_model_parallel_size() == world.size() == 1


def test_rms_norm() -> None:
    norm = RMSNorm(6, eps=1e-4, sequence_parallel_enabled=True, dtype=torch.bfloat16)
    x = torch.randn(2, 3, 6).bfloat16()
    expected = torch.nn.functional.rms_norm(x.float(), (6,), eps=1e-4).bfloat16()
    assert torch.equal(norm(x), expected)
    assert norm.weight.sequence_parallel_enabled and "eps=0.0001" in repr(norm)
    y = RMSNorm((3, 6))(x.float())
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x.float(), (3, 6), eps=1e-5))
    norm.reset_parameters()
    assert (norm.weight == 1).all()
