"""A pipeline without NxD's optimizer: run_train itself averages gradients, experts' over the ranks that hold the same ones."""

from __future__ import annotations

from typing import Any

import torch

from nxd_jax.pipeline.model import NxDPPModel
from nxd_jax.tensor_parallel import grads
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.modules.moe.training import Block, Layout, Model
from torch_bridge.recorder import sharded

LAYOUT = Layout(8, pp=2, ep=2, microbatches=2, aux=0.0)


def trained(**options: Any) -> NxDPPModel:
    torch.manual_seed(0)
    model = NxDPPModel(
        Model(LAYOUT),
        Block,
        num_microbatches=2,
        output_loss_value_spec=True,
        auto_partition=True,
        input_names=["ids", "labels"],
        **options,
    )
    model.run_train(**LAYOUT.local(LAYOUT.batches()[0]))
    return model


def test_gradients_of_experts_and_others(nxd: Nxd) -> None:
    nxd(8, pp=2, ep=2)
    found, by_hand = trained(), trained(use_optimizer_wrapper=True)
    grads.average_over_data_parallel_ranks(by_hand.parameters())
    experts = 0
    for (name, p), other in zip(found.named_parameters(), by_hand.parameters(), strict=True):
        experts += grads.is_expert(p)
        for a, b in zip(sharded.shards(p.grad), sharded.shards(other.grad), strict=True):
            torch.testing.assert_close(a, b, msg=lambda t, name=name: f"{name}: {t}")
    assert experts == 4
