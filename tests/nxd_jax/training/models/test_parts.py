"""Parts of the models: what they refuse, weights of files, precision, and models that begin alike however they are laid out."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_xla
import transformers
from torch import nn

from nxd_jax.training.models.hf_models import hf_weights, options, rotary
from nxd_jax.training.models.hf_models.attention import CoreAttention, LlamaAttention, kv_copies
from nxd_jax.training.models.hf_models.layers import LlamaRMSNorm
from nxd_jax.training.models.hf_models.loss import CausalLMLoss
from nxd_jax.training.models.hf_models.modeling_llama import LlamaForCausalLM
from nxd_jax.training.models.hf_models.modeling_mixtral import MixtralForCausalLM
from nxd_jax.utils.model_utils import init_on_device
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.training.models import cases
from tests.nxd_jax.training.models.cases import Case


def config(case: Case, kind: Any = transformers.LlamaConfig) -> Any:
    found = cases.configuration(kind, case)
    for name, value in case.options.items():
        setattr(found, name, value)
    return found


KV = r"kv_replicator=3 with num_key_value_heads=2, num_attention_heads=8 and tensor_model_parallel_size=4: one of 2, 4"
MISTAKES: list[tuple[Case, str]] = [
    (Case(4, 4, heads=8, options={"kv_shared_group_size": 3}), KV),
    (
        Case(2, 2, heads=3, kv=1, config={"hidden_size": 24}),
        "num_attention_heads=3 of the model's config.json must be a multiple of tensor_model_parallel_size=2",
    ),
    (Case(2, 2, heads=6, kv=4), "num_attention_heads=6 must be a multiple of num_key_value_heads=4"),
    (Case(2, 2, config={"vocab_size": 65}), "vocab_size=65 of the model's config.json must be a multiple of tensor_model_parallel_size=2"),
    (Case(2, 2, config={"intermediate_size": 65}), "intermediate_size=65 of the model's config.json must be a multiple"),
    (Case(options={"use_ring_attention": True, "use_flash_attention": True}), "flash_attention and fusions.ring_attention are both True"),
    (Case(2, cp=2), r"context_parallel_size=2 needs model.fusions.ring_attention=True"),
    (
        Case(2, cp=2, options={"use_ring_attention": True, "sliding_window": 4}),
        "sliding_window=4 .* ring attention is causal only. Set context_parallel_size=1",
    ),
]


@pytest.mark.parametrize(("case", "text"), MISTAKES, ids=lambda x: x[:40] if isinstance(x, str) else "")
def test_mistakes(case: Case, text: str, nxd: Nxd) -> None:
    nxd(case.world, tp=case.tp, cp=case.cp)
    with pytest.raises(ValueError, match=text):
        model = LlamaForCausalLM(config(case)).to("xla")
        model(torch.zeros(1, 8, dtype=torch.long, device="xla"))


def test_what_these_models_do_not_do(nxd: Nxd) -> None:
    nxd(1)
    case = Case(config={"num_hidden_layers": 1})
    ids = torch.zeros(1, 4, dtype=torch.long, device="xla")
    for model, more in (
        (LlamaForCausalLM(config(case)), {}),
        (MixtralForCausalLM(config(case, transformers.MixtralConfig)), {"use_cache": True}),
    ):
        with pytest.raises(
            NotImplementedError,
            match=r"output_attentions: this model trains on token ids .* leave it out|use_cache, output_attentions: .* them out",
        ):
            model.to("xla")(ids, output_attentions=True, **more)
    assert [x.shape for x in LlamaForCausalLM(config(case)).to("xla")(ids)] == [(1, 4, cases.VOCAB)]
    bad = config(case)
    bad.rope_parameters = {"rope_type": "spiral"}
    with pytest.raises(ValueError, match=r"rope_type 'spiral' must be one of default, .*llama3"):
        rotary.kind_of(bad)
    bad.head_dim, bad.hidden_size = None, 33
    with pytest.raises(ValueError, match=r"hidden_size=33 must be a multiple of num_attention_heads=4, or give head_dim"):
        LlamaAttention(bad)


def test_copies_of_kv_heads_are_chosen(nxd: Nxd, caplog: pytest.LogCaptureFixture) -> None:
    nxd(8, tp=8)
    options.say_once.cache_clear()
    with caplog.at_level(logging.INFO, "nxd_jax"):
        assert [kv_copies(config(Case(heads=16, kv=kv))) for kv in (2, 2, 4, 8, 16)] == [4, 4, 2, 1, 1]
    said = [r.message for r in caplog.records if "K/V heads" in r.message]
    assert (
        said[0] == "2 K/V heads do not divide by tensor_model_parallel_size=8: each is held 4 times (distributed_strategy.kv_replicator=4)"
    )
    assert len(said) == 2


def test_weights_of_files(nxd: Nxd) -> None:
    """Of Mixtral, whose files have a tensor for each expert."""
    nxd(2, tp=2)
    case = Case(2, 2, config={"num_hidden_layers": 1, "num_local_experts": 3})
    want = transformers.MixtralForCausalLM(config(case, transformers.MixtralConfig))
    files: dict[str, torch.Tensor] = {}
    for name, value in want.state_dict().items():
        prefix, _, kind = name.replace(".mlp.", ".block_sparse_moe.").rpartition(".")
        for j, expert in enumerate(value if prefix.endswith("experts") else ()):
            parts = dict(zip(("w1", "w3"), expert.chunk(2), strict=True)) if kind == "gate_up_proj" else {"w2": expert}
            files |= {f"{prefix}.{j}.{part}.weight": tensor for part, tensor in parts.items()}
        if not prefix.endswith("experts"):
            files[f"{prefix}.{kind}"] = value
    model = MixtralForCausalLM(config(case, transformers.MixtralConfig))
    hf_weights.load_hf_weights(model, files)
    found = hf_weights.to_hf_weights(model)
    assert found.keys() == want.state_dict().keys()
    for name, value in want.state_dict().items():
        assert torch.equal(found[name], value), name
    del files["model.layers.0.block_sparse_moe.experts.1.w1.weight"], files["model.norm.weight"]
    files = {name: value for name, value in files.items() if "w3" not in name}
    with pytest.raises(KeyError, match=r"has no model.layers.0.mlp.experts.gate_up_proj, model.norm.weight"):
        hf_weights.load_hf_weights(model, files)


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("kind", [LlamaForCausalLM, MixtralForCausalLM])
def test_the_same_model_for_every_layout(kind: Any, nxd: Nxd) -> None:
    found = []
    of = transformers.LlamaConfig if kind is LlamaForCausalLM else transformers.MixtralConfig
    for case in (Case(), Case(2, 2), Case(4, 4, options={"sequence_parallel_enabled": True, "kv_shared_group_size": 1})):
        nxd(case.world, tp=case.tp)
        torch.manual_seed(3)
        model = kind(config(Case(**{**vars(case), "kv": 4, "options": {**case.options, "qkv_linear": True}}), of))
        found.append(hf_weights.to_hf_weights(model.to("xla")))
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]) and torch.equal(value, found[2][name]), name
    scale = found[0]["model.layers.0.self_attn.q_proj.weight"].std().item()
    assert math.isclose(scale, 0.02, rel_tol=0.1)


@pytest.mark.filterwarnings("ignore:XLA_DOWNCAST_BF16:FutureWarning")
def test_angles_and_norms_in_float32_where_tensors_are_bfloat16(nxd: Nxd, monkeypatch: pytest.MonkeyPatch) -> None:
    nxd(1)
    monkeypatch.setenv("XLA_DOWNCAST_BF16", "1")
    case = Case()
    embedding = rotary.LlamaRotaryEmbedding(config(case)).to("xla")
    cos, sin = embedding(torch.zeros(1, 1, 2000, 8, device="xla"))
    want = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config(case))(torch.zeros(1), torch.arange(2000)[None])
    for ours, theirs in zip((cos, sin), want, strict=True):
        torch.testing.assert_close(ours.cpu().float(), theirs[0], rtol=0, atol=2e-3)  # bfloat16 angles would be off by pi
    x = torch.randn(4, 512)
    normed = LlamaRMSNorm(512, 1e-5).to("xla")(x.to("xla")).cpu().float()
    torch.testing.assert_close(normed, F.rms_norm(x, (512,), eps=1e-5), rtol=1.2e-2, atol=1e-2)
    model = embedding.bfloat16()  # gives the frequencies back
    assert torch.equal(model(torch.zeros(1, 1, 2000, 8, device="xla"))[0].cpu(), cos.cpu())


def test_given_places(nxd: Nxd) -> None:
    nxd(1)
    embedding = rotary.LlamaRotaryEmbedding(config(Case())).to("xla")
    x, places = torch.zeros(2, 1, 5, 8, device="xla"), torch.tensor([[4, 3, 2, 1, 0], [0, 1, 2, 3, 4]]).to("xla")
    plain, given = embedding(x)[0].cpu(), embedding(x, places)[0].cpu()
    assert given.shape == (2, 1, 5, 8) and torch.equal(given[1, 0], plain) and torch.equal(given[0, 0], plain.flip(0))
    with init_on_device("meta", include_buffers=True):
        empty = rotary.LlamaRotaryEmbedding(config(Case()))
    assert empty.inv_freq.is_meta
    empty.reset("cpu")
    assert torch.equal(empty.inv_freq, embedding.inv_freq.cpu())


def test_dropout_of_attention(nxd: Nxd) -> None:
    nxd(2, tp=2)
    core = CoreAttention(dropout=0.5)
    q = torch.randn(1, 2, 8, 4, device="xla")
    one = torch.ones(1, 2, 8, 4, device="xla")
    assert not torch.equal(core(q, q, one).cpu(), one.cpu())
    torch.testing.assert_close(core.eval()(q, q, one).cpu(), one.cpu())


def test_labels_that_do_not_count(nxd: Nxd) -> None:
    nxd(1)
    logits, labels = torch.randn(2, 4, 8), torch.tensor([[1, 2, -100, 3], [-100, 4, 5, 6]])
    loss: nn.Module = CausalLMLoss()
    want = F.cross_entropy(logits[:, :-1].reshape(-1, 8), labels[:, 1:].reshape(-1))
    torch.testing.assert_close(loss(logits.to("xla"), labels.to("xla")).cpu(), want)
    assert loss(logits.to("xla"), torch.full_like(labels, -100).to("xla")).item() == 0.0
    torch_xla.sync()
