"""The ops of gated MLPs on xla, without values, and on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_bridge.lowerings import grouped_mlp
from torch_bridge.runtime import backend

M, K, N, G, MEAN = 20, 4, 6, 3, 7


@pytest.fixture(scope="module")
def ops() -> Any:
    backend.ensure()
    from torch_bridge.recorder.grouped_mlp_ops import ops

    return ops


def given(device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((M, K), (G, K, 2 * N), (G, N, K))
    return [*(torch.randn(s, generator=generator).to(device) for s in shapes), torch.tensor([5, 5, 18], dtype=torch.int32).to(device)]


def test_devices_agree(ops: Any) -> None:
    found = {}
    for device in ("cpu", "xla"):
        tensors = given(device)
        out, kept = ops.grouped_mlp(*tensors, "silu", MEAN)
        found[device] = [out.cpu(), *(g.cpu() for g in ops.grouped_mlp_backward(out, *tensors, kept, "silu", MEAN))]
    torch.testing.assert_close(found["cpu"], found["xla"], rtol=1e-5, atol=1e-5)
    x, gate_up, down, _ = given("cpu")
    gate, up = (x[:5] @ gate_up[0]).chunk(2, -1)
    torch.testing.assert_close(found["xla"][0][:5], (torch.nn.functional.silu(gate) * up) @ down[0], rtol=1e-5, atol=1e-5)
    assert not found["xla"][0][18:].any()


def test_shapes_without_values(ops: Any) -> None:
    tensors = given("meta")
    out, kept = ops.grouped_mlp(*tensors, "silu", MEAN)
    assert (out.shape, kept.shape) == ((M, K), (grouped_mlp.kept_rows(M, G, MEAN), 2 * N))
    grads = ops.grouped_mlp_backward(out, *tensors, kept, "silu", MEAN)
    assert [g.shape for g in grads] == [t.shape for t in tensors[:3]]
