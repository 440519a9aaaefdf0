"""Ring attention against attention over the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from nxd_jax.kernels.ring_attention_kernel import nki_ring_attn_func
from nxd_jax.parallel_layers import parallel_state
from tests.nxd_jax.conftest import Nxd
from torch_bridge.recorder import sharded

B, H, D = 2, 3, 8


def place(rank: int) -> int:
    return next(g.index(rank) for g in parallel_state.get_context_model_parallel_group(as_list=True) if rank in g)


def own(full: torch.Tensor, cp: int) -> torch.Tensor:
    """Each context-parallel rank's run of the sequence."""
    length = full.shape[2] // cp
    return sharded.from_ranks(lambda r: full.detach()[:, :, place(r) * length : (place(r) + 1) * length].contiguous(), ["cp"])


def check(found: torch.Tensor, expected: torch.Tensor, cp: int) -> None:
    """Every rank has its run of the expected sequence."""
    for rank, part in enumerate(sharded.shards(found)):
        torch.testing.assert_close(part, expected.detach().chunk(cp, 2)[place(rank)], rtol=1e-4, atol=1e-5)


def run(cp: int, length: int, causal: bool, pairs: Any) -> None:
    full = [torch.randn(B, H, cp * length, D, requires_grad=True) for _ in range(3)]
    grad = torch.randn(B, H, cp * length, D)
    expected = F.scaled_dot_product_attention(*full, is_causal=causal)
    expected.backward(grad)
    q, k, v = mine = [own(t, cp).requires_grad_() for t in full]
    out = nki_ring_attn_func(q, k, v, dist.get_rank(), pairs, causal=causal)
    out.backward(own(grad, cp))
    check(out, expected, cp)
    for t, whole in zip(mine, full, strict=True):
        assert t.grad is not None and whole.grad is not None
        check(t.grad, whole.grad, cp)


@pytest.mark.core(keep=2)
@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [3, 270])
@pytest.mark.parametrize("size", [{"size": 2, "cp": 2}, {"size": 4, "cp": 4}, {"size": 8, "cp": 4, "tp": 2}, {"size": 8, "cp": 2, "tp": 2}])
def test_parity(nxd: Nxd, size: dict[str, int], length: int, causal: bool) -> None:
    nxd(**size)
    run(size["cp"], length, causal, parallel_state.get_context_model_parallel_src_tgt_pairs())


def test_forms_of_pairs(nxd: Nxd) -> None:
    nxd(4, cp=2, tp=2)
    for pairs in (None, [], [[[0, 2], [2, 0]], [[1, 3], [3, 1]]], ((0, 2), (2, 0), (1, 3), (3, 1)), [[2, 0], [0, 2], [3, 1], [1, 3]]):
        run(2, 5, True, pairs)


def test_rings_that_are_no_mesh_axis(nxd: Nxd) -> None:
    """Rings [0, 3] and [1, 2] of a plain world of four."""
    nxd(4)
    full = [torch.randn(B, H, 10, D, requires_grad=True) for _ in range(3)]
    grad, runs = torch.randn(B, H, 10, D), [0, 0, 1, 1]
    expected = F.scaled_dot_product_attention(*full, is_causal=True)
    expected.backward(grad)

    def cut(t: torch.Tensor) -> torch.Tensor:
        return sharded.from_ranks(lambda r: t.detach()[:, :, 5 * runs[r] : 5 * runs[r] + 5].contiguous())

    mine = [cut(t).requires_grad_() for t in full]
    out = nki_ring_attn_func(*mine, dist.get_rank(), [[0, 3], [3, 0], [1, 2], [2, 1]])
    out.backward(cut(grad))
    for found, whole in ((out, expected), *((t.grad, w.grad) for t, w in zip(mine, full, strict=True))):
        assert found is not None and whole is not None
        for rank, part in enumerate(sharded.shards(found)):
            torch.testing.assert_close(part, whole.detach()[:, :, 5 * runs[rank] : 5 * runs[rank] + 5], rtol=1e-4, atol=1e-5)


def test_shared_inputs_give_different_results(nxd: Nxd) -> None:
    """Ranks that hold the same run still stand at different places of the sequence."""
    nxd(2, cp=2)
    x = torch.randn(B, H, 4, D)
    same = x.to("xla")
    out = nki_ring_attn_func(same, same, same, dist.get_rank(), parallel_state.get_context_model_parallel_src_tgt_pairs())
    assert sharded.varying(out).axes == ("cp",)
    check(out, F.scaled_dot_product_attention(*[torch.cat([x, x], 2)] * 3, is_causal=True), 2)


def test_dropout(nxd: Nxd) -> None:
    """Over all of a ring's keys, with masks of each rank's own, and the same ones in the backward pass: v is the identity, so the output shows them."""
    nxd(2, cp=2)
    length = 200
    q = sharded.from_ranks(lambda r: torch.zeros(1, 1, length, 1), ["cp"])
    v = sharded.from_ranks(lambda r: F.pad(torch.eye(length), [r * length, (1 - r) * length])[None, None], ["cp"]).requires_grad_()
    pairs = parallel_state.get_context_model_parallel_src_tgt_pairs()
    out = nki_ring_attn_func(q, q, v, dist.get_rank(), pairs, dropout_p=0.4, causal=False)
    out.sum().backward()
    assert v.grad is not None
    a, b = (part * 2 * length * 0.6 for part in sharded.shards(out))
    for part in (a, b):
        assert abs((part != 0).float().mean() - 0.6) < 5 * (0.24 / part.numel()) ** 0.5
        torch.testing.assert_close(part[part != 0], torch.ones_like(part[part != 0]))
    assert not torch.equal(a, b)
    columns = (torch.cat([a, b], 2) / (2 * length * 0.6)).sum(2)[0, 0]
    for rank, grad in enumerate(sharded.shards(v.grad)):
        torch.testing.assert_close(grad[0, 0, :, 0], columns[rank * length : (rank + 1) * length])


def test_bfloat16(nxd: Nxd) -> None:
    nxd(4, cp=4)
    full = [torch.randn(B, H, 40, D).bfloat16() for _ in range(3)]
    out = nki_ring_attn_func(*[own(t, 4) for t in full], 0, parallel_state.get_context_model_parallel_src_tgt_pairs())
    assert out.dtype == torch.bfloat16
    expected = F.scaled_dot_product_attention(*(t.float() for t in full), is_causal=True).chunk(4, 2)
    for rank, part in enumerate(sharded.shards(out)):
        torch.testing.assert_close(part.float(), expected[rank], rtol=2e-2, atol=2e-2)


def test_world_of_one(nxd: Nxd) -> None:
    nxd(1)
    q = torch.randn(B, H, 7, D)
    for x in (q, q.to("xla")):
        out = nki_ring_attn_func(x, x, x, dist.get_rank(), parallel_state.get_context_model_parallel_src_tgt_pairs())
        torch.testing.assert_close(out.cpu(), F.scaled_dot_product_attention(q, q, q, is_causal=True), rtol=1e-4, atol=1e-5)


def test_errors(nxd: Nxd) -> None:
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        nki_ring_attn_func(*[torch.randn(1, 1, 2, 2)] * 3, 0, None)
    nxd(2, cp=2)
    x = torch.randn(B, H, 4, D)
    with pytest.raises(ValueError, match="ranks exchange keys and values on xla, got tensors on cpu"):
        nki_ring_attn_func(x, x, x, 0, None)
    with pytest.raises(ValueError, match=r"src_tgt_pairs=\[\[0, 1\]\] are no rings"):
        nki_ring_attn_func(x, x, x, 0, [[0, 1]])
    with pytest.raises(ValueError, match="q and k of one shape"):
        nki_ring_attn_func(x.to("xla"), x[:, :, :2].to("xla"), x[:, :, :2].to("xla"), 0, None)
