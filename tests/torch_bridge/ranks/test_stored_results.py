"""Sines that larger values read, in a world of several ranks."""

from __future__ import annotations

import torch
import torch_xla.core.functions as xf

from tests.torch_bridge.ranks import eager
from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.compiler import stored_results
from torch_bridge.runtime.session import STATE


def test_each_rank_stores_its_own(hosted: Hosted) -> None:
    """Within `shard_map`, where angles and what they turn differ by rank."""
    hosted(4, dp=2, tp=2)
    angles, x = (
        eager.each(lambda r, shape=shape: torch.randn(shape, generator=torch.Generator().manual_seed(r)))
        for shape in ((64, 32), (2, 64, 32))
    )
    on_xla = [eager.on_xla(values) for values in (angles, x)]
    found = xf.all_reduce("sum", on_xla[0].sin() * on_xla[1])
    eager.same(found, [sum((a.sin() * b for a, b in zip(angles, x, strict=True)), torch.zeros(()))] * 4)
    assert any(stored_results.STORED in node.meta for node in STATE.session.recent[-1].graph.nodes)
