"""Rotary embeddings against transformers, and against the formulas written out in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import torch_bridge
from nxd_jax.modules.attention.utils import apply_rotary_polar_compatible, apply_scaling, precompute_freqs_cis

LLAMA_31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA_32 = {**LLAMA_31, "factor": 32.0}
SHORT = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0, "original_max_position_embeddings": 512}


def scaled(freq: float, factor: float, low_freq_factor: float, high_freq_factor: float, original_max_position_embeddings: float) -> float:
    """Llama 3.1's rule, one frequency at a time."""
    wavelength = 2 * math.pi / freq
    if wavelength > original_max_position_embeddings / low_freq_factor:
        return freq / factor
    if wavelength < original_max_position_embeddings / high_freq_factor:
        return freq
    smooth = (original_max_position_embeddings / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    return (1 - smooth) * freq / factor + smooth * freq


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize(("dim", "theta"), [(64, 10000.0), (80, 500000.0), (2, 10000.0)])
def test_angles(dim: int, theta: float, device: str) -> None:
    found = precompute_freqs_cis(dim, 40, theta, device=device)
    assert found.shape == (40, dim // 2) and found.dtype == torch.float32 and found.device.type == device
    expected = [[p / theta ** (2 * i / dim) for i in range(dim // 2)] for p in range(40)]
    torch.testing.assert_close(found.cpu().double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0)


@pytest.mark.core(keep=3)
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("rule", [LLAMA_31, LLAMA_32, SHORT], ids=["3.1", "3.2", "short"])
def test_scaling(rule: dict[str, Any], device: str) -> None:
    """As transformers' llama has it, and as the rule says; the frequencies are of all three kinds."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    numbers = {name: value for name, value in rule.items() if name != "rope_type"}
    found = precompute_freqs_cis(128, 100, 500000.0, use_scaled=True, device=device, **numbers).cpu()
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=131072, rope_parameters={**rule, "rope_theta": 500000.0}
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(100)[None])
    torch.testing.assert_close(found.cos(), cos[0, :, :64], rtol=0, atol=1e-5)
    torch.testing.assert_close(found.sin(), sin[0, :, :64], rtol=0, atol=1e-5)
    plain = [500000.0 ** (-2 * i / 128) for i in range(64)]
    expected = torch.tensor([scaled(f, **numbers) for f in plain], dtype=torch.float64)
    torch.testing.assert_close(found[1].double(), expected, rtol=1e-5, atol=0)
    ratios = (expected / torch.tensor(plain, dtype=torch.float64)).numpy()
    slowest = 1 / rule["factor"]
    assert np.isclose(ratios, 1).any() and np.isclose(ratios, slowest).any() and ((ratios > slowest + 0.01) & (ratios < 0.99)).any()


def test_defaults_are_those_of_llama_31() -> None:
    numbers = {name: value for name, value in LLAMA_31.items() if name != "rope_type"}
    plain = precompute_freqs_cis(128, 9)
    assert torch.equal(precompute_freqs_cis(128, 9, use_scaled=True), precompute_freqs_cis(128, 9, use_scaled=True, **numbers))
    assert torch.equal(precompute_freqs_cis(128, 9, factor=3.0), plain)  # without use_scaled they are not asked for
    assert not torch.equal(precompute_freqs_cis(128, 9, use_scaled=True), plain)


@pytest.mark.core(keep=3)
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0), (torch.float16, 0)])
def test_rotation(dtype: torch.dtype, tolerance: float, device: str) -> None:
    """As transformers' llama 4, which multiplies complex numbers; key and value heads are fewer."""
    from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

    q, k = torch.randn(2, 17, 4, 16, dtype=dtype), torch.randn(2, 17, 2, 16, dtype=dtype)
    angles = precompute_freqs_cis(16, 17)
    expected = apply_rotary_emb(q, k, torch.polar(torch.ones_like(angles), angles)[None])
    for given in (angles, angles[None], angles.expand(2, 17, 8)):
        found = apply_rotary_polar_compatible(q.to(device), k.to(device), given.to(device))
        for one, wanted in zip(found, expected, strict=True):
            assert one.dtype == dtype
            close = torch.finfo(dtype).eps if tolerance == 0 else tolerance
            torch.testing.assert_close(one.cpu(), wanted, rtol=close, atol=max(close, 1e-6))


def test_positions_of_rows() -> None:
    """Rows at different positions, as in decoding: [batch, 1, dim / 2]. As many heads as angles: nothing may be taken for something else."""
    angles = precompute_freqs_cis(8, 50)
    q = torch.randn(3, 1, 4, 8)
    found, same = apply_rotary_polar_compatible(q, q, angles[[7, 0, 49]].unsqueeze(1))
    assert torch.equal(found, same)
    for row, position in enumerate((7, 0, 49)):
        for i in range(4):
            turn = complex(math.cos(float(angles[position, i])), math.sin(float(angles[position, i])))
            for head in range(4):
                z = complex(*q[row, 0, head, 2 * i : 2 * i + 2].tolist()) * turn
                assert found[row, 0, head, 2 * i : 2 * i + 2].tolist() == pytest.approx([z.real, z.imag], abs=1e-5)


def test_scores_depend_on_distances_alone() -> None:
    q, k = torch.randn(1, 1, 2, 32).expand(1, 30, 2, 32), torch.randn(1, 1, 2, 32).expand(1, 30, 2, 32)
    q, k = apply_rotary_polar_compatible(q, k, precompute_freqs_cis(32, 30, use_scaled=True))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
    torch.testing.assert_close(scores[..., 1:, 1:], scores[..., :-1, :-1], rtol=1e-4, atol=1e-4)


def test_gradients_and_graphs() -> None:
    class Turns(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> Any:
            return apply_rotary_polar_compatible(q, k, precompute_freqs_cis(8, 5, use_scaled=True, device=q.device))

    def grads(device: str) -> list[torch.Tensor]:
        q, k = (x.clone().to(device).requires_grad_() for x in inputs)
        one, other = Turns()(q, k)
        (one * weights.to(device)).sum().backward(retain_graph=True)
        (other * 2).sum().backward()
        return [q.grad.cpu(), k.grad.cpu()]

    inputs, weights = [torch.randn(1, 5, 2, 8) for _ in range(2)], torch.randn(1, 5, 2, 8)
    for one, other in zip(grads("cpu"), grads("xla"), strict=True):
        torch.testing.assert_close(one, other)
    graph = torch_bridge.capture(Turns(), *inputs)
    for one, other in zip(graph(*inputs), Turns()(*inputs), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda q: apply_rotary_polar_compatible(q, q, torch.zeros(3, 4).bfloat16()),
            ValueError,
            "torch.bfloat16: angles must be torch.float32",
        ),
        (lambda q: apply_rotary_polar_compatible(q, q, torch.zeros(3, 4).double()), ValueError, "freqs_cis has dtype torch.float64"),
        (lambda q: apply_rotary_polar_compatible(q, q, torch.zeros(3, 1)), ValueError, "query has heads of size 8 and freqs_cis 1 angles"),
        (
            lambda q: apply_rotary_polar_compatible(q, q[..., :4], torch.zeros(3, 4)),
            ValueError,
            "key has heads of size 4 and freqs_cis 4 angles",
        ),
        (
            lambda q: precompute_freqs_cis(8, 3, use_scaled=True, rope_theta=1.0),
            TypeError,
            "has no rope_theta: it takes factor, low_freq_factor",
        ),
        (lambda q: apply_scaling(q, low_freq_factor=4), ValueError, "high_freq_factor=4 must be above low_freq_factor=4"),
    ],
)
def test_errors(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(torch.zeros(1, 3, 2, 8))
