"""`pad_model`: the attention of a model of transformers gets heads of zeros, and nothing else changes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from neuronx_distributed.trainer import initialize_parallel_model, neuronx_distributed_config
from torch import nn

from nxd_jax.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_jax.parallel_layers import parallel_state
from nxd_jax.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from nxd_jax.parallel_layers.pad import get_number_of_extra_heads
from nxd_jax.trainer.footprint import footprint
from nxd_jax.utils.full_weights import gather_full
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.trainer.test_meta_init import fill

transformers = pytest.importorskip("transformers")

HIDDEN, HEADS, HEAD_DIM = 12, 6, 2


class SomeAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tp = parallel_state.get_tensor_model_parallel_size()
        self.heads = (HEADS + get_number_of_extra_heads(HEADS, tp)) // tp
        self.qkv = ColumnParallelLinear(HIDDEN, 3 * HEADS * HEAD_DIM, stride=3, gather_output=False)
        self.out = RowParallelLinear(HEADS * HEAD_DIM, HIDDEN, input_is_parallel=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, HEAD_DIM)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Padded(transformers.PreTrainedModel):
    config_class = transformers.PretrainedConfig

    def __init__(self, attention: Any = SomeAttention) -> None:
        super().__init__(transformers.PretrainedConfig(num_attention_heads=HEADS))
        self.attention = attention()
        self.up = ColumnParallelLinear(HIDDEN, 16, gather_output=False)  # 16 is no multiple of 6: it must be left alone
        self.down = RowParallelLinear(16, HIDDEN, input_is_parallel=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x + self.attention(x))))


def make(tp: int, model_fn: Any = Padded, meta: bool = False, pad: bool = True) -> Any:
    init = {"meta_device_init": True, "param_init_fn": fill} if meta else None
    config = neuronx_distributed_config(tensor_parallel_size=tp, pad_model=pad, model_init_config=init)
    torch.manual_seed(0)
    return initialize_parallel_model(config, model_fn)


@pytest.mark.parametrize("meta", [False, True])
def test_heads_are_padded_and_results_stay(nxd: Nxd, meta: bool) -> None:
    x = torch.randn(2, 5, HIDDEN)
    nxd(1)
    expected = make(1, meta=meta)(x.to("xla")).cpu()
    nxd(4, tp=4)
    model = make(4, meta=meta)
    attention = model.attention
    assert attention.qkv.weight.shape == (3 * 8 * HEAD_DIM // 4, HIDDEN) and attention.out.weight.shape == (HIDDEN, 8 * HEAD_DIM // 4)
    assert model.up.weight.shape == (4, HIDDEN) and model.down.weight.shape == (HIDDEN, 4)
    full = gather_full(attention.out.weight)
    assert isinstance(full, torch.Tensor) and full[:, HEADS * HEAD_DIM :].eq(0).all() and full[:, : HEADS * HEAD_DIM].ne(0).all()
    torch.testing.assert_close(model(x.to("xla")).cpu(), expected, rtol=1e-4, atol=1e-6)
    config = neuronx_distributed_config(tensor_parallel_size=4, pad_model=True)
    shapes = {e.name: e.shape for e in footprint(config, Padded).entries if e.kind == "parameter"}
    assert shapes == {n: tuple(p.shape) for n, p in model.named_parameters()}


def test_heads_that_divide_are_left_alone(nxd: Nxd) -> None:
    nxd(2, tp=2)
    assert make(2).attention.out.weight.shape == (HIDDEN, HEADS * HEAD_DIM // 2)
    assert make(2, lambda: transformers.LlamaForCausalLM(tiny(4))).config.num_attention_heads == 4


def tiny(heads: int) -> Any:
    return transformers.LlamaConfig(
        vocab_size=16, hidden_size=12, intermediate_size=12, num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=heads
    )


def test_what_cannot_be_padded(nxd: Nxd) -> None:
    nxd(4, tp=4)
    with pytest.raises(
        AssertionError,
        match=re.escape("pad_model=True needs a model of transformers, whose config has num_attention_heads, got Linear: call"),
    ):
        make(4, lambda: nn.Linear(2, 2))
    with pytest.raises(
        ValueError,
        match="6 attention heads do not divide by tensor_parallel_size=4, and LlamaForCausalLM has no module that is called ...Attention",
    ):
        make(4, lambda: transformers.LlamaForCausalLM(tiny(6)))

    class FusedAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = GQAQKVColumnParallelLinear(HIDDEN, [12, 12])
            self.out = RowParallelLinear(12, HIDDEN, input_is_parallel=True)

    with pytest.raises(
        ValueError,
        match="pads ColumnParallelLinear and RowParallelLinear, not 'attention.qkv', a GQAQKVColumnParallelLinear: give the model",
    ):
        make(4, lambda: Padded(FusedAttention))
