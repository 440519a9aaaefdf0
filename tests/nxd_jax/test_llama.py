"""examples/llama against the unsharded Hugging Face model on the same weights: the loss, every gradient, and where every shard lies."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
import transformers

from nxd_jax.parallel_layers import grads, parallel_state
from nxd_jax.utils.batch_utils import get_batch_on_this_context_parallel_rank, shift_labels
from tests.nxd_jax.conftest import Nxd
from torch_bridge.recorder import sharded

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples" / "llama"))
import hf_weights
from modeling_llama_nxd import LlamaForCausalLM, NxDLlamaOptions

VOCAB, SEQ, ROWS = 64, 16, 2
RTOL, ATOL = 1e-4, 1e-6
"""Of every gradient; atol is relative to the largest gradient of the parameter."""


@dataclasses.dataclass(frozen=True)
class Case:
    world: int
    tp: int
    cp: int = 1
    sp: bool = False
    copies: int = 1
    fuse: bool = True
    bias: bool = False
    flash: bool = False
    dtype: torch.dtype = torch.float32
    heads: int = 4
    kv: int = 2

    def __str__(self) -> str:
        flags = [n for n in ("sp", "fuse", "bias", "flash") if getattr(self, n)]
        return f"{self.world}:tp{self.tp}-cp{self.cp}-kv{self.kv}x{self.copies}-{'-'.join(flags)}-{str(self.dtype)[6:]}"


BF16 = torch.bfloat16
CASES = [
    Case(1, 1),
    Case(1, 1, sp=True, bias=True, fuse=False),
    Case(2, 1),
    Case(2, 2),
    Case(2, 2, sp=True),
    Case(2, 2, bias=True, fuse=False),
    Case(2, 1, cp=2),
    Case(4, 2),
    Case(4, 2, sp=True, bias=True),
    Case(4, 2, cp=2),
    Case(4, 1, cp=4, flash=True),
    Case(4, 4, copies=2),
    Case(4, 4, copies=2, fuse=False, bias=True),
    Case(4, 4, copies=4, kv=1),
    Case(4, 4, kv=4, sp=True),
    Case(4, 2, flash=True),
    Case(8, 2, cp=2, sp=True),
    Case(8, 4, copies=2, sp=True, bias=True),
    Case(8, 2, cp=4, bias=True),
    Case(8, 8, heads=8, kv=2, copies=4),
    Case(8, 8, heads=8, kv=4, copies=2, fuse=False, sp=True),
    Case(8, 4, cp=2, copies=2, fuse=False, sp=True, bias=True),
    Case(16, 4, kv=4),
    Case(16, 8, heads=8, kv=4, copies=2, cp=2, sp=True),
    Case(32, 8, heads=8, kv=8, sp=True),
    Case(32, 8, heads=8, kv=2, copies=4, bias=True),
    Case(64, 16, heads=16, kv=4, copies=4),
    Case(64, 8, heads=8, kv=8, cp=2, sp=True),
    Case(2, 2, dtype=BF16),
    Case(8, 4, copies=2, sp=True, dtype=BF16),
]


def reference(case: Case) -> tuple[transformers.LlamaForCausalLM, transformers.LlamaConfig]:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8 * case.heads,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv,
        attention_bias=case.bias,
        mlp_bias=case.bias,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model.to(case.dtype).float(), config


def gradients(model: LlamaForCausalLM, case: Case, ids: torch.Tensor) -> float:
    """Run forward and backward on each data-parallel rank's own rows and reduce; returns the mean loss."""
    dp, rank = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    rows = ids.to("xla")
    own = rows[rank * ROWS : (rank + 1) * ROWS] if dp > 1 else rows
    place = get_batch_on_this_context_parallel_rank if case.cp > 1 else shift_labels
    loss, _ = model(**place({"input_ids": own, "labels": own}))
    loss.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if case.cp > 1:
        grads.allreduce_context_parallel_gradients(optimizer)
    if case.sp:
        grads.allreduce_sequence_parallel_gradients(optimizer)
    grads.bucket_allreduce_gradients([p.grad for p in model.parameters()])
    mean = xm.all_reduce("sum", loss.detach(), 1 / dp, groups=parallel_state.get_data_parallel_group(as_list=True))
    return xm.all_reduce("sum", mean, 1 / case.cp, groups=parallel_state.get_context_model_parallel_group(as_list=True)).item()


@pytest.mark.core(keep=2)
@pytest.mark.thorough(keep=5)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_unsharded_model(case: Case, nxd: Nxd) -> None:
    nxd(case.world, tp=case.tp, cp=case.cp)
    want, config = reference(case)
    options = NxDLlamaOptions(case.sp, case.copies, case.fuse, case.flash, case.dtype)
    model = LlamaForCausalLM(config, options)
    hf_weights.from_full(model, want.state_dict())
    model.to("xla")
    check_shards(model, case, want.state_dict())

    ids = torch.randint(0, VOCAB, (parallel_state.get_data_parallel_size() * ROWS, SEQ))
    loss = want(input_ids=ids, labels=ids).loss
    loss.backward()
    exact = case.dtype == torch.float32
    torch.testing.assert_close(gradients(model, case, ids), loss.item(), rtol=1e-5 if exact else 2e-3, atol=1e-5)
    check_agreement(model)
    found = hf_weights.to_full(model, grads=True)
    assert found.keys() == dict(want.named_parameters()).keys()
    for name, parameter in want.named_parameters():
        assert parameter.grad is not None
        scale = parameter.grad.abs().max().item()
        if exact:
            torch.testing.assert_close(found[name], parameter.grad, rtol=RTOL, atol=ATOL + 1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert (found[name].float() - parameter.grad).abs().max().item() < 0.05 * scale, name


def check_shards(model: LlamaForCausalLM, case: Case, full: dict[str, torch.Tensor]) -> None:
    """Parallel weights differ along tp alone, everything else is shared; a few shards are looked at."""
    for name, parameter in model.named_parameters():
        axes = sharded.varying(parameter).axes
        parallel = getattr(parameter, "tensor_model_parallel", False) and case.tp > 1
        assert axes == (("tp",) if parallel else ()), name
    tp_rank = [
        group.index(r) for r in range(case.world) for group in parallel_state.get_tensor_model_parallel_group(as_list=True) if r in group
    ]
    part, hidden = VOCAB // case.tp, 8 * case.heads
    embedding = full["model.embed_tokens.weight"].to(case.dtype)
    gate = full["model.layers.0.mlp.gate_proj.weight"].to(case.dtype).chunk(case.tp)
    up = full["model.layers.0.mlp.up_proj.weight"].to(case.dtype).chunk(case.tp)
    down = full["model.layers.0.mlp.down_proj.weight"].to(case.dtype).chunk(case.tp, dim=1)
    layer = model.model.layers[0].mlp
    found: dict[str, Any] = {
        "embedding": sharded.shards(model.model.embed_tokens.weight),
        "gate_up": sharded.shards(layer.gate_up_proj.weight),
        "down": sharded.shards(layer.down_proj.weight),
    }
    for rank, k in enumerate(tp_rank):
        assert found["embedding"][rank].shape == (part, hidden)
        assert torch.equal(found["embedding"][rank], embedding[k * part : (k + 1) * part])
        assert torch.equal(found["gate_up"][rank], torch.cat([gate[k], up[k]]))
        assert torch.equal(found["down"][rank], down[k])


def check_agreement(model: LlamaForCausalLM) -> None:
    """After the reductions a parameter's gradient differs among ranks exactly as the parameter does."""
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and sharded.varying(parameter.grad).axes == sharded.varying(parameter).axes, name


def test_weights_go_to_hugging_face_and_back(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    case = Case(8, 4, copies=2, bias=True)
    want, config = reference(case)
    want.save_pretrained(tmp_path / "hf")
    nxd(case.world, tp=case.tp)
    model = LlamaForCausalLM(config, NxDLlamaOptions(kv_size_multiplier=2)).to("xla")
    hf_weights.load(model, tmp_path / "hf")
    hf_weights.save(model, tmp_path / "back")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "back")
    for name, value in want.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    with pytest.raises(FileNotFoundError, match=r"holds no \.safetensors file"):
        hf_weights.load(model, tmp_path)


def test_same_weights_for_every_tp(nxd: Nxd) -> None:
    full = {}
    for tp in (1, 2, 4):
        nxd(4, tp=tp)
        torch.manual_seed(3)
        full[tp] = hf_weights.to_full(LlamaForCausalLM(reference(Case(4, tp, kv=4))[1]).to("xla"))
    for name, value in full[1].items():
        assert torch.equal(value, full[2][name]) and torch.equal(value, full[4][name]), name
    assert dist.is_initialized()
