"""NxD's files of models with experts: those made by hand, from the facts of the layout, load in any layout; what is written is what they would hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import neuronx_distributed as nxd_api
import pytest
import torch
from neuronx_distributed import parallel_layers
from torch import nn

from nxd_jax.checkpoint import original
from nxd_jax.modules.moe.moe_parallel_layers import ExpertFusedRowParallelLinear
from nxd_jax.optimizer import convert_zero_checkpoints, zero_dcp_utils
from tests.nxd_jax.checkpoint import job
from tests.nxd_jax.checkpoint.expert_by_hand import Full, Written, drawn, is_expert, moments, read, shapes, write
from tests.nxd_jax.checkpoint.expert_job import Arrangement, Layout, build, differing, start, train, values
from tests.nxd_jax.conftest import Nxd

WRITTEN = {
    "tp2-ep2-zero1": Written(tp=2, ep=2, dp=4, zero1=True),
    "ep4-xser": Written(ep=4, dp=4, zero1=True, xser=True),
    "tp2-ep2": Written(tp=2, ep=2, dp=2),
    "pp2-ep2-zero1-xser": Written(ep=2, dp=2, pp=2, zero1=True, xser=True),
}
LOADED = {
    "alone": Layout(1),
    "ep2": Layout(2, ep=2),
    "tp2-ep4-zero1": Layout(8, tp=2, ep=4, zero1=True),
    "pp2-ep2-zero1": Layout(8, pp=2, ep=2, microbatches=2, zero1=True, rows=1),
}


def filled(made: Any, full: Full, state: dict[str, Full] | None = None) -> None:
    """A job holds these values."""
    found = values(made)
    for name, value in full.items():
        key = f"buffer/{name}" if name.endswith("correction_bias") else name
        assert torch.equal(found[key], value), name
    for kind, own in (state or {}).items():
        for name, value in own.items():
            assert torch.equal(found[f"{kind}/{name}"], value), f"{kind}/{name}"
    if state:
        assert all(v == 7 for k, v in found.items() if k.startswith("step/"))


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("loaded", LOADED)
@pytest.mark.parametrize("written", WRITTEN)
def test_into_any_layout(nxd: Nxd, tmp_path: Path, written: str, loaded: str) -> None:
    full, state = drawn(0), moments()
    WRITTEN[written].write(tmp_path / "t", full, state)
    start(nxd, LOADED[loaded])
    made = build(LOADED[loaded], seed=5)
    assert nxd_api.load_checkpoint(tmp_path, None, *made) == {"steps": 7}
    filled(made, full, state)
    assert [(g["lr"], g["weight_decay"]) for g in made[1].param_groups] == [(0.004, 0.1), (0.004, 0.0)]
    assert made[2].last_epoch == 4


LAYOUTS = {
    "tp2-ep2-zero1": Layout(8, tp=2, ep=2, zero1=True),
    "tp2-ep2": Layout(8, tp=2, ep=2),
    "ep4": Layout(4, ep=4),
    "pp2-ep2-zero1": Layout(8, pp=2, ep=2, microbatches=2, zero1=True, rows=1),
    "pp2-ep2-group": Layout(4, pp=2, ep=2, microbatches=2, rows=1, router="group"),
}


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("xser", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_written(nxd: Nxd, tmp_path: Path, name: str, xser: bool) -> None:
    """File by file what one made by hand holds, as plain torch reads it."""
    layout = LAYOUTS[name]
    start(nxd, layout)
    made = build(layout)
    train(layout, made, 0, 1)
    held = values(made)
    bias = layout.router == "group"
    full = {n: held[n if n in held else f"buffer/{n}"] for n in shapes(bias)}
    state = {kind: {n: held[f"{kind}/{n}"] for n in shapes()} for kind in ("exp_avg", "exp_avg_sq")}
    original.export_original(tmp_path, "t", *made, xser=xser)
    wanted = Written(layout.tp, layout.ep, layout.dp, layout.pp, layout.zero1, bias=bias, steps=1).files(full, state)
    paths = [p for p in (tmp_path / "t").rglob("*rank*.pt") if not p.name.endswith(".info.pt")]
    assert {str(p.relative_to(tmp_path / "t")) for p in paths} == set(wanted)
    for path in paths:
        check(
            read(path),
            wanted[str(path.relative_to(tmp_path / "t"))],
            later=xser and "_ep_rank_" in path.name and "ep_rank_00" not in path.name,
        )
        if xser and path.parent.name == "model":
            check_info(path)


def check(found: Any, wanted: Any, later: bool) -> None:
    """A file's data. later: it is of an expert-parallel rank after the first, and an xser: what is not of experts is not there."""
    if isinstance(wanted, torch.Tensor) and found is None:
        assert later
    elif isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted.masked_fill(wanted == 99.0, 0.0)), (found, wanted)
    elif isinstance(wanted, dict):
        if "param_groups" not in wanted:
            assert set(found) == set(wanted)
        for key, value in wanted.items():
            if later and isinstance(key, str) and "." in key:
                assert (found[key] is not None) == is_expert(key), key
            check(found[key], value, later)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert a["params"] == b["params"] and a["weight_decay"] == b["weight_decay"]


def check_info(path: Path) -> None:
    """NxD's loader goes by `info.pt`."""
    info = torch.load(f"{path}.info.pt", weights_only=True)
    with torch.serialization.safe_globals([original.original_files.xser.TensorReference]):
        data = torch.load(path, weights_only=True)
    for name, reference in data.items():
        said = info[reference.tid]
        assert said["expert_model_parallel"] is is_expert(name) and tuple(said["shape"]) and said["dtype"] == torch.float32


# -- there and back ------------------------------------------------------------------------------------


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_CHECKPOINT_FORMAT", "original")


ROUND = {
    "zero1-bfloat16": (Layout(8, tp=2, ep=2, zero1=True), Layout(4, ep=4, zero1=True), torch.bfloat16),
    "no zero1": (Layout(4, ep=4), Layout(8, tp=2, ep=2), torch.float32),
    "pipeline": (Layout(8, pp=2, ep=2, microbatches=2, rows=1), Layout(8, pp=2, ep=4, microbatches=2, zero1=True, rows=1), torch.float32),
}


@pytest.mark.thorough(keep=1)
@pytest.mark.usefixtures("theirs")
@pytest.mark.parametrize("xser", [False, True])
@pytest.mark.parametrize("name", ROUND)
def test_there_and_back(nxd: Nxd, tmp_path: Path, name: str, xser: bool) -> None:
    """`save_checkpoint`, in the background as well, and any layout again, master weights too; in the same layout training goes on bit for bit."""
    layout, other, dtype = ROUND[name]
    start(nxd, layout)
    made = build(layout, dtype=dtype)
    train(layout, made, 0, 2)
    wanted = values(made)
    nxd_api.save_checkpoint(tmp_path, "two", *made, use_xser=xser, async_save=xser)
    losses = train(layout, made, 2, 4)
    nxd_api.finalize_checkpoint()
    after = values(made)
    made = build(layout, seed=1, dtype=dtype)
    nxd_api.load_checkpoint(tmp_path, None, *made)
    assert differing(values(made), wanted) == []
    assert train(layout, made, 2, 4) == losses and differing(values(made), after) == []
    start(nxd, other)
    made = build(other, seed=1, dtype=dtype)
    nxd_api.load_checkpoint(tmp_path, None, *made)
    found = values(made)
    assert differing({n: t for n, t in found.items() if n in wanted}, wanted) == []


@pytest.mark.usefixtures("theirs")
def test_weights_in_master_weights_alone(nxd: Nxd, tmp_path: Path) -> None:
    layout, other = Layout(8, tp=2, ep=2, zero1=True), Layout(4, ep=4, zero1=True)
    start(nxd, layout)
    made = build(layout, dtype=torch.bfloat16)
    train(layout, made, 0, 1)
    wanted = values(made)
    nxd_api.save_checkpoint(tmp_path, "t", *made, use_xser=True, avoid_saving_lower_precision_weights=True)
    assert not list((tmp_path / "t/model").glob("*.tensors/*"))
    start(nxd, other)
    made = build(other, seed=1, dtype=torch.bfloat16)
    nxd_api.load_checkpoint(tmp_path, None, *made)
    assert differing(values(made), wanted) == []


ARRANGED = Arrangement(4, tp=2, ep=2, held=((0, 3), (2, 1)))


@pytest.mark.parametrize("xser", [False, True])
def test_an_order_of_their_own(nxd: Nxd, tmp_path: Path, xser: bool) -> None:
    """Our files note it; so they load where experts are held in another order. Each rank's has its own experts, as NxD's."""
    made = ARRANGED.build(nxd)
    wanted = values(made)
    original.export_original(tmp_path, "t", *made, xser=xser)
    own = read(tmp_path / "t/model/dp_rank_00_ep_rank_01_tp_rank_00_pp_rank_00.pt")
    assert torch.equal(own["down.bias"], wanted["down.bias"][[2, 1]])
    for how in (Arrangement(1), Arrangement(4, ep=2, held=((3, 1), (0, 2))), Arrangement(4, ep=4)):
        made = how.build(nxd, seed=1)
        nxd_api.load_checkpoint(tmp_path, "t", *made)
        assert differing(values(made), wanted) == []


class Experts(nn.Module):
    """A weight of experts and one that all ranks have."""

    def __init__(self, held: list[list[int]] | None = None):
        super().__init__()
        self.experts = ExpertFusedRowParallelLinear(4, 2, 3, expert_distribution=held)
        self.norm = nn.Parameter(torch.ones(3))


FULL = torch.arange(24.0).view(4, 2, 3)


def files_of_two(folder: Path, order: list[list[int]], xser: bool = False, flag: bool | None = True) -> None:
    """Two expert-parallel ranks' files, as NxD writes them."""
    for e, own in enumerate(order):
        path = folder / f"model/dp_rank_00_ep_rank_{e:02d}_tp_rank_00_pp_rank_00.pt"
        write(path, {"experts.weight": FULL[own], "norm": torch.full((3,), 2.0)}, xser)
        if xser:
            info = torch.load(f"{path}.info.pt")
            info[0]["expert_model_parallel"] = flag
            torch.save(FULL[own].clone(), f"{path}.tensors/tensor_0.pt")
            torch.save(info, f"{path}.info.pt")
    (folder / "done").write_text("1")


def test_their_files_are_in_the_order_of_the_layer(nxd: Nxd, tmp_path: Path) -> None:
    """NxD's files do not say who had which experts: at the same size they are those of the layer's expert_distribution."""
    held = [[0, 3], [2, 1]]
    files_of_two(tmp_path / "t", held)
    nxd(2, ep=2)
    model = Experts(held).to("xla")
    nxd_api.load_checkpoint(tmp_path, "t", model)
    assert torch.equal(job.weights(model)["experts.weight"], FULL) and model.norm.tolist() == [2.0] * 3
    nxd(4, ep=4)
    model = Experts([[3], [0], [1], [2]]).to("xla")
    with pytest.raises(
        RuntimeError,
        match=r"experts.weight has an expert_distribution for 4 .* of 2 and do not say which experts each of them had: load them at",
    ):
        nxd_api.load_checkpoint(tmp_path, "t", model)
    model = Experts().to("xla")  # taken for equal runs
    nxd_api.load_checkpoint(tmp_path, "t", model)
    assert torch.equal(job.weights(model)["experts.weight"], FULL[[0, 3, 2, 1]])


# -- what can be wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ep", [1, 2])
def test_another_number_of_experts(nxd: Nxd, tmp_path: Path, ep: int) -> None:
    made = Arrangement(2, ep=2).build(nxd)
    original.export_original(tmp_path, "t", *made)
    made = Arrangement(2, ep=ep, experts=8).build(nxd)
    before = values(made)
    with pytest.raises(RuntimeError) as caught:
        nxd_api.load_checkpoint(tmp_path, "t", *made)
    text = "down.weight has shape [4, 6, 8] on each of 1 ranks in the checkpoint, [8, 6, 8] is needed"
    assert text + " (it is of 4 experts, and 8 are needed)" * (ep == 2) in str(caught.value)
    assert differing(values(made), before) == []


def test_files_that_are_missing(nxd: Nxd, tmp_path: Path) -> None:
    Written(ep=4, dp=4).write(tmp_path / "t", drawn(0), moments())
    start(nxd, Layout(1))
    model = build(Layout(1))[0]
    folder = tmp_path / "t/model"
    (folder / "dp_rank_00_ep_rank_01_tp_rank_00_pp_rank_00.pt").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"files of 3 ranks out of 4: that of dp 0, tp 0, pp 0, ep 1 is missing, model/dp_rank_00_ep_rank_01_tp_r"
    ):
        nxd_api.load_checkpoint(tmp_path, "t", model)
    (folder / "dp_rank_00_ep_rank_03_tp_rank_00_pp_rank_00.pt").unlink()
    (folder / "dp_rank_00_ep_rank_02_tp_rank_00_pp_rank_00.pt").rename(folder / "dp_rank_00_ep_rank_01_tp_rank_00_pp_rank_00.pt")
    with pytest.raises(
        ValueError, match=r"those of the model are of 2 expert-parallel ranks, those of the optimizer of 4. Copy the files of all nodes"
    ):
        nxd_api.load_checkpoint(tmp_path, "t", model)
    (folder / "dp_rank_00_ep_rank_01_tp_rank_00_pp_rank_00.pt").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"has files of expert-parallel rank 0 alone \(model/dp_rank_00_ep_rank_00_tp.* copy the files of all nodes"
    ):
        nxd_api.load_checkpoint(tmp_path, "t", model)
    Written(ep=2, dp=4, zero1=True).write(tmp_path / "u", drawn(0), moments())
    (tmp_path / "u/optim/dp_rank_03_tp_rank_00_pp_rank_00.pt").unlink()
    with pytest.raises(
        ValueError, match="of 2 expert-parallel ranks, those of the optimizer of 3 data-parallel ranks, which 2 do not divide. Copy the f"
    ):
        nxd_api.load_checkpoint(tmp_path, "u", model)


def test_info_that_disagrees(nxd: Nxd, tmp_path: Path) -> None:
    """With the model: it says that all ranks held the same experts; with itself: that some rank's are shared out and another's not."""
    nxd(2, ep=2)
    model = Experts().to("xla")
    before = job.weights(model)
    files_of_two(tmp_path / "t", [[0, 1], [2, 3]], xser=True, flag=False)
    with pytest.raises(
        RuntimeError, match=r"info.pt says that all 2 expert-parallel ranks held the same experts.weight, and as the model has it they"
    ):
        nxd_api.load_checkpoint(tmp_path, "t", model)
    path = tmp_path / "t/model/dp_rank_00_ep_rank_01_tp_rank_00_pp_rank_00.pt.info.pt"
    info = torch.load(path)
    info[0]["expert_model_parallel"] = True
    torch.save(info, path)
    with pytest.raises(
        ValueError, match=r"do not say the same of whether expert-parallel ranks share out experts.weight, or of who has which"
    ):
        nxd_api.load_checkpoint(tmp_path, "t", model)
    assert differing(job.weights(model), before) == []


def test_shapes_that_differ_among_ranks(nxd: Nxd, tmp_path: Path) -> None:
    nxd(2, ep=2)
    files_of_two(tmp_path / "t", [[0, 1], [3]])
    with pytest.raises(RuntimeError, match=r"experts.weight has different shapes on expert-parallel ranks: \[\(1, 2, 3\), \(2, 2, 3\)\]"):
        nxd_api.load_checkpoint(tmp_path, "t", Experts().to("xla"))


def test_a_state_without_offsets(nxd: Nxd, tmp_path: Path) -> None:
    """ZeRO-1's state of a model with experts that was not numbered as NxD's optimizer does."""
    written = Written(ep=2, dp=2, zero1=True)
    written.write(tmp_path / "t", drawn(0), moments())
    for path in (tmp_path / "t/optim").iterdir():
        data = torch.load(path)
        torch.save({k: v for k, v in data.items() if not k.startswith("ep_")}, path)
    start(nxd, Layout(1))
    made = build(Layout(1))
    with pytest.raises(
        ValueError,
        match=r"optim/dp_rank_00_tp_rank_00_pp_rank_00.pt: the state is not of a ZeRO-1 optimizer with expert parallelism: .* ep_pa",
    ):
        nxd_api.load_checkpoint(tmp_path, "t", *made)


def test_what_nxd_does_not_write_of_experts(nxd: Nxd, tmp_path: Path) -> None:
    """With use_xser and without ZeRO-1 it writes the first expert-parallel rank's state alone."""
    Written(ep=2, dp=2, xser=True).write(tmp_path / "t", drawn(0), moments())
    start(nxd, Layout(2, ep=2))
    made = build(Layout(2, ep=2), seed=1)
    with pytest.raises(
        ValueError,
        match=r"ep_rank_01_.* has no values of exp_avg/layers.0.mlp.expert_mlps.mlp_op.gate_up_proj.weight, of which .* \(optimizer=None",
    ):
        nxd_api.load_checkpoint(tmp_path, "t", *made)
    nxd_api.load_checkpoint(tmp_path, "t", made[0])
    assert differing(job.weights(made[0]), drawn(0)) == []


def test_an_optimizer_alone(nxd: Nxd, tmp_path: Path) -> None:
    """Without a model in the files experts are known by this one's parameters; without experts here they cannot be told apart."""
    state = moments()
    Written(ep=2, dp=2, zero1=True).write(tmp_path / "t", drawn(0), state)
    for path in (tmp_path / "t/model").iterdir():
        path.unlink()
    layout = Layout(4, ep=4, zero1=True)
    start(nxd, layout)
    made = build(layout, seed=1)
    nxd_api.load_checkpoint(tmp_path, "t", None, made[1])
    filled(made, {}, state)
    start(nxd, Layout(1))
    made = build(Layout(1))
    with pytest.raises(
        ValueError,
        match="has an optimizer of a model with experts and no model, and which of the parameters here are of experts is not known",
    ):
        nxd_api.load_checkpoint(tmp_path, "t", None, made[1])


def test_an_optimizer_by_numbers(nxd: Nxd, tmp_path: Path) -> None:
    """Without model= parameters have numbers: experts are known where ranks share them out, and not on one rank."""
    state = moments()
    Written(ep=2, dp=2, zero1=True).write(tmp_path / "t", drawn(0), state)
    layout = Layout(4, ep=4)
    start(nxd, layout)
    made = build(layout, seed=1)
    nxd_api.load_checkpoint(tmp_path, "t", optimizer=made[1])
    filled(made, {}, state)
    start(nxd, Layout(1))
    made = build(Layout(1))
    with pytest.raises(
        ValueError, match="has the optimizer of a model with experts, .* is not known: pass model= as well, so that they go by name"
    ):
        nxd_api.load_checkpoint(tmp_path, "t", optimizer=made[1])


def test_state_dicts(nxd: Nxd, tmp_path: Path, theirs: None) -> None:
    """In place of model and optimizer: the same files."""
    for zero1 in (False, True):
        layout = Layout(4, ep=2, zero1=zero1)
        start(nxd, layout)
        model, optimizer, _ = made = build(layout)
        train(layout, made, 0, 1)
        for xser in (False, True):
            tags = [f"{zero1}-{xser}-{k}" for k in range(2)]
            nxd_api.save_checkpoint(tmp_path, tags[0], model, optimizer, use_xser=xser)
            nxd_api.save_checkpoint(tmp_path, tags[1], model.state_dict(), optimizer.state_dict(), use_xser=xser)
            paths = [sorted(str(p.relative_to(tmp_path / t)) for p in (tmp_path / t).rglob("*rank*") if p.is_file()) for t in tags]
            assert paths[0] == paths[1] and len(paths[0]) >= 4
            for name in (n for n in paths[0] if n.endswith("00.pt")):
                torch.testing.assert_close(read(tmp_path / tags[0] / name), read(tmp_path / tags[1] / name), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:parallel_layers.save")
@pytest.mark.parametrize("xser", [False, True])
def test_older_files_of_every_rank(nxd: Nxd, tmp_path: Path, xser: bool) -> None:
    """`parallel_layers.save(master_dp_only=False)` keeps each rank's experts, and `load` gives them back."""
    layout = Layout(4, ep=2, zero1=True)
    start(nxd, layout)
    made = build(layout)
    train(layout, made, 0, 1)
    wanted = values(made)
    data = {"model": made[0].state_dict(), "optimizer": made[1].state_dict()}
    parallel_layers.save(data, tmp_path, save_xser=xser, master_dp_only=False)
    made = build(layout, seed=1)
    rest = parallel_layers.load(tmp_path, made[0], load_xser=xser, master_dp_only=False)
    made[1].load_state_dict(rest["optimizer"])
    assert differing(values(made), wanted) == []


def test_sharded_states_and_dcp(nxd: Nxd, tmp_path: Path) -> None:
    """Other ways to save a ZeRO-1 optimizer."""
    layout, other = Layout(4, ep=2, zero1=True), Layout(2)
    start(nxd, layout)
    made = build(layout)
    train(layout, made, 0, 1)
    wanted = values(made)
    made[1].optimizer.save_sharded_state_dict(str(tmp_path / "sharded"))
    infos = zero_dcp_utils.get_dcp_aux_infos(made[0], made[1].optimizer)
    state = made[1].state_dict()
    assert {k: tuple(s) for k, s in infos["shape_info"].items()} == {k: tuple(s) for k, s in state["shape_info"].items()}
    zero_dcp_utils.save_optim_state_dict(tmp_path / "dcp", state, infos)
    nxd_api.save_checkpoint(tmp_path / "model", "t", made[0])
    for kind in ("sharded", "dcp"):
        again = build(layout, seed=1)
        nxd_api.load_checkpoint(tmp_path / "model", "t", again[0])
        if kind == "sharded":
            again[1].optimizer.load_sharded_state_dict(str(tmp_path / "sharded"))
        else:
            zero_dcp_utils.load_optim_state_dict(tmp_path / "dcp", again[1].optimizer, infos | {"model": again[0]})
        assert differing(values(again), wanted) == []
    start(nxd, other)
    again = build(other, seed=1)
    nxd_api.load_checkpoint(tmp_path / "model", "t", again[0])
    nxd_api.load_checkpoint(tmp_path / "dcp", "zero1_optim", optimizer=again[1])
    assert differing(values(again), wanted) == []


def test_rows_of_experts_are_not_resharded(nxd: Nxd, tmp_path: Path) -> None:
    Written(ep=2, dp=4, zero1=True).write(tmp_path / "t", drawn(0), moments())
    with pytest.raises(
        ValueError, match=r"is of a model with experts, of which data-parallel ranks have different ones: .* nxd-ckpt convert"
    ):
        convert_zero_checkpoints.convert(tmp_path / "t", tmp_path / "out", "sharded_to_full")
