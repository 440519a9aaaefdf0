"""LoraModel: what trains, what is counted, merging, and state dicts of all kinds that load back."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

from nxd_jax.modules.lora import LoraConfig, LoraModel
from nxd_jax.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_jax.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_jax.utils.full_weights import gather_full
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.lora.models import full, llama, logits, parallel, stir
from torch_bridge.recorder import sharded
from torch_bridge.torch_xla.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Every kind of parallel layer and a norm with a bias."""

    def __init__(self, copies: int = 1) -> None:
        super().__init__()
        self.embed = ParallelEmbedding(8, 4)
        self.qkv_proj = GQAQKVColumnParallelLinear(4, [8, 4], gather_output=False, kv_size_multiplier=copies)
        self.up = ColumnParallelLinear(8, 16, gather_output=False, stride=2)
        self.down = RowParallelLinear(16, 4, input_is_parallel=True, stride=2)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6)
        self.register_buffer("count", torch.tensor(3.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        q, _, _ = self.qkv_proj(self.embed(ids))
        from nxd_jax.tensor_parallel import regions

        return self.head(self.norm(self.down(self.up(regions.gather(q, -1, None)))))


IDS = torch.tensor([[1, 2, 7], [0, 5, 3]])
TARGETS = ["embed", "qkv_proj", "up", "down"]


def made(seed: int = 0, copies: int = 1, stirred: int | None = 3, **options: Any) -> LoraModel:
    torch.manual_seed(seed)
    options = {"lora_rank": 2, "lora_alpha": 4, "target_modules": TARGETS} | options
    model = LoraModel(Block(copies).to("xla"), LoraConfig(**options))
    if stirred is not None:
        stir(model, stirred)
    return model


def results(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS.to("xla")).cpu()


def same(a: Any, b: Any) -> bool:
    return bool(torch.allclose(results(a), results(b), rtol=1e-5, atol=1e-6))


def trained(model: LoraModel) -> set[str]:
    return {name for name, t in model.tensors().items() if t.requires_grad}


# -- what trains -------------------------------------------------------------------------------------


def test_what_trains(nxd: Nxd) -> None:
    nxd(2, tp=2)
    adapters = {f"{t}.lora_{f}.weight" for t in TARGETS for f in "AB"} - {"qkv_proj.lora_B.weight"} | {"qkv_proj.lora_B.weight_qkv"}
    assert trained(made()) == adapters
    assert trained(made(bias="lora_only")) == adapters | {"qkv_proj.bias_qkv", "up.bias", "down.bias"}
    assert trained(made(bias="all")) == adapters | {"qkv_proj.bias_qkv", "up.bias", "down.bias", "norm.bias", "head.bias"}
    assert trained(made(modules_to_save=["head"])) == adapters | {"head.weight", "head.bias"}


def test_counting_covers_all_ranks(nxd: Nxd, capsys: pytest.CaptureFixture[str]) -> None:
    counts = []
    for tp, copies in ((1, 1), (2, 1), (4, 2), (4, 4)):
        nxd(4, tp=tp)
        counts.append(made(copies=copies, stirred=None).get_nb_trainable_parameters())
    adapters = 2 * (8 + 4) + 2 * (4 + 16) + 2 * (8 + 16) + 2 * (16 + 4)
    base = 8 * 4 + 16 * (4 + 1) + 16 * (8 + 1) + 4 * (16 + 1) + 2 * 4 + 6 * (4 + 1)
    assert counts == [(adapters, adapters + base)] * 4
    made(stirred=None, copies=4).print_trainable_parameters()
    assert (
        capsys.readouterr().out
        == f"trainable params: {adapters:,} || all params: {adapters + base:,} || trainable%: {100 * adapters / (adapters + base):.4f}\n"
    )


def test_a_new_adapter_changes_nothing(nxd: Nxd) -> None:
    nxd(2, tp=2)
    torch.manual_seed(0)
    plain = Block().to("xla")
    assert torch.equal(results(plain), results(made(stirred=None)))


def test_activation_checkpointing_of_frozen_layers(nxd: Nxd) -> None:
    """Reentrant checkpointing takes part in the backward pass only if an input requires a gradient."""
    nxd(2, tp=2)
    found = []
    for checkpointed in (False, True):
        model = made()
        up, ids = model.up, IDS.to("xla")
        hidden = model.embed.base_layer(ids)
        assert hidden.requires_grad
        assert not model.embed.base_layer(ids).is_leaf and not model.eval().embed.base_layer(ids).requires_grad
        model.train()
        wide = torch.cat([hidden, hidden], -1)
        (checkpoint(up, wide) if checkpointed else up(wide)).sum().backward()
        found.append(
            full(up.lora_B.weight.grad) if up.lora_B.weight.grad is None else gather_full(up.lora_B.weight.grad, like=up.lora_B.weight)
        )
    assert found[0].any()  # type: ignore[union-attr]
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_embeddings_are_changed_in_place(device: str) -> None:
    """What a frozen embedding gives may be scaled in place, as without adapters."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            h = self.embed(ids)
            h *= 4**0.5
            h += 1
            return self.head(h)

    model, ids = Scaled(), torch.arange(5)
    expected = model(ids).detach()
    weight = model.embed.weight.detach().clone()
    lora = LoraModel(model.to(device), LoraConfig(lora_rank=2, target_modules=["head"]))
    found = lora(ids.to(device))
    found.sum().backward()
    torch.testing.assert_close(found.detach().cpu(), expected)
    assert torch.equal(lora.embed.weight.cpu(), weight) and lora.module.head.lora_B.weight.grad.any()


def test_calls_and_attributes_are_the_models(nxd: Nxd) -> None:
    nxd(1)
    base = llama()
    model = LoraModel(base, LoraConfig(lora_rank=2))
    assert model.config is base.config and model.dtype == torch.float32 and model.get_base_model() is base
    ids = torch.tensor([[1, 2, 3]])
    assert model.generate(input_ids=ids, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (1, 5)
    layer = base.model.layers[0].self_attn.q_proj
    assert layer.in_features == 16 and layer.weight is layer.base_layer.weight
    other = nn.Parameter(torch.zeros(16, 16))
    layer.weight = other
    assert layer.base_layer.weight is other and "weight" not in layer._parameters
    with pytest.raises(
        AttributeError, match="'LoraModel' object has no attribute 'nothing_like_it', nor has the 'LlamaForCausalLM' inside it"
    ):
        model.nothing_like_it  # noqa: B018
    with pytest.raises(AttributeError, match="'LoraLinear' object has no attribute 'nothing_like_it', nor has the 'Linear' inside it"):
        layer.nothing_like_it  # noqa: B018


# -- merging -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp, copies", [(1, 1), (2, 1), (4, 4)])
def test_merged_equals_unmerged(nxd: Nxd, tp: int, copies: int) -> None:
    nxd(4, tp=tp)
    model = made(copies=copies)
    before = {name: sharded.shards(t.detach()) for name, t in model.tensors().items()}
    want = results(model)
    model.merge_lora()
    model.merge_lora()
    inside = {n: t.detach() for n, t in model.tensors().items()}
    changed = {n for n in before if any(not torch.equal(a, b) for a, b in zip(sharded.shards(inside[n]), before[n], strict=True))}
    assert changed == {"embed.weight", "qkv_proj.weight_qkv", "up.weight", "down.weight"}
    model.unmerge_lora()
    for name, t in model.tensors().items():
        assert all(torch.equal(a, b) for a, b in zip(sharded.shards(t.detach()), before[name], strict=True)), name
    torch.testing.assert_close(results(model), want)
    plain = model.merge_and_unload()
    assert type(plain) is Block and type(plain.up) is ColumnParallelLinear and not model.is_lora_enabled
    torch.testing.assert_close(results(plain), want, rtol=1e-4, atol=1e-5)


def test_merging_survives_a_move_and_training() -> None:
    model = LoraModel(nn.Sequential(nn.Linear(3, 3)), LoraConfig(lora_rank=2, target_modules=["0"]))
    stir(model)
    before = model.tensors()["0.weight"].detach().clone()
    assert model.is_lora_enabled and not model.is_lora_merged and not model.is_checkpoint_loaded
    model.merge_lora()
    assert model.is_lora_merged
    model.double()
    assert not model.is_lora_merged and not model._layers["0"].merged and torch.equal(model.tensors()["0.weight"].float(), before)


def test_copies_are_models_of_their_own() -> None:
    model = LoraModel(nn.Sequential(nn.Linear(3, 3)), LoraConfig(lora_rank=2, target_modules=["0"]))
    stir(model)
    other = copy.deepcopy(model)
    stir(other, 8)
    assert not torch.equal(other.state_dict()["0.lora_A.weight"], model.state_dict()["0.lora_A.weight"])
    other.load_state_dict(model.state_dict(), strict=True)
    x = torch.randn(2, 3)
    assert torch.equal(other(x), model(x)) and other._layers["0"] is other.module[0]


def test_tied_weights_are_not_merged() -> None:
    base = nn.Sequential()
    base.add_module("embed", nn.Embedding(4, 3))
    base.add_module("head", nn.Linear(3, 4, bias=False))
    base.head.weight = base.embed.weight  # type: ignore[union-attr, assignment]
    model = LoraModel(base, LoraConfig(lora_rank=2, target_modules=["head"], save_lora_base=True))
    text = "head cannot be merged: embed.weight and head.weight are one tied weight.*merge_lora=False"
    with pytest.raises(ValueError, match=text):
        model.merge_lora()
    model.lora_config.merge_lora = True
    with pytest.raises(ValueError, match=text):
        model.state_dict()


# -- state dicts -------------------------------------------------------------------------------------

MODES: dict[str, dict[str, Any]] = {
    "adapters": {},
    "adapters, parts": {"merge_sharded_lora": False},
    "adapters with biases and head": {"bias": "all", "modules_to_save": ["head"]},
    "base and adapters": {"save_lora_base": True},
    "merged": {"save_lora_base": True, "merge_lora": True},
}


@pytest.mark.thorough(keep=5)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_all_modes_load_back(nxd: Nxd, mode: str, inside: bool) -> None:
    nxd(4, tp=2)
    source = made(save_lora_config_adapter=inside, **MODES[mode])
    if "bias" in mode:
        with torch.no_grad():
            for name, t in source.tensors().items():
                if t.requires_grad and ".lora_" not in name:
                    t.add_(0.5)
    before = {n: sharded.shards(t.detach()) for n, t in source.tensors().items()}
    state = source.state_dict()
    assert all(torch.equal(a, b) for n, t in source.tensors().items() for a, b in zip(sharded.shards(t.detach()), before[n], strict=True))
    assert ("lora_config" in state) == (inside and mode != "merged")
    assert all("module." not in n and "base_layer" not in n for n in state)
    names = {n for n in state if n != "lora_config"}
    plain = set(Block().state_dict())
    if mode == "merged":
        assert names == plain
    elif mode == "base and adapters":
        assert names == set(source.tensors())
    else:
        assert names == trained(source) and all(".lora_" in n for n in names - plain)
    if mode != "merged":
        assert state["up.lora_B.weight"].shape == ((8, 2) if mode in ("base and adapters", "adapters, parts") else (16, 2))

    other = made(seed=0 if "adapters" in mode and "base" not in mode else 5, stirred=None, **MODES[mode])
    found = other.load_state_dict(state, strict=mode != "merged")
    assert not found.missing_keys and not found.unexpected_keys
    assert same(other, source)


@pytest.mark.filterwarnings("ignore:adapters, or weights:UserWarning")
def test_full_adapters_load_for_another_number_of_ranks(nxd: Nxd) -> None:
    states, outs = [], []
    for tp in (1, 2, 4):
        nxd(4, tp=tp)
        model = made(copies=max(1, tp // 2))
        state = model.state_dict()
        states.append({k: t.cpu() for k, t in state.items()})
        outs.append(results(model))
    assert all(torch.equal(other[k], v) for other in states[1:] for k, v in states[0].items())
    model = made(stirred=8, copies=2)
    model.load_state_dict(states[0])
    torch.testing.assert_close(results(model), outs[0], rtol=1e-4, atol=1e-5)


def test_weights_of_the_base_alone_reset_adapters(nxd: Nxd, caplog: pytest.LogCaptureFixture) -> None:
    nxd(2, tp=2)
    torch.manual_seed(9)
    base = Block().to("xla")
    model = made()
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        model.load_state_dict(base.state_dict(), strict=True)
    assert "weights of the base model alone. The adapters, which had been trained, start at zero again" in caplog.text
    assert same(model, base)
    caplog.clear()
    model.load_state_dict(base.state_dict())
    assert "trained" not in caplog.text


def test_loading_while_merged(nxd: Nxd) -> None:
    nxd(2, tp=2)
    model, other = made(), made(stirred=8)
    base = model.tensors()["up.weight"].detach().clone()
    model.merge_lora()
    model.load_state_dict(other.state_dict())
    assert torch.equal(full_of(model, "up.weight"), gather_full(base, like=model.tensors()["up.weight"]))  # type: ignore[arg-type]
    assert same(model, other)
    both = made(save_lora_base=True)
    both.merge_lora()
    assert torch.equal(gather_full(both.state_dict()["up.weight"], like=both.up.weight), gather_full(base, like=both.up.weight))  # type: ignore[arg-type]


def full_of(model: LoraModel, name: str) -> torch.Tensor:
    return full(model.tensors()[name])


def test_inside_another_module(nxd: Nxd) -> None:
    nxd(2, tp=2)
    outer, other = nn.ModuleDict({"inner": made(save_lora_config_adapter=True)}), nn.ModuleDict({"inner": made(stirred=8)})
    state = outer.state_dict()
    assert "inner.up.lora_A.weight" in state and state["inner.lora_config"]["lora_rank"] == 2
    assert not other.load_state_dict(state, strict=True).missing_keys
    assert same(outer["inner"], other["inner"])
    state.pop("inner.up.lora_A.weight")
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "inner.up.lora_A.weight"'):
        other.load_state_dict(state, strict=True)


def test_names_of_other_programs(nxd: Nxd) -> None:
    nxd(1)
    base = llama()
    model = LoraModel(base, LoraConfig(lora_rank=2, save_lora_base=True))
    stir(model)
    state = {f"base_model.model.{n}": t + 1 for n, t in model.state_dict().items()}
    q = "base_model.model.model.layers.0.self_attn.q_proj"
    state[f"{q}.base_layer.weight"] = state.pop(f"{q}.weight")
    state[f"{q}.lora_A.default.weight"] = state.pop(f"{q}.lora_A.weight")
    before = model.tensors()["model.layers.0.self_attn.q_proj.weight"].detach().clone()
    assert not any(model.load_state_dict(state, strict=True))
    torch.testing.assert_close(model.tensors()["model.layers.0.self_attn.q_proj.weight"], before + 1)
    model.load_state_dict({f"module.{n}": t - 1 for n, t in model.state_dict().items()}, strict=True)
    torch.testing.assert_close(model.tensors()["model.layers.0.self_attn.q_proj.weight"], before)


def test_what_does_not_load(nxd: Nxd, caplog: pytest.LogCaptureFixture) -> None:
    nxd(2, tp=2)
    model = made(save_lora_config_adapter=True)
    state = model.state_dict()
    with pytest.raises(
        ValueError, match="none of the 1 names in the state dict is in the model. It has lm_head; the model has embed.lora_A.weight"
    ):
        model.load_state_dict({"lm_head": torch.ones(1)})
    with pytest.raises(
        ValueError,
        match=r"adapters of the state dict have lora_rank=2, lora_alpha=4, use_rslora=False, this model's lora_rank=2, lora_alpha=8",
    ):
        made(lora_alpha=8).load_state_dict(state)
    wrong = dict(state) | {"up.lora_B.weight": torch.ones(9, 2)}
    with pytest.raises(ValueError, match=r"up.lora_B.weight: .*full shape \[16, 2\], got \[9, 2\]"):
        model.load_state_dict(wrong)
    with pytest.raises(RuntimeError, match="size mismatch for module.up.lora_A.weight"):
        model.load_state_dict(dict(state) | {"up.lora_A.weight": torch.ones(3, 8)})
    partial = {k: v for k, v in state.items() if not k.startswith("up.")} | {"strange": torch.ones(1)}
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        found = model.load_state_dict(partial)
    assert found.missing_keys == ["up.lora_A.weight", "up.lora_B.weight"] and found.unexpected_keys == ["strange"]
    assert (
        "2 missing names in the state dict, such as up.lora_A.weight, up.lora_B.weight" in caplog.text
        and "1 unexpected names" in caplog.text
    )
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "strange"'):
        model.load_state_dict(partial, strict=True)


def test_merged_llama_is_the_plain_model(nxd: Nxd) -> None:
    """The merged state dict, with full tensors, in the unsharded model of Hugging Face."""
    nxd(2, tp=2)
    base = llama()
    model = LoraModel(parallel(base), LoraConfig(lora_rank=2, save_lora_base=True, merge_lora=True))
    stir(model)
    state = model.state_dict()
    known = model.tensors()
    base.load_state_dict({n: gather_full(t, like=known[n]) for n, t in state.items()})
    torch.testing.assert_close(logits(base), logits(model), rtol=1e-4, atol=1e-5)
