"""How NxD arranges ranks in groups, under the names of its tests."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nxd_jax.parallel_layers.parallel_state import (
    ParallelGroups,
    PG_Group_Logic,
    ascending_descending_ring_PG_group,
    ascending_ring_PG_group,
    get_logic_chosen,
    initialize_model_parallel,
)
from nxd_jax.utils import hardware
from tests.nxd_jax.conftest import Nxd


@pytest.mark.parametrize(
    ("lnc", "chip", "tp", "world", "logic"),
    [
        (1, "trn1", 64, 64, "LOGIC1"),
        (1, "trn2", 8, 64, "LOGIC1"),
        (1, "trn2", 64, 128, "LOGIC2"),
        (2, "trn2", 64, 64, "LOGIC1"),
        (2, "trn2", 32, 64, "LOGIC2"),
        (2, "trn2", 32, 32, "LOGIC1"),
        (2, "trn3", 32, 64, "LOGIC1"),
    ],
)
def test_logic(lnc: int, chip: str, tp: int, world: int, logic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    assert get_logic_chosen(lnc, hardware(chip), tp).name == logic


def grids(world: int, tp: int, pp: int, cp: int, ep: int) -> dict[str, object]:
    dp, edp = world // (tp * pp * cp), world // (tp * pp * ep)
    ranks = torch.arange(world)
    return {
        "lnc_size": 1,
        "cluster_ranks_nonexp": ranks.reshape(pp, dp, cp, tp),
        "cluster_ranks_exp": ranks.reshape(pp, edp, ep, tp),
        "tp": tp,
        "dp": dp,
        "pp": pp,
        "ep_model_degree": ep,
        "ep_data_degree": edp,
    }


@pytest.mark.parametrize("sizes", [(32, 2, 2, 2, 1), (64, 4, 2, 1, 4), (64, 2, 1, 2, 2)])
def test_the_first_gives_the_groups_of_parallel_state(nxd: Nxd, sizes: tuple[int, int, int, int, int]) -> None:
    world, tp, pp, cp, ep = sizes
    nxd(world)
    own = initialize_model_parallel(tp, pp, cp, ep, mesh_only=True)
    assert ascending_ring_PG_group(**grids(*sizes)) == own == PG_Group_Logic.LOGIC1(**grids(*sizes))  # type: ignore[arg-type]


def test_the_second_takes_the_rows_of_a_node_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    found = ascending_descending_ring_PG_group(**grids(128, 32, 1, 1, 1))  # type: ignore[arg-type]
    assert isinstance(found, ParallelGroups)
    assert found.tp_groups[0] == [*range(16), *range(48, 64)] and found.tp_groups[3] == [*range(80, 112)]
    assert found.dp_groups[0] == [0, 16, 64, 80] and found.dp_groups[16] == [48, 32, 112, 96] and found.pp_groups[16] == [48]
    assert found.ep_data_groups[1] == [1, 33, 65, 97] and found.ep_model_groups[5] == [5]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    small = PG_Group_Logic.LOGIC2(**grids(8, 4, 1, 2, 1))
    assert small.tp_groups == [[0, 1, 6, 7], [2, 3, 4, 5]] and small.cp_groups == [[0, 2], [1, 3], [6, 4], [7, 5]]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="8 ranks do not fill nodes of LOCAL_WORLD_SIZE=3 ranks in 4 rows"):
        ascending_descending_ring_PG_group(**grids(8, 4, 1, 2, 1))  # type: ignore[arg-type]
