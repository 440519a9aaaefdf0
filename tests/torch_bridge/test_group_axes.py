"""Along which axes what collectives over lists of ranks give may differ."""

from __future__ import annotations

import pytest
import torch

from nxd_jax.tensor_parallel import parallel_groups
from tests.nxd_jax.conftest import Nxd, nxd  # noqa: F401
from torch_bridge.collectives import functional
from torch_bridge.mesh import group_axes
from torch_bridge.recorder import sharded

PAIRS_OF_DP = [[0, 2], [1, 3], [4, 6], [5, 7]]
"""Of 8 ranks with tp 2: dp 0 with 1, and 2 with 3."""
CROSSED = [[0, 2], [1, 5], [4, 6], [3, 7]]
"""tp rank 0 has pairs of neighbours along dp, tp rank 1 has others."""


@pytest.mark.parametrize(
    ("groups", "apart", "uneven"),
    [
        (PAIRS_OF_DP, {"dp", "tp"}, {"dp"}),
        ([[0, 1, 2, 3, 4, 5, 6, 7]], set(), {"dp", "tp"}),
        ([[0, 1], [2, 3], [4, 5], [6, 7]], {"dp"}, {"tp"}),
        ([[0, 1], [3, 2], [4, 5], [6, 7]], {"dp"}, {"dp", "tp"}),
        (CROSSED, {"dp", "tp"}, {"dp", "tp"}),
        ([[0, 2]], {"dp", "tp"}, {"dp", "tp"}),
    ],
)
def test_axes(nxd: Nxd, groups: list[list[int]], apart: set[str], uneven: set[str]) -> None:  # noqa: F811
    nxd(8, tp=2)
    found = group_axes.of(str(groups))
    assert (set(found.apart), set(found.uneven)) == (apart, uneven)


@pytest.mark.parametrize(("groups", "axes"), [(PAIRS_OF_DP, {"dp"}), (CROSSED, {"dp", "tp"}), ([list(range(8))], set())])
def test_results_are_known_to_agree_where_they_do(nxd: Nxd, groups: list[list[int]], axes: set[str]) -> None:  # noqa: F811
    """A sum over some data-parallel ranks is the same on all tensor-parallel ranks, if the values were."""
    nxd(8, tp=2)
    place = parallel_groups.places("dp")
    x = sharded.from_ranks(lambda r: torch.full((4,), float(place[r])), ("dp",))
    total = functional.all_reduce("sum", x, groups=groups)
    shards = sharded.shards(total)
    of = {r: group for group in groups for r in group}
    assert [s[0].item() for s in shards] == [sum(place[m] for m in of[r]) for r in range(8)]
    assert set(sharded.varying(total).axes) == axes
