"""Checkpoints of models with experts, in our own format: saved in one layout they load in any other, bit for bit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd_api
import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
from neuronx_distributed.modules.moe import load as expert_load

from nxd_jax.checkpoint import contents
from tests.nxd_jax.checkpoint.expert_job import Arrangement, Layout, build, differing, start, train, values
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.modules.moe.training import undivided

SAVED = {
    "tp2-ep2-zero1": Layout(8, tp=2, ep=2, zero1=True),
    "ep4": Layout(4, ep=4),
    "pp2-ep2-tp2": Layout(8, pp=2, tp=2, ep=2, microbatches=2, rows=1, shared=True),
    "ep2-cp2-zero1-group": Layout(8, cp=2, ep=2, zero1=True, router="group"),
}
LOADED = {
    "alone": Layout(1),
    "ep2": Layout(2, ep=2),
    "tp2-ep4-zero1": Layout(8, tp=2, ep=4, zero1=True),
    "ep4-cp2-zero1": Layout(8, cp=2, ep=4, zero1=True),
    "pp2-ep2-zero1": Layout(8, pp=2, ep=2, microbatches=2, zero1=True, rows=1),
    "tp4-zero1": Layout(8, tp=4, zero1=True),
}


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"root": tmp_path_factory.mktemp("experts")}


def saved(nxd: Nxd, states: dict[str, Any], name: str) -> tuple[Path, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A checkpoint written after two steps, what it must hold, and the weights as `undivided` puts them together."""
    if name not in states:
        start(nxd, SAVED[name])
        made = build(SAVED[name], balanced=SAVED[name].router == "group")
        train(SAVED[name], made, 0, 2)
        nxd_api.save_checkpoint(states["root"] / name, "two", *made, user_content={"steps": 2})
        states[name] = states["root"] / name, values(made), undivided(contents.unwrapped(made[0]))
    return states[name]


@pytest.mark.core(keep=1)
@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("loaded", LOADED)
@pytest.mark.parametrize("name", SAVED)
def test_any_layout(nxd: Nxd, states: dict[str, Any], name: str, loaded: str) -> None:
    path, wanted, weights = saved(nxd, states, name)
    layout = dataclasses.replace(LOADED[loaded], shared=SAVED[name].shared, router=SAVED[name].router)
    start(nxd, layout)
    made = build(layout, seed=1)
    assert nxd_api.load_checkpoint(path, None, *made) == {"steps": 2}
    assert differing(values(made), wanted) == [] and made[2].last_epoch == 2
    assert differing(undivided(contents.unwrapped(made[0])), weights) == []


def test_all_experts_are_one_array(nxd: Nxd, states: dict[str, Any]) -> None:
    """In the order of their numbers; Orbax reads it without this package."""
    path, wanted, weights = saved(nxd, states, "tp2-ep2-zero1")
    index = json.loads((path / "two/model/tensors.json").read_text())
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        for part, names in (("model", [*weights]), ("optim", [n for n in wanted if n.startswith("exp_avg")])):
            args = {n: ocp.RestoreArgs(restore_type=np.ndarray) for n in names}
            how = ocp.args.PyTreeRestore(item=dict.fromkeys(names, 0), restore_args=args, partial_restore=True)
            found = checkpointer.restore(path / "two" / part / "arrays", args=how)
            for name in names:
                whole = torch.from_numpy(np.array(found[name])).reshape(-1)
                assert torch.equal(whole[: wanted[name].numel()], wanted[name].reshape(-1)), name
    gate_up = index["tensors"]["layers.0.mlp.expert_mlps.mlp_op.gate_up_proj.weight"]
    assert gate_up["shape"] == [4, 8, 24] and gate_up["stored"] == [4, 8, 2, 12] and gate_up["experts"] is True
    assert [n for n, e in index["tensors"].items() if "experts" in e] == [n for n in weights if "mlp_op" in n]
    assert index["layout"]["ep"] == 2


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_training_goes_on_bit_for_bit(nxd: Nxd, tmp_path: Path, dtype: torch.dtype, background: bool) -> None:
    """In the same layout; master weights of bfloat16 experts are kept, which NxD drops. In the background the state of the moment of saving is written."""
    layout = Layout(8, tp=2, ep=2, zero1=True)
    start(nxd, layout)
    made = build(layout, dtype=dtype)
    train(layout, made, 0, 2)
    before = values(made)
    assert any(name.startswith("master/") and "mlp_op" in name for name in before) is (dtype == torch.bfloat16)
    nxd_api.save_checkpoint(tmp_path, "two", *made, async_save=background)
    expected = train(layout, made, 2, 4)
    nxd_api.finalize_checkpoint()
    after = values(made)

    start(nxd, layout)
    made = build(layout, seed=9, dtype=dtype)
    nxd_api.load_checkpoint(tmp_path, None, *made)
    assert differing(values(made), before) == []
    assert train(layout, made, 2, 4) == expected
    assert differing(values(made), after) == []


def test_master_weights_load_at_another_size(nxd: Nxd, tmp_path: Path) -> None:
    layout, other = Layout(8, tp=2, ep=2, zero1=True), Layout(4, ep=4, zero1=True)
    start(nxd, layout)
    made = build(layout, dtype=torch.bfloat16)
    train(layout, made, 0, 2)
    wanted = values(made)
    nxd_api.save_checkpoint(tmp_path, "two", *made, avoid_saving_lower_precision_weights=True)
    start(nxd, other)
    made = build(other, seed=9, dtype=torch.bfloat16)
    nxd_api.load_checkpoint(tmp_path, None, *made)
    assert differing(values(made), wanted) == []


ARRANGED = Arrangement(4, tp=2, ep=2, zero1=True, held=((0, 3), (2, 1)))
OTHERS = {
    "alone": Arrangement(1),
    "runs": Arrangement(4, ep=4),
    "another order": Arrangement(8, ep=2, zero1=True, held=((3, 1), (0, 2))),
    "blocks": Arrangement(4, tp=2, ep=2, held=((2, 3), (0, 1))),
    "groups that are no lines of the mesh": Arrangement(6, cp=3, ep=2, zero1=True, held=((0, 3), (2, 1))),
}


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("name", OTHERS)
def test_an_order_of_their_own(nxd: Nxd, tmp_path: Path, name: str) -> None:
    """Whatever ranks hold which experts, checkpoints hold them by their numbers, and so do full tensors."""
    made = ARRANGED.build(nxd)
    wanted = values(made)
    nxd_api.save_checkpoint(tmp_path, "t", *made)
    made = OTHERS["alone"].build(nxd)
    alone = values(made)
    for weight in ("up.weight", "down.weight", "up.bias", "down.bias"):
        torch.testing.assert_close(wanted[weight], alone[weight])
    made = OTHERS[name].build(nxd, seed=1)
    nxd_api.load_checkpoint(tmp_path, "t", *made)
    assert differing(values(made), wanted) == []
    nxd_api.save_checkpoint(tmp_path, "back", *made)
    made = ARRANGED.build(nxd, seed=2)
    nxd_api.load_checkpoint(tmp_path, "back", *made)
    assert differing(values(made), wanted) == []


def test_state_dicts(nxd: Nxd, tmp_path: Path) -> None:
    """In place of model and optimizer: rank by rank, for the same layout."""
    made = ARRANGED.build(nxd)
    wanted = values(made)
    nxd_api.save_checkpoint(tmp_path, "t", made[0].state_dict(), made[1].state_dict())
    made = ARRANGED.build(nxd, seed=1)
    nxd_api.load_checkpoint(tmp_path, "t", *made)
    assert differing(values(made), wanted) == []


def test_biases_of_routers_are_saved_and_counters_are_not(nxd: Nxd, tmp_path: Path) -> None:
    layout = Layout(4, ep=2, router="group")
    start(nxd, layout)
    made = build(layout, balanced=True)
    expert_load.track(made[0])
    train(layout, made, 0, 2)
    moved = values(made)["buffer/layers.1.mlp.router.e_score_correction_bias"]
    assert moved.shape == (4,) and moved.any()
    nxd_api.save_checkpoint(tmp_path, "t", *made)
    names = json.loads((tmp_path / "t/model/tensors.json").read_text())["tensors"]
    assert {n for n in names if ".router." in n} == {
        f"layers.{k}.mlp.router.{n}" for k in range(2) for n in ("linear_router.weight", "e_score_correction_bias")
    }
    assert [n for n, _ in contents.unwrapped(made[0]).named_buffers() if ".load." in n] and not [n for n in names if ".load." in n]
    other = dataclasses.replace(layout, ranks=1, ep=1)
    start(nxd, other)
    made = build(other, seed=1)  # without counters
    nxd_api.load_checkpoint(tmp_path, "t", *made)
    assert torch.equal(values(made)["buffer/layers.1.mlp.router.e_score_correction_bias"], moved)


@pytest.mark.parametrize("ep", [1, 2])
def test_another_number_of_experts(nxd: Nxd, tmp_path: Path, ep: int) -> None:
    made = Arrangement(2, ep=2).build(nxd)
    nxd_api.save_checkpoint(tmp_path, "t", *made)
    made = Arrangement(2, ep=ep, experts=8).build(nxd)
    before = values(made)
    with pytest.raises(RuntimeError) as caught:
        nxd_api.load_checkpoint(tmp_path, "t", *made)
    text = "up.weight has shape [4, 8, 12] in the checkpoint, [8, 8, 12] in the model (it is of 4 experts, and 8 are needed)"
    assert text in str(caught.value) and differing(values(made), before) == []
