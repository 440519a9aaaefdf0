"""Dropout of Megatron GPT: which ranks draw alike, and that what is computed again draws the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_xla
from torch import nn

from nxd_jax.parallel_layers.random import get_xla_rng_tracker, model_parallel_xla_manual_seed
from nxd_jax.tensor_parallel.full_weights import gather_full
from nxd_jax.training.models.megatron.gpt_model import GPTModel
from nxd_jax.training.models.megatron.module import RankDropout
from nxd_jax.training.models.megatron.transformer import CoreAttention, ParallelTransformerLayer
from nxd_jax.utils.activation_checkpoint import apply_activation_checkpointing, checkpoint_wrapper
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.training.models import megatron_cases
from tests.nxd_jax.training.models.megatron_cases import Case
from torch_bridge.recorder import sharded


def gradients(recomputed: Any, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    model_parallel_xla_manual_seed(3)
    model = GPTModel(**megatron_cases.arguments(Case("gpt2", options=options)))
    if recomputed is not None:
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, recomputed))
    model = model.to("xla").train()
    model_parallel_xla_manual_seed(4)
    torch.manual_seed(4)
    ids, labels, mask = megatron_cases.batch()
    found = {}
    for _ in range(2):
        loss = model(ids.to("xla"), torch.arange(megatron_cases.SEQ).expand_as(ids).to("xla"), labels.to("xla"), mask.to("xla"))
        loss.backward()
        torch_xla.sync()
    found["loss"] = loss.detach().cpu()
    return found | {name: gather_full(p.grad, like=p) for name, p in model.named_parameters()}


@pytest.mark.thorough(keep=2)
@pytest.mark.core(keep=0)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (CoreAttention, {"ffn_dropout": 0.3}),
        (CoreAttention, {"sequence_parallel": True, "hidden_dropout": 0.3}),
        (ParallelTransformerLayer, {"sequence_parallel": True, "hidden_dropout": 0.3}),
        (ParallelTransformerLayer, {"ffn_dropout": 0.3}),
    ],
    ids=str,
)
def test_what_is_computed_again_draws_the_same(options: dict[str, Any], kind: type[nn.Module], nxd: Nxd) -> None:
    nxd(2, tp=2)
    options = {"attention_dropout": 0.3, "num_layers": 1, **options}
    want, found = gradients(None, options), gradients(kind, options)
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_layers_that_are_called_where_ranks_draw_differently(nxd: Nxd) -> None:
    """As the original's loop over layers does: the whole loop within the tracker's state."""
    nxd(2, tp=2)
    model_parallel_xla_manual_seed(3)
    model = nn.Sequential(checkpoint_wrapper(nn.Dropout(0.5)))
    x = torch.ones(64, device="xla", requires_grad=True)
    with get_xla_rng_tracker().fork():
        out = model(x)
    out.backward(torch.ones(64, device="xla"))
    assert all(map(torch.equal, sharded.shards(x.grad), sharded.shards(out.detach())))  # type: ignore[arg-type]
    assert not torch.equal(*sharded.shards(x.grad))  # type: ignore[arg-type]


def test_ranks_draw_by_what_they_hold(nxd: Nxd) -> None:
    nxd(2, tp=2)
    model_parallel_xla_manual_seed(3)
    x = torch.ones(64, device="xla")
    apart, alike = RankDropout(0.5, by_rank=True)(x), RankDropout(0.5, by_rank=False)(x)
    one, two = sharded.shards(apart)
    assert not torch.equal(one, two) and set(one.tolist()) == {0.0, 2.0}
    one, two = sharded.shards(alike)
    assert torch.equal(one, two)
    assert torch.equal(RankDropout(0.5, by_rank=True).eval()(x).cpu(), torch.ones(64))
    by_rank = {
        name: m.by_rank for name, m in GPTModel(**megatron_cases.arguments(Case("gpt2"))).named_modules() if isinstance(m, RankDropout)
    }
    assert {name.rpartition(".")[2]: value for name, value in by_rank.items()} == {
        "embedding_dropout": False,
        "hidden_dropout": False,
        "dropout": True,
    }
    with_sp = GPTModel(**megatron_cases.arguments(Case("gpt2", options={"sequence_parallel": True})))
    assert all(m.by_rank for m in with_sp.modules() if isinstance(m, RankDropout))
