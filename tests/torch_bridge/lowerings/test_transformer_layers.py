"""Whole attention and encoder layers, as torch's modules call them in evaluation, against eager torch."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
import torch
from torch import nn

import torch_bridge
from tests.torch_bridge.lowerings.parity import check
from torch_bridge import metrics
from torch_bridge.lowerings import transformer_layers

torch_bridge.register()
aten = torch.ops.aten

G = torch.Generator().manual_seed(0)
X = torch.randn(2, 6, 16, generator=G)
PAD = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
CAUSAL = torch.ones(6, 6, dtype=torch.bool).triu(1)
EACH = (torch.rand(2, 2, 6, 6, generator=G) > 0.6).logical_and(~torch.eye(6, dtype=torch.bool))
MASKS = [(None, None), (CAUSAL, 0), (PAD, 1), (EACH, 2)]


def _weights(*sizes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(*size, generator=G) * 0.3 for size in sizes]


PROJECTIONS = _weights((48, 16), (48,), (16, 16), (16,))
REST = _weights((16,), (16,), (16,), (16,), (24, 16), (24,), (16, 24), (16,))


@pytest.mark.parametrize(("mask", "kind"), MASKS)
def test_attention(mask: torch.Tensor | None, kind: int | None) -> None:
    for average in (True, False):
        check(aten._native_multi_head_attention.default, X, X, X, 16, 2, *PROJECTIONS, mask, True, average, kind)


def test_attention_to_others() -> None:
    found = aten._native_multi_head_attention(
        *(t.to("xla") for t in (X, X + 1, X * 2)), 16, 4, *(w.to("xla") for w in PROJECTIONS), None, False
    )
    expected = aten._native_multi_head_attention(X, X + 1, X * 2, 16, 4, *PROJECTIONS, None, False)
    torch.testing.assert_close(found[0].cpu(), expected[0])
    assert found[1] is None


@pytest.mark.parametrize(("mask", "kind"), MASKS)
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_layer(norm_first: bool, mask: torch.Tensor | None, kind: int | None) -> None:
    use_gelu = kind != 1
    check(aten._transformer_encoder_layer_fwd.default, X, 16, 2, *PROJECTIONS, use_gelu, norm_first, 1e-5, *REST, mask, kind)


def test_a_mask_of_an_unknown_kind() -> None:
    arrays = [jnp.asarray(t.numpy()) for t in (X, X, X, *PROJECTIONS, PAD)]
    with pytest.raises(ValueError, match=r"a mask needs mask_type 0 .* got 3"):
        transformer_layers.native_multi_head_attention(*arrays[:3], 16, 2, *arrays[3:], mask_type=3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_modules_in_evaluation_stay_on_the_device() -> None:
    """What a padded position gives is what it gives in training: eager torch on the CPU makes it zero in evaluation (nested tensors), torch_xla does not."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2).eval()
    attention = nn.MultiheadAttention(16, 2, batch_first=True).eval()

    def run(device: str) -> list[torch.Tensor]:
        x, pad = X.to(device), PAD.to(device)
        return [
            encoder(x).cpu(),
            encoder(x, src_key_padding_mask=pad)[~pad].cpu(),
            *(t.cpu() for t in attention(x, x, x, key_padding_mask=pad)),
        ]

    with torch.no_grad():
        expected = run("cpu")
        encoder.to("xla"), attention.to("xla")
        metrics.clear_counters()
        torch.testing.assert_close(run("xla"), expected)
    assert not [name for name in metrics.COUNTERS if name.startswith("aten::")]
