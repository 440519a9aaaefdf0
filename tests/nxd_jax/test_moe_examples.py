"""examples/moe against transformers' models on the same weights: loss, logits and every gradient; weights there and back."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm
import transformers

from nxd_jax.modules.moe import load
from nxd_jax.parallel_layers import parallel_state
from nxd_jax.trainer.optimizer import reduce_gradients
from nxd_jax.utils.batch_utils import shift_labels
from tests.nxd_jax.conftest import Nxd
from torch_bridge.recorder import sharded

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples" / "moe"))
import hf_experts
from modeling_moe_nxd import DeepseekForCausalLM, MixtralForCausalLM, NxDMoEOptions, deepseek_experts

VOCAB, SEQ, ROWS = 64, 12, 2
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=SEQ,
    tie_word_embeddings=False,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    world: int = 1
    tp: int = 1
    ep: int = 1
    sp: bool = False
    experts: int = 8

    def __str__(self) -> str:
        return f"{self.model}-{self.world}-tp{self.tp}-ep{self.ep}{'-sp' if self.sp else ''}"


CASES = [
    Case("mixtral"),
    Case("mixtral", 4, tp=2, ep=2),
    Case("deepseek"),
    Case("deepseek", 4, tp=2, ep=2),
    Case("mixtral", 4, tp=2, ep=2, sp=True),
    Case("deepseek", 4, tp=2, sp=True),
    Case("mixtral", 8, tp=1, ep=8),
    Case("deepseek", 8, tp=2, ep=4, sp=True),
    Case("mixtral", 2, tp=2),
]


def config_of(case: Case) -> Any:
    if case.model == "mixtral":
        return transformers.MixtralConfig(**SIZES, num_local_experts=case.experts, output_router_logits=True, router_aux_loss_coef=0.3)
    return transformers.Glm4MoeConfig(
        **SIZES,
        head_dim=8,
        moe_intermediate_size=20,
        n_routed_experts=case.experts,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        num_mtp_layers=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    )


def reference(case: Case) -> Any:
    """transformers' model, with routers that prefer some experts."""
    torch.manual_seed(0)
    config = config_of(case)
    kind = transformers.MixtralForCausalLM if case.model == "mixtral" else transformers.Glm4MoeForCausalLM
    model = kind._from_config(config, attn_implementation="eager", experts_implementation="eager")
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("mlp.gate.weight"):
            torch.nn.init.normal_(value, std=0.5)
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(value, std=0.1)
    return model


def ours(case: Case, full: dict[str, torch.Tensor], **options: Any) -> Any:
    kind, balance = (MixtralForCausalLM, "loss") if case.model == "mixtral" else (DeepseekForCausalLM, "bias")
    model = kind(config_of(case), NxDMoEOptions(**{"sequence_parallel": case.sp, "balance": balance, **options}))
    hf_experts.from_full(model, full)
    return model.to("xla")


@pytest.mark.thorough(keep=2)
@pytest.mark.core(keep=0)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_transformers(case: Case, nxd: Nxd) -> None:
    """Each data-parallel rank has its own rows, and its own auxiliary loss: what transformers gives for them, averaged."""
    nxd(case.world, tp=case.tp, ep=case.ep)
    want = reference(case)
    model = ours(case, want.state_dict())
    dp, rank = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    ids = torch.randint(0, VOCAB, (dp * ROWS, SEQ), generator=torch.Generator().manual_seed(1))
    parts = [want(input_ids=part, labels=part) for part in ids.chunk(dp)]
    wanted = torch.stack([part.loss for part in parts]).mean()
    wanted.backward()

    rows = ids.to("xla")
    own = rows[rank * ROWS : (rank + 1) * ROWS] if dp > 1 else rows
    loss, logits = model(**shift_labels({"input_ids": own, "labels": own}))
    loss.backward()
    reduce_gradients(torch.optim.SGD(model.parameters(), lr=0.0))
    mean = xm.all_reduce("sum", loss.detach(), 1 / dp, groups=parallel_state.get_data_parallel_group(as_list=True))
    torch.testing.assert_close(mean.item(), wanted.item(), rtol=1e-5, atol=1e-6)
    held = sharded.shards(logits.detach())[: case.tp]  # of the first data-parallel rank
    torch.testing.assert_close(torch.cat(held, -1), parts[0].logits.detach(), rtol=1e-4, atol=1e-5)
    found = hf_experts.to_full(model, grads=True)
    assert found.keys() == dict(want.named_parameters()).keys()
    for name, parameter in want.named_parameters():
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6 + 1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", ["mixtral", "deepseek"])
def test_weights_go_to_hugging_face_and_back(name: str, nxd: Nxd, tmp_path: pathlib.Path) -> None:
    """Bit for bit: a state dict, the folder that `save_pretrained` writes (an expert in each tensor), and the folder that we write."""
    case = Case(name, 8, tp=2, ep=2)
    nxd(case.world, tp=case.tp, ep=case.ep)
    want = reference(case)
    want.save_pretrained(tmp_path / "theirs")
    full = want.state_dict()
    model = ours(case, full)
    hf_experts.save(model, tmp_path / "ours")
    again = type(want).from_pretrained(tmp_path / "ours").state_dict()
    for source in (full, hf_experts.hf_weights.read(tmp_path / "theirs")):
        other = ours(case, source)
        assert hf_experts.to_full(other).keys() == full.keys()
        for key, value in hf_experts.to_full(other).items():
            assert torch.equal(value, full[key]) and torch.equal(again[key], value), key
    mlp = model.model.layers[1].mlp.expert_mlps.mlp_op
    gate_up, down = full["model.layers.1.mlp.experts.gate_up_proj"], full["model.layers.1.mlp.experts.down_proj"]
    width = down.shape[2] // case.tp
    rank = 3  # the second half of the experts, and of each
    assert torch.equal(sharded.shards(mlp.down_proj.weight)[rank], down[4:, :, width:].transpose(1, 2))
    gate, up = gate_up[4:].chunk(2, 1)
    assert torch.equal(sharded.shards(mlp.gate_up_proj.weight)[rank], torch.cat([gate[:, width:], up[:, width:]], 1).transpose(1, 2))


def test_names_of_older_files() -> None:
    """w1, w2 and w3 of each expert, in `block_sparse_moe`, however the experts are in order."""
    experts = 11
    parts = {w: torch.randn(experts, *shape) for w, shape in {"w1": (3, 2), "w3": (3, 2), "w2": (2, 3)}.items()}
    prefix = "model.layers.0.block_sparse_moe"
    files = {f"{prefix}.experts.{j}.{w}.weight": t[j] for w, t in parts.items() for j in range(experts)} | {
        f"{prefix}.gate.weight": torch.ones(1)
    }
    found = hf_experts.stacked(dict(sorted(files.items())))
    assert found.keys() == {f"model.layers.0.mlp.{name}" for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj")}
    assert torch.equal(found["model.layers.0.mlp.experts.gate_up_proj"], torch.cat([parts["w1"], parts["w3"]], 1))
    assert torch.equal(found["model.layers.0.mlp.experts.down_proj"], parts["w2"])
    back = hf_experts.apart(found, mixtral=True)
    assert back.keys() == files.keys() and all(torch.equal(back[name], t) for name, t in files.items())


def test_deepseek_v3_has_these_experts(nxd: Nxd) -> None:
    """transformers' DeepSeek-V3 layer with its own weights, through the names of the table."""
    nxd(1)
    config = transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        moe_intermediate_size=20,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    )
    config._experts_implementation = "eager"
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    theirs = DeepseekV3MoE(config)
    for value in (*theirs.parameters(), *theirs.buffers()):
        torch.nn.init.normal_(value, std=0.3)
    full = {f"x.mlp.{name}": value for name, value in theirs.state_dict().items()}
    layer = deepseek_experts(config, NxDMoEOptions(), torch.nn.init.normal_)
    for name, value in (*layer.named_parameters(), *layer.named_buffers()):
        if not name.endswith("_places"):
            value.data.copy_(hf_experts.full_value(f"x.mlp.{name}", lambda key: full[key].detach(), []))
    x = torch.randn(2, 6, 32)
    torch.testing.assert_close(layer.to("xla")(x.to("xla"))[0].cpu(), theirs(x), rtol=1e-4, atol=1e-5)


def test_balances_that_do_not_exist(nxd: Nxd) -> None:
    nxd(1)
    with pytest.raises(ValueError, match="balance='aux' is not one of loss, bias, none"):
        MixtralForCausalLM(config_of(Case("mixtral")), NxDMoEOptions(balance="aux"))
    with pytest.raises(ValueError, match='balance="loss" is Mixtral\'s; here routers have a bias: use "bias"'):
        DeepseekForCausalLM(config_of(Case("deepseek")), NxDMoEOptions())


def test_a_bias_balances_mixtral_without_a_loss(nxd: Nxd) -> None:
    """Steps in which only the routers' biases move: the busiest expert gets less."""
    nxd(2, ep=2)
    torch.manual_seed(0)
    case = Case("mixtral")
    model = ours(case, reference(case).state_dict(), balance="bias")
    balancer = load.ExpertBalancer(model, rate=0.01)
    ids = torch.randint(0, VOCAB, (32, SEQ)).to("xla")
    seen = []
    for _ in range(20):
        loss, _ = model(ids, ids)
        balancer.step()
        seen.append(max(layer.imbalance for layer in load.measure(model, reset=True).values()))
    assert torch.isfinite(loss.detach().cpu()).all()
    assert max(seen[-3:]) < 1.4 and seen[0] > 1.65, seen
    assert all(name in hf_experts.to_full(model) for name in ("model.layers.0.mlp.gate.e_score_correction_bias",))
