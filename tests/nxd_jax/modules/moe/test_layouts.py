"""Training a model with experts gives what one rank gives under the same drop rule, in every layout."""

from __future__ import annotations

import pytest

from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.modules.moe.training import Layout, agree, train, train_alone

KEPT = [
    Layout(8, tp=2, ep=2, factor=1.0, sequence_parallel=True, zero1=True),
    Layout(4, pp=2, ep=2, microbatches=2, rows=1),
    Layout(2, shuffle=2, zero1=True, aux=0.0),
    Layout(4, cp=2, ep=2),
]
"""Unlike each other, and cheap: CI runs them."""
LAYOUTS = [
    Layout(8, tp=2, ep=2, pp=2, microbatches=2, sequence_parallel=True, router_sp=True, zero1=True, rows=1),
    Layout(4, ep=4, zero1=True, shared=True, router="group"),
    Layout(8, tp=2, factor=1.0, checkpoint=True),
    Layout(2, tp=2),
    Layout(2, ep=2, factor=1.0),
    Layout(4, ep=2, factor=0.5),
    Layout(4, tp=2, ep=2),
    Layout(4, tp=2, sequence_parallel=True, factor=1.0),
    Layout(4, tp=2, sequence_parallel=True, router_sp=True, factor=1.0),
    Layout(8, tp=4, sequence_parallel=True, router_sp=True, shared=True),
    Layout(8, tp=2, ep=4, k=1, router="sinkhorn", factor=1.0),
    Layout(8, tp=2, ep=2, k=1, factor=1.25, zero1=True),
    Layout(8, tp=2, shuffle=2, zero1=True, aux=0.0),
    Layout(8, ep=2, shuffle=4, aux=0.0),
    Layout(4, pp=2, microbatches=4, factor=1.0, rows=1),
    Layout(8, pp=2, ep=2, microbatches=2, schedule="zb_h1", router="group", rows=1),
    Layout(8, pp=2, tp=2, ep=2, microbatches=2, factor=1.0, checkpoint=True, rows=1),
    Layout(16, pp=2, tp=2, ep=4, microbatches=2, zero1=True, shared=True, rows=1),
    Layout(16, tp=4, ep=2, factor=1.0, sequence_parallel=True, zero1=True, checkpoint=True),
    Layout(8, tp=2, cp=2, ep=2),
    Layout(8, cp=2, ep=4, zero1=True),
    Layout(16, tp=2, ep=4, k=3, sequence_parallel=True, router_sp=True, zero1=True),
]


@pytest.mark.core(keep=0)
@pytest.mark.parametrize("layout", [*KEPT, *(pytest.param(layout, marks=pytest.mark.thorough) for layout in LAYOUTS)], ids=str)
def test_training(nxd: Nxd, layout: Layout) -> None:
    nxd(1)
    wanted = train_alone(layout)
    nxd(layout.ranks, tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep)
    agree(train(layout)[0], wanted)
