"""`parallel_state`: groups, ranks and sizes of every kind, against a brute-force grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from nxd_jax.parallel_layers import parallel_state as ps
from tests.nxd_jax.conftest import Nxd
from torch_bridge.mesh import groups, rank_numbers, world
from torch_bridge.recorder import sharded

GRIDS = [
    # world, tp, pp, cp, ep
    (1, 1, 1, 1, 1), (4, 2, 1, 1, 1), (4, 4, 1, 1, 1), (4, 1, 1, 1, 1), (4, 1, 4, 1, 1), (8, 2, 2, 1, 1), (8, 2, 1, 2, 1), (8, 2, 2, 2, 1),
    (8, 2, 1, 1, 2), (8, 1, 1, 1, 4), (8, 2, 1, 1, 4), (16, 2, 2, 2, 2), (16, 2, 1, 2, 4), (16, 2, 1, 4, 2), (12, 2, 1, 3, 2),
    (12, 3, 2, 1, 2), (6, 3, 2, 1, 1),
]  # fmt: skip
NAMES = {
    "tp": "tensor_model_parallel", "dp": "data_parallel", "pp": "pipeline_model_parallel", "cp": "context_model_parallel",
    "ep": "expert_model_parallel", "edp": "expert_data_parallel",
}  # fmt: skip


def get(kind: str, what: str) -> Any:
    return getattr(ps, f"get_{NAMES[kind]}_{what}")


def expected(count: int, tp: int, pp: int, cp: int, ep: int) -> dict[str, list[list[int]]]:
    """Groups of every kind, rank by rank: which coordinates must agree."""
    dp = count // (tp * pp * cp)

    def dense(r: int) -> dict[str, int]:
        return {"tp": r % tp, "cp": r // tp % cp, "dp": r // (tp * cp) % dp, "pp": r // (tp * cp * dp)}

    def experts(r: int) -> dict[str, int]:
        edp = count // (tp * pp * ep)
        return {"tp": r % tp, "ep": r // tp % ep, "edp": r // (tp * ep) % edp, "pp": r // (tp * ep * edp)}

    found: dict[str, list[list[int]]] = {}
    for kind, place, order in (
        ("tp", dense, ("pp", "dp", "cp")), ("dp", dense, ("pp", "cp", "tp")), ("pp", dense, ("dp", "cp", "tp")), ("cp", dense, ("pp", "dp", "tp")),
        ("ep", experts, ("pp", "edp", "tp")), ("edp", experts, ("pp", "ep", "tp")),
    ):  # fmt: skip
        by: dict[tuple[int, ...], list[int]] = {}
        for r in range(count):
            by.setdefault(tuple(place(r)[a] for a in order), []).append(r)
        found[kind] = [by[key] for key in sorted(by)]
    return found


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_groups_of_every_kind(nxd: Nxd, grid: tuple[int, ...]) -> None:
    count, tp, pp, cp, ep = grid
    nxd(count, tp=tp, pp=pp, cp=cp, ep=ep)
    for kind, lists in expected(*grid).items():
        assert get(kind, "group")(as_list=True) == lists, kind
        assert get(kind, "replica_groups")() == lists
        assert get(kind, "size")() == len(lists[0])
        group = get(kind, "group")()
        own = [next(g.index(r) for g in lists if r in g) for r in range(count)]
        assert rank_numbers.per_rank(get(kind, "rank")()) == own == rank_numbers.per_rank(group.rank())
        assert group.size() == len(lists[0]) == dist.get_world_size(group) and group._mesh == lists
        assert group is get(kind, "group")() and type(group.size()) is int
    assert ps.get_world_group(as_list=True) == [list(range(count))] and ps.get_world_group().size() == count


@pytest.mark.parametrize("grid", [g for g in GRIDS if g[0] > 1], ids=str)
def test_every_kind_of_group_runs_along_mesh_axes(nxd: Nxd, grid: tuple[int, ...]) -> None:
    """So that collectives are one XLA op; only ep beside a cp that neither divides has to gather."""
    count, tp, pp, cp, ep = grid
    nxd(count, tp=tp, pp=pp, cp=cp, ep=ep)
    for kind in NAMES:
        found = groups.resolve(get(kind, "group")())
        indivisible = cp > 1 and cp % ep and ep % cp
        assert (found.axes is not None and found.ordered) or (indivisible and kind in ("ep", "edp")), kind


@pytest.mark.parametrize("grid", [(8, 2, 2, 2, 1), (8, 2, 1, 1, 4), (12, 2, 1, 3, 2)], ids=str)
def test_collectives_within_every_kind(nxd: Nxd, grid: tuple[int, ...]) -> None:
    count, tp, pp, cp, ep = grid
    nxd(count, tp=tp, pp=pp, cp=cp, ep=ep)
    made = {}
    for kind in NAMES:
        t = torch.zeros(2, device="xla") + 2 ** dist.get_rank()
        dist.all_reduce(t, group=get(kind, "group")())
        made[kind] = t
    for kind, lists in expected(*grid).items():
        for r, own in enumerate(sharded.shards(made[kind])):
            assert own.tolist() == [sum(2.0**m for m in next(g for g in lists if r in g))] * 2, (kind, r)


def test_ranks_of_others(nxd: Nxd) -> None:
    nxd(16, tp=2, pp=2, cp=2)
    lists = expected(16, 2, 2, 2, 1)

    def of(kind: str, r: int) -> list[int]:
        return next(g for g in lists[kind] if r in g)

    assert rank_numbers.per_rank(ps.get_tensor_model_parallel_src_rank()) == [of("tp", r)[0] for r in range(16)]
    assert rank_numbers.per_rank(ps.get_data_parallel_src_rank()) == [of("dp", r)[0] for r in range(16)]
    for step, name in ((1, "next"), (-1, "prev")):
        answer = rank_numbers.per_rank(getattr(ps, f"get_pipeline_model_parallel_{name}_rank")())
        assert answer == [of("pp", r)[(of("pp", r).index(r) + step) % 2] for r in range(16)]
    pairs = ps.get_context_model_parallel_src_tgt_pairs()
    assert sorted(map(tuple, pairs)) == sorted((r, of("cp", r)[(of("cp", r).index(r) + 1) % 2]) for r in range(16))
    assert ps.is_global_rank_zero() is True


def test_neighbouring_stages(nxd: Nxd) -> None:
    nxd(8, tp=2, pp=4)
    even, odd = [[0, 2], [4, 6], [1, 3], [5, 7]], [[2, 4], [6, 0], [3, 5], [7, 1]]
    assert ps.get_pipeline_model_parallel_sr_group(0) == even and ps.get_pipeline_model_parallel_sr_group(parity=True) == odd
    with pytest.raises(AssertionError, match="give the parity"):
        ps.get_pipeline_model_parallel_sr_group()
    assert ps.get_next_rank_replica_groups() == even == ps.get_next_rank_group()._mesh
    assert ps.get_prev_rank_replica_groups() == odd == ps.get_prev_rank_group(as_list=True)
    assert ps.get_next_rank_group() is ps.get_next_rank_group() is not ps.get_prev_rank_group()
    assert ps.get_prev_rank_group_replica_groups() == odd and ps.get_next_rank_group_replica_groups() == even
    assert ps.get_pp_gloo_group() is ps.get_pipeline_model_parallel_group()
    ps.initialize_pp_gloo_groups()


def test_an_odd_number_of_stages(nxd: Nxd) -> None:
    nxd(6, tp=2, pp=3)
    with pytest.raises(RuntimeError, match="need an even number of stages, pipeline_model_parallel_size is 3"):
        ps.get_next_rank_group()
    assert ps.get_pipeline_model_parallel_sr_group(0) == [[0, 2], [4, 0], [1, 3], [5, 1]]
    assert ps.get_pipeline_model_parallel_sr_group(1) == [[2, 4], [3, 5]]


@pytest.mark.parametrize("stages", [[0, 3], [1], [3, 2, 0, 1]], ids=str)
def test_groups_of_stages(nxd: Nxd, stages: list[int]) -> None:
    """`create_pg_with_ranks` counts within each pipeline: stages that share a weight."""
    nxd(8, tp=2, pp=4)
    group = ps.create_pg_with_ranks(stages)
    assert group.size() == len(stages)
    assert group._mesh[:2] == [[2 * k for k in stages], [2 * k + 1 for k in stages]]
    t = torch.zeros(1, device="xla") + dist.get_rank() + 1
    dist.all_reduce(t, group=group)
    held = [float(own) for own in sharded.shards(t)]
    for k in stages:
        assert held[2 * k : 2 * k + 2] == [sum(2 * s + 1 for s in stages), sum(2 * s + 2 for s in stages)]


def test_experts(nxd: Nxd) -> None:
    nxd(8, tp=2, ep=2)
    group = ps.get_expert_model_parallel_group()
    assert [ps.get_expert_parallel_rank_from_global_rank(r, group) for r in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert ps.get_expert_parallel_rank_from_global_rank(2, ps.get_expert_model_parallel_group(as_list=True)) == 1
    with pytest.raises(ValueError, match="rank 9 is in none of the expert parallel groups"):
        ps.get_expert_parallel_rank_from_global_rank(9, group)
    assert ps.get_experts_for_expert_parallel_rank(1, 8, 2) == [4, 5, 6, 7]
    assert ps.get_experts_for_expert_parallel_rank(1, 4, 2, [[0, 3], [1, 2]]) == [1, 2]
    with pytest.raises(ValueError, match="7 experts cannot be divided evenly over expert_model_parallel_size=2"):
        ps.get_experts_for_expert_parallel_rank(0, 7, 2)
    with pytest.raises(ValueError, match="expert parallel rank 2 is not one of expert_model_parallel_size=2 ranks"):
        ps.get_experts_for_expert_parallel_rank(2, 8, 2)


def test_each_ranks_own_experts(nxd: Nxd) -> None:
    nxd(4, tp=2, ep=2)
    rank = ps.get_expert_model_parallel_rank()
    weight = torch.arange(4.0)

    def held(experts: Any) -> list[list[float]]:
        on_cpu, on_xla = ([own.tolist() for own in sharded.shards(rows.to("xla"))] for rows in (weight[experts], weight.to("xla")[experts]))
        assert on_cpu == on_xla
        return on_xla

    assert held(ps.get_experts_for_expert_parallel_rank(rank, 4, 2)) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    for distribution in ([[0, 3], [2, 1]], {0: [0, 3], 1: [2, 1]}):
        assert held(ps.get_experts_for_expert_parallel_rank(rank, 4, 2, distribution)) == [[0, 3], [0, 3], [2, 1], [2, 1]]
    with pytest.raises(ValueError, match=r"different numbers of experts \(\{0: 1, 1: 3\}\).*torchrun"):
        ps.get_experts_for_expert_parallel_rank(rank, 4, 2, [[0], [1, 2, 3]])
    place = ps.get_expert_parallel_rank_from_global_rank(dist.get_rank(), ps.get_expert_model_parallel_group())
    assert rank_numbers.per_rank(place) == rank_numbers.per_rank(rank) == [0, 0, 1, 1]


def test_token_shuffle_groups(nxd: Nxd) -> None:
    nxd(8, tp=2)
    with pytest.raises(RuntimeError, match="initialize_token_shuffle_group"):
        ps.get_token_shuffle_group()
    ps.initialize_token_shuffle_group(2)
    assert sorted(ps.get_token_shuffle_replica_groups()) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert ps.get_token_shuffle_group_size() == 2 and ps.get_token_shuffle_group().size() == 2
    ps.initialize_token_shuffle_group(2)
    with pytest.raises(AssertionError, match="destroy_token_shuffle_group"):
        ps.initialize_token_shuffle_group(4)
    ps.destroy_token_shuffle_group()
    ps.initialize_token_shuffle_group(4)
    assert sorted(ps.get_token_shuffle_group(as_list=True)) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    for wrong in (3, 0):
        with pytest.raises(RuntimeError, match=f"token_shuffle_group_size={wrong} must divide the data parallel size 4"):
            ps.initialize_token_shuffle_group(wrong)


def test_groups_that_share_keys_and_values(nxd: Nxd, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ps.arrange_kv_groups(2, 4, 2) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    named = ps.arrange_kv_groups(
        num_tensor_model_parallel_groups=1, tensor_model_parallel_size=4, kv_shared_group_size=2, sequential_ranks_in_group=True
    )
    assert named == [[0, 1], [2, 3]] == ps.arrange_kv_groups(1, 4, 2, hardware_type="trn2") and ps.arrange_kv_groups() == [[0]]
    with pytest.raises(AssertionError, match="tensor parallel size 4 is not divisible by kv_shared_group_size 3"):
        ps.arrange_kv_groups(1, 4, 3)
    for target, mesh in (("trn1", [[0, 2], [1, 3], [4, 6], [5, 7]]), ("trn2", [[0, 1], [2, 3], [4, 5], [6, 7]])):
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
        nxd(8, tp=4)
        ps.initialize_kv_group(2)
        assert ps.get_kv_shared_group(as_list=True) == mesh == ps.get_kv_shared_replica_groups()
        assert ps.get_kv_shared_group_size() == 2
        ps.initialize_kv_group(2)
        with pytest.raises(AssertionError, match="single KV size"):
            ps.initialize_kv_group(4)
        ps.destroy_kv_group()
        ps.initialize_kv_group(4)
        assert ps.get_kv_shared_group().size() == 4
    nxd(8, tp=4)
    ps.initialize_kv_group(2, sequential_ranks_in_group=True)
    assert ps.get_kv_shared_group(as_list=True)[0] == [0, 1]


def test_draft_and_zero1_groups(nxd: Nxd) -> None:
    nxd(8, tp=4)
    ps.initialize_speculative_draft_group(2)
    assert ps.get_speculative_draft_group(as_list=True) == [[0, 1], [2, 3], [4, 5], [6, 7]] == ps.get_speculative_draft_replica_groups()
    ps.initialize_speculative_draft_group(group_size=2)
    with pytest.raises(AssertionError, match="draft groups of 2 ranks exist, cannot make groups of 4"):
        ps.initialize_speculative_draft_group(group_size=4)
    with pytest.raises(ValueError, match="draft_size=3 must divide the tensor parallel size 4"):
        ps.initialize_speculative_draft_group(3)
    nxd(16, tp=2, pp=2, cp=2)
    assert ps.get_zero1_sharding_groups() == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]


def test_other_ways_to_talk(nxd: Nxd) -> None:
    nxd(4, tp=2)
    assert ps.gather_python_object(dist.get_rank()) == [0, 1, 2, 3]
    assert ps.gather_python_object(dist.get_rank(), ps.get_data_parallel_group()) == [0, 2]
    assert ps.create_pg_with_ranks([0, 2])._mesh == [[0, 2], [1, 3]]
    assert ps.is_tcp_store_available() is False and ps.get_tcp_store() is not None


def test_log_lines(nxd: Nxd) -> None:
    nxd(8, tp=2, pp=2)
    assert ps.get_rank_info_str() == "rank_0_pp0_tp0_dp0" and ps.rmsg("hello") == "[rank_0_pp0_tp0_dp0] hello"
    assert ps.rmsg_ep("hello") == "[rank_0_pp0_tp0_dp0_ep0_edp0] hello"
    ps.destroy_model_parallel()
    assert ps.rmsg("hello") == "[rank_0] hello"


def test_overrides(nxd: Nxd) -> None:
    nxd(4, tp=2)
    ps.set_tensor_model_parallel_size(8)
    ps.set_tensor_model_parallel_rank(5)
    ps.set_expert_model_parallel_size(2)
    ps.set_expert_model_parallel_rank(1)
    ps.set_context_model_parallel_size(4)
    assert (ps.get_tensor_model_parallel_size(), ps.get_tensor_model_parallel_rank()) == (8, 5)
    assert (ps.get_expert_model_parallel_size(), ps.get_expert_model_parallel_rank(), ps.get_context_model_parallel_size()) == (2, 1, 4)
    nxd(4, tp=2)
    assert ps.get_tensor_model_parallel_size() == 2 and rank_numbers.per_rank(ps.get_tensor_model_parallel_rank()) == [0, 1, 0, 1]
    assert ps.get_aot_mode() is False
    ps.set_aot_mode(True)
    assert ps.get_aot_mode() is True
    ps.set_aot_mode(False)


# -- setting up -------------------------------------------------------------------------------------


def test_names_of_earlier_releases(nxd: Nxd) -> None:
    nxd(8, tp=2)
    assert (ps.get_tensor_model_parallel_world_size(), ps.get_data_parallel_world_size()) == (2, 4)


def test_initialising_again_divides_anew(nxd: Nxd) -> None:
    nxd(8, tp=2)
    before = torch.zeros(3, device="xla") + dist.get_rank()
    held = ps.get_tensor_model_parallel_group()
    ps.initialize_model_parallel(tensor_model_parallel_size=4)
    assert ps.get_tensor_model_parallel_size() == 4 and ps.get_data_parallel_size() == 2 and world.current().axes["tp"] == 4
    assert [s[0].item() for s in sharded.shards(before)] == list(range(8))
    dist.all_reduce(before, group=held)
    assert [s[0].item() for s in sharded.shards(before)] == [1, 1, 5, 5, 9, 9, 13, 13]
    ps.destroy_model_parallel()
    assert not ps.model_parallel_is_initialized() and world.current().axes == {"dp": 8}
    ps.destroy_model_parallel()


def test_mesh_only(nxd: Nxd) -> None:
    nxd(8)
    ps.destroy_model_parallel()
    found = ps.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, mesh_only=True)
    lists = expected(8, 2, 2, 1, 1)
    assert found == (lists["tp"], lists["dp"], lists["pp"], lists["ep"], lists["edp"], lists["cp"]) and found is not None
    assert found.tp_groups == lists["tp"] and found.ep_data_groups == lists["edp"]
    assert not ps.model_parallel_is_initialized()


def test_sizes_above_the_world_count_as_the_world(nxd: Nxd) -> None:
    nxd(4, tp=8)
    assert ps.get_tensor_model_parallel_size() == 4 and ps.get_data_parallel_size() == 1


def test_a_plain_script_gets_the_world_it_asks_for(nxd: Nxd) -> None:
    nxd(1)
    ps.destroy_model_parallel()
    dist.destroy_process_group()
    world.configure(world.World(1, fixed=False))
    dist.init_process_group("xla")
    ps.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert world.size() == 4 == dist.get_world_size() and rank_numbers.per_rank(dist.get_rank()) == [0, 1, 2, 3]
    assert ps.get_data_parallel_size() == 1


@pytest.mark.parametrize(
    ("sizes", "error", "text"),
    [
        ({"tensor_model_parallel_size": 3}, RuntimeError, r"invalid implied data parallel degree: 8 ranks / \(tensor_model_parallel_size 3"),
        ({"pipeline_model_parallel_size": 3}, RuntimeError, "invalid implied data parallel degree"),
        ({"context_parallel_size": 3}, RuntimeError, "context_parallel_size 3"),
        ({"tensor_model_parallel_size": 4, "expert_model_parallel_size": 4}, RuntimeError, "invalid implied expert data parallel degree.*must divide 2"),
        ({"tensor_model_parallel_size": 0}, ValueError, "tensor_model_parallel_size must be a positive number, got 0"),
        ({"context_parallel_size": -1}, ValueError, "context_parallel_size must be a positive number, got -1"),
        ({"expert_model_parallel_size": 2.0}, ValueError, "expert_model_parallel_size must be a positive number, got 2.0"),
        ({"pipeline_model_parallel_size": True}, ValueError, "pipeline_model_parallel_size must be a positive number, got True"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit(nxd: Nxd, sizes: dict[str, Any], error: Any, text: str) -> None:
    nxd(8, tp=2)
    with pytest.raises(error, match=text):
        ps.initialize_model_parallel(**sizes)
    assert ps.get_tensor_model_parallel_size() == 2  # what was there stays


def test_without_torch_distributed(nxd: Nxd) -> None:
    nxd(4)
    ps.destroy_model_parallel()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\('xla'\) before initialize_model_parallel"):
        ps.initialize_model_parallel(2)


UNINITIALISED = [
    *(f"get_{name}_{what}" for name in NAMES.values() for what in ("group", "replica_groups", "size", "rank")),
    "get_world_group", "get_tensor_model_parallel_src_rank", "get_data_parallel_src_rank", "get_pipeline_model_parallel_next_rank",
    "get_pipeline_model_parallel_prev_rank", "get_context_model_parallel_src_tgt_pairs", "get_next_rank_group", "get_prev_rank_group", "get_kv_shared_group",
    "get_token_shuffle_group", "get_speculative_draft_group", "get_zero1_sharding_groups", "initialize_kv_group",
    "initialize_pp_gloo_groups", "get_pp_gloo_group",
]  # fmt: skip


@pytest.mark.parametrize("name", UNINITIALISED)
def test_before_initialising(nxd: Nxd, name: str) -> None:
    ps.destroy_model_parallel()
    with pytest.raises(
        RuntimeError, match=r"model parallel groups are not initialized: call neuronx_distributed.*initialize_model_parallel\("
    ):
        getattr(ps, name)()
    with pytest.raises(AssertionError):  # NxD's type
        getattr(ps, name)()


@pytest.mark.parametrize(
    ("instance", "tp", "tp_groups"),
    [
        ("trn1.32xlarge", 4, [[r, r + 8, r + 16, r + 24] for r in range(8)]),
        ("trn1.32xlarge", 8, [list(range(k, k + 8)) for k in range(0, 32, 8)]),
        ("trn2.48xlarge", 32, [[*range(16), *range(48, 64)], list(range(16, 48))]),
    ],
)
def test_machines_that_want_another_order(
    nxd: Nxd, monkeypatch: pytest.MonkeyPatch, instance: str, tp: int, tp_groups: list[list[int]]
) -> None:
    monkeypatch.setenv("NXD_JAX_INSTANCE", instance)
    count = len(tp_groups) * tp
    nxd(count, tp=tp)
    assert sorted(ps.get_tensor_model_parallel_group(as_list=True)) == tp_groups
    group = ps.get_tensor_model_parallel_group()
    assert groups.resolve(group).axes == ("tp",)
    t = torch.zeros(1, device="xla") + dist.get_rank()
    mine = torch.zeros(1, device="xla") + ps.get_tensor_model_parallel_rank()
    dist.all_reduce(t, group=group)
    for r, (total, place) in enumerate(zip(sharded.shards(t), sharded.shards(mine), strict=True)):
        members = next(g for g in tp_groups if r in g)
        assert total.item() == sum(members) and place.item() == members.index(r)


def test_the_names_that_scripts_import() -> None:
    import neuronx_distributed.parallel_layers.parallel_state as imported

    assert imported is ps or imported.get_tensor_model_parallel_size is ps.get_tensor_model_parallel_size


def test_private_globals_are_those_of_nxd_and_may_be_put_back(nxd: Nxd) -> None:
    """NxD's module tests keep them for each layout, and change layouts by writing them."""
    names = [name for name in vars(ps) if name.startswith(("_", "PP_")) and name.isupper() and "GROUP" in name]
    assert {"_TENSOR_MODEL_PARALLEL_GROUP", "_EXP_DATA_PARALLEL_GROUP_SPMD", "_TOKEN_SHUFFLE_GROUP_SIZE", "PP_GROUP_PG_GLOO"} <= set(names)
    nxd(8, tp=2, ep=2)
    ps.initialize_token_shuffle_group(2)
    assert ps._TENSOR_MODEL_PARALLEL_GROUP is ps.get_tensor_model_parallel_group()
    assert ps.get_data_parallel_group(as_list=True) == ps._DATA_PARALLEL_GROUP_SPMD
    kept = {name: vars(ps)[name] for name in names}
    ps.destroy_token_shuffle_group()
    ps.destroy_model_parallel()
    assert ps._TENSOR_MODEL_PARALLEL_GROUP is ps._TOKEN_SHUFFLE_GROUP_SIZE is None
    ps.initialize_model_parallel(tensor_model_parallel_size=4)
    assert ps.get_tensor_model_parallel_size() == 4
    vars(ps).update(kept)
    assert ps.get_tensor_model_parallel_size() == ps.get_expert_model_parallel_size() == 2
    assert ps.get_token_shuffle_group_size() == 2
    vars(ps)["_TENSOR_MODEL_PARALLEL_GROUP"] = "mine"
    with pytest.raises(RuntimeError, match="_TENSOR_MODEL_PARALLEL_GROUP was set to 'mine', which is no group that was set up here"):
        ps.get_tensor_model_parallel_size()
    vars(ps).update(kept)
