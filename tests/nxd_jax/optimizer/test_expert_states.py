"""ZeRO-1's state dicts with experts: NxD's numbers, and what is said of others."""

from __future__ import annotations

from typing import Any

import neuronx_distributed as nxd_api
import pytest
import torch
import torch_xla

from nxd_jax.optimizer import NeuronEPZero1Optimizer, NeuronZero1Optimizer
from nxd_jax.parallel_layers import parallel_state
from nxd_jax.tensor_parallel import expert_states
from tests.nxd_jax.conftest import Nxd
from torch_bridge.recorder import sharded

FLAGS = [[False, True, False], [True], [False]]
PLAIN: dict[str, Any] = {
    "state": {},
    "param_groups": [{"lr": 1.0, "params": [0, 1, 2]}, {"lr": 2.0, "params": [3]}, {"lr": 3.0, "params": [4]}],
    "base_state": dict(enumerate("abcde")),
    "shape_info": dict(enumerate("ABCDE")),
    "sharded_master_weights": dict(enumerate("vwxyz")),
}


def test_numbers() -> None:
    found = expert_states.combined(PLAIN, FLAGS)
    assert found["param_groups"] == [
        {"lr": 1.0, "params": [0, 1]},
        {"lr": 2.0, "params": []},
        {"lr": 3.0, "params": [2]},
        {"lr": 1.0, "params": [0]},
        {"lr": 2.0, "params": [1]},
        {"lr": 3.0, "params": []},
    ]
    assert {name: found[name] for name in expert_states.OFFSETS} == {
        "ep_param_id_offset": 1,
        "ep_param_group_offset": 3,
        "ep_base_state_offset": 3,
        "ep_shape_info_offset": 3,
    }
    assert found["base_state"] == {0: "a", 1: "c", 2: "e", 3: "b", 4: "d"} and found["state"] == {}
    assert found["shape_info"] == {0: "A", 1: "C", 2: "E", 3: "B", 4: "D"}
    assert found["sharded_master_weights"] == {0: "v", 1: "x", 2: "z", 3: "w", 4: "y"}
    assert expert_states.plain(found, FLAGS) == PLAIN and expert_states.is_combined(found) and not expert_states.is_combined(PLAIN)


@pytest.mark.parametrize("flags", [[[True, True]], [[False, False]]])
def test_one_kind_alone(flags: list[list[bool]]) -> None:
    """An empty part begins at 1, as in NxD; before the first step nothing has a state."""
    plain: dict[str, Any] = {"state": {}, "param_groups": [{"params": [0, 1]}], "base_state": {}, "shape_info": {0: "A", 1: "B"}}
    found = expert_states.combined(plain, flags)
    assert found["ep_base_state_offset"] == 1 and found["ep_shape_info_offset"] == (1 if flags[0][0] else 2)
    assert found["shape_info"] == ({1: "A", 2: "B"} if flags[0][0] else {0: "A", 1: "B"})
    assert expert_states.plain(found, flags) == plain


def test_other_states() -> None:
    with pytest.raises(
        ValueError, match=r"not of a ZeRO-1 optimizer with expert parallelism: it has no ep_param_id_offset, .*, only state, param_groups"
    ):
        expert_states.plain(PLAIN, FLAGS)
    found = expert_states.combined(PLAIN, FLAGS)
    with pytest.raises(
        ValueError, match=r"groups of \[2, 0, 1\] parameters and \[1, 1, 0\] of experts, there are groups of \[3, 0, 1\] and \[0, 1, 0\] of"
    ):
        expert_states.plain(found, [[False] * 3, [True], [False]])


def job() -> tuple[Any, torch.Tensor, torch.Tensor]:
    """An optimizer of a weight that all ranks have and one of experts, after a step."""
    place = parallel_state.get_expert_model_parallel_group(as_list=True)
    of = {r: k for members in place for k, r in enumerate(members)}
    expert = torch.nn.Parameter(sharded.from_ranks(lambda r: torch.full((3, 2), 1.0 + of[r]), sharded.axes_of(place)))
    expert.expert_model_parallel = True  # type: ignore[attr-defined]
    shared = torch.nn.Parameter(torch.ones(5, device="xla"))
    config = nxd_api.neuronx_distributed_config(expert_parallel_size=2, optimizer_config={"zero_one_enabled": True})
    zero = nxd_api.initialize_parallel_optimizer(config, torch.optim.AdamW, [expert, shared], lr=0.1).optimizer
    for p in (expert, shared):
        p.grad = p.detach() * 2
    zero.step()
    torch_xla.sync()
    return zero, expert, shared


def test_the_optimizer(nxd: Nxd) -> None:
    """Experts come after everything else; what `state_dict` gave can be loaded, and a state without the offsets cannot."""
    nxd(4, ep=2)
    zero, _, _ = job()
    assert isinstance(zero, NeuronEPZero1Optimizer)
    state = zero.state_dict()
    assert [g["params"] for g in state["param_groups"]] == [[0], [0]] and state["ep_param_group_offset"] == 1
    assert {k: tuple(shape) for k, shape in state["shape_info"].items()} == {0: (5,), 1: (3, 2)}
    assert state["base_state"][1]["exp_avg"].shape == (2, 2) and state["base_state"][0]["exp_avg"].shape == (2,)
    wanted = [sharded.shards(state["base_state"][k]["exp_avg"]) for k in range(2)]
    again, _, _ = job()
    again.step()
    again.load_state_dict(state)
    found = [sharded.shards(again.state_dict()["base_state"][k]["exp_avg"]) for k in range(2)]
    assert all(torch.equal(a, b) for one, other in zip(found, wanted, strict=True) for a, b in zip(one, other, strict=True))
    before = again.state_dict()["base_state"][0]["exp_avg"].cpu()
    with pytest.raises(
        ValueError, match="it has no ep_param_id_offset, ep_param_group_offset, ep_base_state_offset, ep_shape_info_offset, only"
    ):
        again.load_state_dict({k: v for k, v in state.items() if not k.startswith("ep_")})
    assert torch.equal(again.state_dict()["base_state"][0]["exp_avg"].cpu(), before)


def test_master_weights_are_in_the_state(nxd: Nxd) -> None:
    """NxD leaves them out, also if they are asked for."""
    nxd(4, ep=2)
    _, expert, shared = job()
    params = [expert, shared]
    zero = NeuronEPZero1Optimizer(params, torch.optim.AdamW, lr=0.1, save_master_weights=True)
    state = zero.state_dict()
    assert {k: tuple(t.shape) for k, t in state["sharded_master_weights"].items()} == {0: (2,), 1: (2, 2)}
    with torch.no_grad():
        for p in params:
            p.zero_()
    zero.load_state_dict(state)
    assert shared.ne(0).all() and all(t.ne(0).all() for t in sharded.shards(expert.detach()))
    assert not expert_states.is_combined(NeuronZero1Optimizer([shared], torch.optim.AdamW, lr=0.1).state_dict())
