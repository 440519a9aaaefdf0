"""`torch_xla.experimental.custom_kernel`: flash attention against the formula, and what the other kernels say."""

from __future__ import annotations

import pytest
import torch
from torch_xla.distributed.spmd import Mesh
from torch_xla.experimental import custom_kernel
from torch_xla.experimental.custom_kernel import flash_attention, gmm, jax_import_guard, paged_attention

BATCH, HEADS, LENGTH, KEYS, DIM = 2, 3, 5, 5, 4


def by_hand(q, k, v, causal, ids, scale, ab):  # type: ignore[no-untyped-def]
    scores = q @ k.mT
    if ab is not None:
        scores = scores + ab
    scores = scores * scale
    seen = torch.ones(BATCH, 1, LENGTH, KEYS, dtype=torch.bool)
    if causal:
        seen = seen.tril()
    if ids is not None:
        seen = seen & (ids[:, None, :, None] == ids[:, None, None, :])
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v


@pytest.mark.thorough(keep=14)
@pytest.mark.core(keep=4)
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("with_ab", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_flash_attention(device: str, causal: bool, with_ids: bool, with_ab: bool, scale: float) -> None:
    """The bias is added before the scale, and the scale is 1 where none is given."""
    torch.manual_seed(0)
    values = {name: torch.randn(BATCH, HEADS, LENGTH, DIM) for name in "qkv"}
    if with_ab:
        values["ab"] = torch.randn(BATCH, HEADS, LENGTH, KEYS)
    ids = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]]) if with_ids else None
    want = {name: t.clone().requires_grad_() for name, t in values.items()}
    found = {name: t.to(device).requires_grad_() for name, t in values.items()}
    out = by_hand(want["q"], want["k"], want["v"], causal, ids, scale, want.get("ab"))
    given = {} if scale == 1.0 else {"sm_scale": scale}
    own = None if ids is None else ids.to(device)
    made = flash_attention(found["q"], found["k"], found["v"], causal, own, own, ab=found.get("ab"), **given)
    torch.testing.assert_close(made.cpu(), out, rtol=1e-4, atol=1e-5)
    weights = torch.randn(out.shape)
    (out * weights).sum().backward()
    (made * weights.to(device)).sum().backward()
    for name, t in want.items():
        grad = found[name].grad
        assert grad is not None and t.grad is not None
        torch.testing.assert_close(grad.cpu(), t.grad, rtol=1e-4, atol=1e-5)


def test_a_query_without_keys_sees_all_alike() -> None:
    """As the original, whose scores of hidden keys are low but not infinite."""
    q, k, v = (torch.randn(1, 1, 2, 4).to("xla") for _ in range(3))
    out = flash_attention(q, k, v, False, torch.tensor([[0, 7]]).to("xla"), torch.tensor([[0, 0]]).to("xla"))
    torch.testing.assert_close(out[0, 0, 1].cpu(), v.cpu()[0, 0].mean(0))


def test_errors() -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(RuntimeError, match=r"sharding annotations are for programs over all devices. Call torch_xla.runtime.use_spmd"):
        flash_attention(q, q, q, partition_spec=(None,) * 4, mesh=Mesh([0], (1,)))
    with pytest.raises(ValueError, match=r"flash_attention\(partition_spec=...\): give a mesh"):
        flash_attention(q, q, q, partition_spec="('data', None, None, None)")
    with pytest.raises(ValueError, match=r"partition_spec 'data, ' is no tuple: write it as"):
        flash_attention(q, q, q, partition_spec="data, ", mesh=str(Mesh([0], (1,))))
    with pytest.raises(ValueError, match="takes q_segment_ids and kv_segment_ids together"):
        flash_attention(q, q, q, q_segment_ids=torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"wants ab of shape \[1, 1, 2, 2\], got \[2, 2\]"):
        flash_attention(q, q, q, ab=torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"wants kv_segment_ids of shape \[1, 2\], got \[1, 3\]"):
        flash_attention(q, q, q, q_segment_ids=torch.zeros(1, 2), kv_segment_ids=torch.zeros(1, 3))
    with pytest.raises(ValueError, match="repeat the K/V heads of grouped-query attention first"):
        flash_attention(q, q[:, :, :, :3], q, ab=torch.zeros(1, 1, 2, 2))
    for kernel in (gmm, paged_attention):
        with pytest.raises(
            NotImplementedError,
            match=rf"custom_kernel.{kernel.__name__}: Pallas kernels for TPUs are not there.* Write a kernel of your own",
        ):
            kernel(q)
    with pytest.raises(AttributeError, match="'torch_xla.experimental.custom_kernel' has no attribute 'nothing'"):
        custom_kernel.nothing  # noqa: B018
    assert custom_kernel.requires_jax(jax_import_guard) is jax_import_guard
    assert jax_import_guard() is None  # type: ignore[func-returns-value]
