"""Training through a pipeline gives what one rank gives, in every layout and by every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch_xla

from nxd_jax.pipeline.schedules import KINDS
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.pipeline.models import Layout, Trained, agree, train
from torch_bridge import metrics

_EXPECTED: dict[Layout, Trained] = {}

LAYOUTS = [
    Layout(4, 2, 4, tp=2),
    Layout(4, 2, 4, "zbv", stages=2, tied=True, skip=True),
    Layout(8, 4, 4, "zb_h1", tp=2, checkpoint=True),
    Layout(8, 2, 2, stages=2, tp=2, zero1=True),
    Layout(2, 2, 1),
    Layout(4, 4, 2),
    Layout(4, 4, 4, "gpipe"),
    Layout(4, 4, 8),
    Layout(4, 4, 6, tied=True),
    Layout(8, 8, 8),
    Layout(8, 8, 3, skip=True),
    Layout(8, 4, 8, stages=2, tied=True),
    Layout(8, 4, 4, stages=2),
    Layout(8, 2, 4, "interleaved", stages=3, tp=2),
    Layout(8, 2, 4, "looped_bfs", stages=2, tp=2, tied=True),
    Layout(8, 2, 4, "looped_bfs", stages=3, tp=4),
    Layout(8, 2, 4, "zb_h1", tp=2, zero1=True),
    Layout(8, 2, 4, "zbv", stages=2, tp=2, zero1=True, tied=True),
    Layout(8, 4, 8, "zbv", stages=2, checkpoint=True),
    Layout(8, 4, 8, "dualpipev", stages=2, tp=2),
    Layout(4, 2, 6, "dualpipev", stages=2, tied=True),
    Layout(8, 2, 4, "interleaved_zero_bubble", stages=2, tp=2, skip=True),
    Layout(8, 4, 8, "interleaved_zero_bubble", stages=2, tp=1, zero1=True),
    Layout(8, 2, 4, tp=2, sequence_parallel=True),
    Layout(8, 2, 4, "zbv", stages=2, tp=2, sequence_parallel=True, zero1=True),
    Layout(8, 2, 4, tp=4, sequence_parallel=True, checkpoint=True),
    Layout(8, 2, 4, tp=2, cp=2),
    Layout(8, 2, 2, tp=1, cp=2, zero1=True),
    Layout(16, 4, 4, tp=2, zero1=True, tied=True, checkpoint=True),
    Layout(16, 4, 8, "interleaved", stages=2, tp=2, zero1=True, tied=True, skip=True),
    Layout(4, 2, 3, "gpipe", tied=True, skip=True, layers=5),
    Layout(6, 3, 4, tp=2, layers=7),
]


def expected(nxd: Nxd, layout: Layout) -> Trained:
    """What one rank gives for the same global batch."""
    alone = layout.alone()
    key = Layout(layout.dp, 1, alone.microbatches, tied=alone.tied, skip=alone.skip, layers=alone.layers)
    if key not in _EXPECTED:
        nxd(1)
        _EXPECTED[key] = train(alone, layout.batch())[0]
    return _EXPECTED[key]


@pytest.mark.thorough(keep=4)
@pytest.mark.core(keep=1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training(nxd: Nxd, layout: Layout) -> None:
    """Losses, norms, gradients and weights; nothing is compiled after the first step; weights and their optimizer's state lie on their stage's cores."""
    wanted = expected(nxd, layout)
    nxd(layout.ranks, tp=layout.tp, pp=layout.pp, cp=layout.cp)
    found, model, optimizer = train(layout, layout.batch())
    agree(found, wanted)
    before = metrics.COUNTERS.get("UncachedCompile", 0)
    model.run_train(**layout.local(layout.batch()))
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
    assert metrics.COUNTERS.get("UncachedCompile", 0) == before
    lie_on_their_cores(model, optimizer, layout)


def lie_on_their_cores(model: Any, optimizer: Any, layout: Layout) -> None:
    """Each stage's weights and state on its rank's cores: as many as there are without a pipeline."""
    per_stage = layout.ranks // layout.pp
    owners = {}
    for stage, module in enumerate(model.local_modules()):
        for p in module.parameters():
            owners.setdefault(id(p), model.pipeline.schedule.placement[stage])
    for p in model.parameters():
        held = p._storage.held.sharding.device_set
        assert {d.id // per_stage for d in held} == {owners[id(p)]}
    state = optimizer.optimizer.base_optimizer.state if layout.zero1 else optimizer.state
    for values in state.values():
        for name, t in values.items():
            if name != "step":
                assert len({d.id // per_stage for d in t._storage.held.sharding.device_set}) == 1, name


def test_every_schedule_is_among_them() -> None:
    named = {layout.schedule for layout in LAYOUTS if layout.schedule}
    assert named == set(KINDS) - {"1f1b"}
