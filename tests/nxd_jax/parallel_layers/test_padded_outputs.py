"""`ColumnParallelLinear(pad=True)`: outputs that exist only for the vocabulary to divide are never chosen, and full state dicts fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import neuronx_distributed
import pytest
import torch
import torch.nn.functional as F

from nxd_jax.parallel_layers import checkpointing
from nxd_jax.parallel_layers.layers import ColumnParallelLinear
from nxd_jax.parallel_layers.loss_functions import parallel_cross_entropy
from nxd_jax.parallel_layers.mappings import gather_from_tensor_model_parallel_region
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.parallel_layers.parts import close, joined, per_rank

V, PADDED = 5, 8
LEAST = torch.finfo(torch.float32).min
MODES: dict[str, dict[str, Any]] = {"gathered": {}, "kept": {"keep_padded_output": True}, "apart": {"gather_output": False}}


def pair(mode: str, **kwargs: Any) -> tuple[torch.nn.Linear, ColumnParallelLinear]:
    torch.manual_seed(3)
    reference = torch.nn.Linear(4, V)
    torch.manual_seed(3)
    return reference, ColumnParallelLinear(4, V, pad=True, **MODES[mode], **kwargs).to("xla").eval()


def whole(layer: ColumnParallelLinear, x: torch.Tensor) -> torch.Tensor:
    y = layer(x.to("xla"))
    return per_rank(y if layer.gather_output else gather_from_tensor_model_parallel_region(y))[0]


def full_bias(layer: ColumnParallelLinear) -> torch.Tensor:
    return per_rank(layer.bias)[0] if layer.gather_output else joined(layer.bias, 0)


@pytest.mark.parametrize("mode", MODES)
def test_a_new_layer(nxd: Nxd, mode: str) -> None:
    nxd(8, tp=4)
    reference, layer = pair(mode)
    x = torch.randn(3, 4)
    y = whole(layer, x)
    torch.testing.assert_close(y[:, :V], reference(x).detach())
    assert full_bias(layer).tolist() == [*reference.bias.tolist(), *[LEAST] * (PADDED - V)]
    assert y.shape[1] == (V if mode == "gathered" else PADDED)
    assert y[:, V:].eq(LEAST).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_full_state_dict(nxd: Nxd, mode: str) -> None:
    """All logits are negative: a padded one of 0 would win."""
    nxd(4, tp=4)
    _, layer = pair(mode)
    full = {"weight": -torch.ones(V, 4), "bias": -torch.arange(1.0, V + 1)}
    layer.load_state_dict(checkpointing.get_sharded_model_dict(layer, full))
    y = whole(layer, torch.ones(1, 4))
    assert y[0, :V].tolist() == [-5, -6, -7, -8, -9] and y.argmax() == 0
    assert full["bias"].shape == (V,)  # the dict given is not changed
    with pytest.raises(RuntimeError, match=r"bias has 8 entries along dim 0, ColumnParallelLinear with padding needs the 5"):
        checkpointing.get_sharded_model_dict(layer, {"weight": torch.ones(V, 4), "bias": torch.ones(PADDED)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_hold_the_least_number(nxd: Nxd, dtype: torch.dtype) -> None:
    """A float32 bias is padded with a number that the layer's dtype has: not -inf."""
    nxd(4, tp=4)
    _, layer = pair("kept", dtype=dtype)
    assert full_bias(layer)[V:].tolist() == [torch.finfo(dtype).min] * 3
    layer.load_state_dict(checkpointing.get_sharded_model_dict(layer, {"weight": torch.zeros(V, 4), "bias": torch.zeros(V)}))
    assert full_bias(layer)[V:].tolist() == [torch.finfo(dtype).min] * 3


def test_cross_entropy_does_not_see_the_padding(nxd: Nxd) -> None:
    nxd(8, tp=4)
    reference, layer = pair("apart")
    x, target = torch.randn(6, 4), torch.randint(0, V, (6,))
    logits = layer(x.to("xla"))
    loss = parallel_cross_entropy(logits, target.to("xla"))
    close(loss, F.cross_entropy(reference(x), target, reduction="none").detach())


def test_without_a_bias_padded_outputs_are_zero(nxd: Nxd) -> None:
    nxd(4, tp=4)
    _, layer = pair("kept", bias=False)
    assert not whole(layer, torch.randn(2, 4))[:, V:].any()


def test_skip_bias_add_gives_both_without_padding(nxd: Nxd) -> None:
    nxd(4, tp=4)
    reference, layer = pair("gathered", skip_bias_add=True)
    x = torch.randn(2, 4)
    y, bias = layer(x.to("xla"))
    close(y + bias, reference(x).detach())


def test_checkpoints_keep_the_padding(nxd: Nxd, tmp_path: Path) -> None:
    """Of before, too: their arrays have the padded size, and what they hold for the padding."""
    nxd(4, tp=4)
    reference, layer = pair("kept")
    neuronx_distributed.save_checkpoint(str(tmp_path), "now", model=layer)
    with torch.no_grad():
        layer.bias.zero_()
    neuronx_distributed.load_checkpoint(str(tmp_path), "now", model=layer)
    assert full_bias(layer).tolist() == [*reference.bias.tolist(), *[LEAST] * (PADDED - V)]
