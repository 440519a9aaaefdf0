"""Mixtral with parallel layers against transformers' on the same weights: the loss with the auxiliary loss, and every gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from nxd_jax.parallel_layers import parallel_state
from nxd_jax.training.lightning_modules.model.base import BaseModelModule
from nxd_jax.training.models.hf_models.modeling_mixtral import MixtralForCausalLM
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.training.models import cases
from tests.nxd_jax.training.models.cases import ROWS, Case

EXPERTS, TOP_K, COEFFICIENT = 4, 2, 0.5
FULL, DROPLESS, DROPPING = {"capacity_factor": None}, {"capacity_factor": 0.0}, {"capacity_factor": 1.0}
SP = {"sequence_parallel_enabled": True}
CASES = [
    Case(2, 2, options=DROPPING),
    Case(2, 1, ep=2, options=FULL),
    Case(2, 2, options={"capacity_factor": 2.0, **SP}, ignored=3),
    Case(2, 2, options=DROPLESS),
    Case(4, 2, ep=2, options={**DROPLESS, **SP}),
    Case(4, 2, ep=2, options=DROPPING),
    Case(4, 4, options={**FULL, **SP, "use_flash_attention": True}),
    Case(2, 1, cp=2, options={**FULL, "use_ring_attention": True}),
    Case(2, 2, options=FULL, config={"sliding_window": 5}),
    Case(2, 2, options={**FULL, "use_flash_attention": True}, config={"sliding_window": 5, "tie_word_embeddings": True}),
    Case(2, 2, kv=4, options=FULL),
    Case(2, 2, options=FULL, config={"num_experts_per_tok": 3, "num_local_experts": 6}),
    Case(2, 2, options=FULL, config={"output_router_logits": False}),
]


def configuration(case: Case) -> Any:
    sizes = {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "router_aux_loss_coef": COEFFICIENT, "output_router_logits": True}
    return cases.configuration(transformers.MixtralConfig, Case(**{**vars(case), "config": {**sizes, **case.config}}))


def drop(factor: float) -> Any:
    """Experts that take the first tokens only, up to their capacity; the weights of what is left are normalised again."""
    forward = MixtralExperts.forward

    def dropping(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, k = index.shape
        capacity = min(tokens, math.ceil(tokens * k * factor / self.num_experts))
        chosen = torch.zeros(tokens, self.num_experts, dtype=torch.long).scatter(1, index, 1)
        kept = (chosen.cumsum(0) <= capacity).gather(1, index)
        assert not kept.all()
        weights = weights * kept
        return forward(self, hidden, index, weights / weights.sum(-1, keepdim=True).clamp(min=1e-12))

    return dropping


def expected(want: nn.Module, ids: torch.Tensor, labels: torch.Tensor, parts: int, k: int) -> float:
    """The mean over what ranks have (rows, or runs of the sequence): transformers' loss with its auxiliary loss divided by k, and its gradients."""
    total = 0.0
    rows = ids.shape[0] // ROWS
    for some, target in zip(ids.split(ROWS), labels.split(ROWS), strict=True):
        found = want(input_ids=some, labels=target)
        loss = found.loss
        if want.config.output_router_logits:
            loss = loss - COEFFICIENT * found.aux_loss
            length = ids.shape[1] // parts
            for part in range(parts):
                logits = [g.unflatten(0, (ROWS, -1))[:, part * length : (part + 1) * length].flatten(0, 1) for g in found.router_logits]
                aux = transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func(tuple(logits), want.config.num_local_experts, k)
                loss = loss + COEFFICIENT * aux / k / parts
        (loss / rows).backward()
        total += loss.item() / rows
    return total


def test_the_norm_counts_each_expert_once(nxd: Nxd) -> None:
    """(q) The original's parameter_norm takes no notice of expert parallelism."""
    case = Case(2, 1, ep=2, options=FULL)
    nxd(case.world, ep=case.ep)
    config = configuration(case)
    want = cases.reference(transformers.MixtralForCausalLM, config)
    model = cases.ours(MixtralForCausalLM, case, config, want)
    norm_of: Any = BaseModelModule.calculate_parameter_norm
    expected = torch.cat([p.detach().flatten() for p in want.parameters()]).norm()
    assert norm_of(None, model.parameters()).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.core(keep=0)
@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_transformers(case: Case, nxd: Nxd, monkeypatch: pytest.MonkeyPatch) -> None:
    nxd(case.world, tp=case.tp, cp=case.cp, ep=case.ep)
    config = configuration(case)
    want = cases.reference(transformers.MixtralForCausalLM, config)
    for name, parameter in want.named_parameters():
        if name.endswith("gate.weight"):
            nn.init.normal_(parameter, std=0.5)  # uneven
    model = cases.ours(MixtralForCausalLM, case, config, want)
    ids, labels = cases.batch(case)
    assert parallel_state.get_data_parallel_size() * ROWS == len(ids)
    if case.options["capacity_factor"] == 1.0:
        monkeypatch.setattr(MixtralExperts, "forward", drop(1.0))
    loss = expected(want, ids, labels, case.cp, config.num_experts_per_tok)
    torch.testing.assert_close(cases.step(model, case, ids, labels), loss, rtol=1e-5, atol=1e-5)
    cases.check_gradients(model, want, rtol=2e-4)
