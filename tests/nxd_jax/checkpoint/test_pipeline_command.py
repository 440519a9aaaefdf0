"""`nxd-ckpt` and NxD's files of a pipeline: what it shows, what it reads, what it writes without a model, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd_api
import pytest
import torch

from nxd_jax import ckpt
from nxd_jax.checkpoint import stage_rules
from tests.nxd_jax.checkpoint import job
from tests.nxd_jax.checkpoint.pipeline_files import MOMENTS, Written, drawn
from tests.nxd_jax.checkpoint.pipeline_job import Layout, values
from tests.nxd_jax.conftest import Nxd

SPLITS = ("--split", r".*\.up\..*=0", "--split", ".*down.*=1", "--split", ".*=none")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """`run(0, "inspect", path)`: the command's output, given its exit status."""

    def call(status: int, *arguments: Any) -> str:
        found = ckpt.main([str(a) for a in arguments])
        shown = capsys.readouterr()
        assert found == status, shown
        return shown.out if status != 2 else shown.err

    return call


def names_file(path: Path, written: Written) -> Path:
    """The names of an optimizer's parameters, pipeline rank 0's first."""
    path.write_text("\n".join(name for pp in range(written.pp) for group in written.groups(pp) for name in group))
    return path


def test_inspect(nxd: Nxd, run: Any, tmp_path: Path) -> None:
    Written(4, 2, 2, zero1=True, tied=True).write(tmp_path / "t", drawn(0, True), MOMENTS)
    shown = run(0, "inspect", tmp_path, "--tensors")
    assert "written by tp 2, pp 4, dp 2, ep 1, ZeRO-1" in shown and " on the 4 pipeline ranks of one tensor-parallel rank" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["model", "layers.2.down.weight", "float32", "[8,", "8]", "2", "x", "[8,", "8]", "pipeline", "rank", "2"] in lines
    assert [line[-3:] for line in lines if line[:2] == ["optimizer", "pp_rank_03:"]] == [["pipeline", "rank", "3"]] * 24
    found = json.loads(run(0, "inspect", tmp_path, "--json", "--tensors"))["tensors"]
    assert found["model"]["head.weight"]["pp"] == [3] and "pp_rank_00: exp_avg/0" in found["optimizer"]
    layout = Layout(4, 2, 2)
    layout.start(nxd)
    nxd_api.save_checkpoint(tmp_path / "ours", "u", layout.build()[0])
    shown = run(0, "inspect", tmp_path / "ours", "--tensors")
    assert "written by world 4, tp 2, pp 2" in shown
    assert next(line for line in shown.splitlines() if " layers.3.down.weight " in line).endswith("pipeline rank 1")


@pytest.mark.core(keep=1)
@pytest.mark.parametrize(
    "written",
    [Written(4, 2, 2, zero1=True, tied=True), Written(2, 2, stages=2), Written(2, 2, 3, stages=2, zero1=True, xser=True)],
    ids=str,
)
def test_to_ours_and_back(nxd: Nxd, run: Any, tmp_path: Path, written: Written) -> None:
    """Without any model: what comes back is what was there, file by file."""
    full = drawn(0, written.tied)
    folder = written.write(tmp_path / "theirs/t", full, MOMENTS)
    names = names_file(tmp_path / "names", written)
    shown = run(0, "convert", tmp_path / "theirs", tmp_path / "ours", "--to", "nxd", *SPLITS, "--param-names", names)
    assert "wrote model and optimizer, 28 tensors" in shown
    shown = run(0, "verify", tmp_path / "ours", "--against", tmp_path / "theirs", *SPLITS)
    assert "note: the optimizers are not compared: " in shown and "which are which is not in NxD's files\n" in shown
    nxd(1)
    made = Layout(1).build(tied=written.tied)
    nxd_api.load_checkpoint(tmp_path / "ours", "t", *made)
    found = values(made)
    assert job.differing({n: found[n] for n in found if not n.startswith(("exp", "step"))}, {n: full[n] for n in found if n in full}) == []
    assert all(torch.equal(found[f"exp_avg/{n}"], MOMENTS["exp_avg"][n]) for n in full if f"exp_avg/{n}" in found)
    options = ["--zero1", "--dp", written.dp] * written.zero1 + ["--xser"] * written.xser
    pipeline = ("--tp", written.tp, "--pp", written.pp, "--vpp", written.stages)
    run(0, "convert", tmp_path / "ours", tmp_path / "back", "--to", "original", *SPLITS, *pipeline, *options)
    for part in ("model", "optim"):
        expected = sorted(p.name for p in (folder / part).iterdir())
        assert sorted(p.name for p in (tmp_path / "back/t" / part).iterdir()) == expected
    run(0, "verify", tmp_path / "back")
    again = Layout(1).build(seed=3, tied=written.tied)
    nxd_api.load_checkpoint(tmp_path / "back", "t", *again)
    assert job.differing(values(again), found) == []
    if not written.xser:
        for path in folder.glob("model/*.pt"):
            assert list(torch.load(path)) == list(torch.load(tmp_path / "back/t/model" / path.name)), path.name
        for path in folder.glob("optim/*.pt"):
            a, b = (torch.load(p, weights_only=True) for p in (path, tmp_path / "back/t/optim" / path.name))
            assert [g["params"] for g in a["param_groups"]] == [g["params"] for g in b["param_groups"]] and a.keys() == b.keys()
            key = "base_state" if written.zero1 else "state"
            for index, own in a[key].items():
                cut = torch.where(own["exp_avg"] == 99.0, 0.0, own["exp_avg"])
                assert torch.equal(cut, b[key][index]["exp_avg"]), (path.name, index)


def test_tied_weights_are_written_for_both_ranks(nxd: Nxd, run: Any, tmp_path: Path) -> None:
    """From a checkpoint of ours, which has them once."""
    layout = Layout(4, 2, 2)
    layout.start(nxd)
    made = layout.build(tied=True)
    layout.train(made, 0, 1)
    nxd_api.save_checkpoint(tmp_path / "ours", "t", *made)
    run(0, "convert", tmp_path / "ours", tmp_path / "theirs", "--to", "original", *SPLITS, "--tp", 2, "--pp", 4, "--zero1", "--dp", 2)
    written = Written(4, 2, 2, zero1=True, tied=True)
    last = torch.load(tmp_path / "theirs/t/model/dp_rank_00_tp_rank_01_pp_rank_03.pt")
    assert list(last) == written.names(3) and torch.equal(last["head.weight"], made[0].embedding.weight.detach().cpu())
    state = torch.load(tmp_path / "theirs/t/optim/dp_rank_01_tp_rank_01_pp_rank_03.pt", weights_only=True)
    index = written.groups(3)[0].index("head.weight")
    assert torch.equal(state["base_state"][index]["exp_avg"], job.moments(*made[:2])["exp_avg/embedding.weight"].chunk(2)[1])
    expected = values(made)
    nxd(1)
    again = Layout(1).build(seed=4, tied=True)
    nxd_api.load_checkpoint(tmp_path / "theirs", "t", *again)
    assert job.differing(values(again), expected) == []


def test_names_of_parameters_are_those_of_each_rank(run: Any, tmp_path: Path) -> None:
    written = Written(2, 2)
    written.write(tmp_path / "t", drawn(0), MOMENTS)
    common = ("convert", tmp_path, tmp_path / "out", "--to", "nxd", *SPLITS)
    shown = run(2, *common)
    assert "the optimizer of pipeline rank 0 has groups of [5, 6] numbered parameters, and which are which is not in NxD's files" in shown
    assert "(--param-names FILE), those of pipeline rank 0 first, then those of rank 1 and so on (11, 13 of them), convert" in shown
    (tmp_path / "names").write_text("embedding.weight\nhead.weight")
    assert "the optimizer has 24 parameters, --param-names lists 2, those of pipeline rank 0 first" in run(
        2, *common, "--param-names", tmp_path / "names"
    )


def test_files_that_do_not_belong_together(run: Any, tmp_path: Path) -> None:
    folder = Written(2).write(tmp_path / "t", drawn(0))
    first = folder / "model/dp_rank_00_tp_rank_00_pp_rank_00.pt"
    torch.save(torch.load(first) | {"norm.bias": torch.ones(8)}, first)
    text = "norm.bias is not the same in the files of pipeline ranks 0 and 1: they are of different checkpoints"
    assert f"problem: {text}" in run(1, "verify", tmp_path)
    assert text in run(2, "convert", tmp_path, tmp_path / "out", "--to", "nxd")
    shutil.move(first, folder / "model/dp_rank_00_tp_rank_00_pp_rank_02.pt")
    shown = run(1, "verify", tmp_path)
    assert "files of 2 ranks out of 3: that of dp 0, tp 0, pp 0 is missing, model/dp_rank_00_tp_rank_00_pp_rank_00.pt (1 are)" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--to", "nxd", "--pp", "2"), "--pp, --vpp and --stage say how NxD's files are written; --to nxd holds full tensors"),
        (
            ("--to", "original", "--vpp", "2"),
            "--vpp and --stage are about stages of a pipeline: give --pp, the number of its ranks, as well",
        ),
        (("--to", "original", "--stage", ".*=0"), "--vpp and --stage are about stages of a pipeline: give --pp"),
        (("--to", "original", "--pp", "0"), "--pp must be a positive number, got 0"),
        (("--to", "original", "--pp", "2", "--vpp", "0"), "--vpp must be a positive number, got 0"),
        (
            ("--to", "original", "--pp", "5"),
            "5 stages need one list of at least 5 numbered layers, such as model.layers.0; the checkpoint has: layers (4). Lower",
        ),
        (
            ("--to", "original", "--pp", "2", "--stage", "a"),
            "a rule for stages is NAMES=first, NAMES=last or NAMES=NUMBER, with a regular expression",
        ),
        (("--to", "original", "--pp", "2", "--stage", "(=1"), "'(' in the rule '(=1' is no regular expression"),
        (
            ("--to", "original", "--pp", "2", "--stage", "norm.*=2"),
            "--stage puts norm.weight into stage 2, and there are 2 stages, from 0 to 1",
        ),
    ],
)
def test_options_that_do_not_fit(run: Any, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    Written(2, tied=True).write(tmp_path / "a/t", drawn(0, True))
    assert message in run(2, "convert", tmp_path / "a", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_rules_for_stages() -> None:
    names = ["lm_head.weight", "model.embed_tokens.weight", "model.rotary.inv_freq", "model.norm.weight"]
    names += [f"model.layers.{k}.mlp.experts.{e}.weight" for k in (0, 1, 10, 2, 3) for e in (0, 1)]
    with pytest.raises(
        ValueError, match=r"which of 4 stages has model.rotary.inv_freq is not known: give rules such as --stage '.\*rotary.\*=first'"
    ):
        stage_rules.Pipeline(2, 2).by_rank(names)
    found = stage_rules.Pipeline(2, 2, stage_rules.parse([".*rotary.*=3"])).by_rank(names)
    layers = [[f"model.layers.{k}.mlp.experts.{e}.weight" for e in (0, 1)] for k in (0, 1, 2, 3, 10)]
    assert found[0] == ["model.embed_tokens.weight", *layers[0], *layers[2]]
    assert found[1][:2] == layers[1] and found[1][2:6] == [*layers[3], *layers[4]]
    assert set(found[1][6:]) == {"lm_head.weight", "model.norm.weight", "model.rotary.inv_freq"}
    assert stage_rules.Pipeline().by_rank(names) == [names]
    gpt = ["wte.weight", "wpe.weight", "h.0.ln_1.weight", "h.1.ln_1.weight", "ln_f.weight"]
    assert stage_rules.Pipeline(2).by_rank(gpt) == [gpt[:3], gpt[3:]]
    with pytest.raises(ValueError, match=r"the checkpoint has: encoder.layers \(2\), decoder.layers \(2\)"):
        stage_rules.Pipeline(2).by_rank([f"{part}.layers.{k}.weight" for part in ("encoder", "decoder") for k in (0, 1)])
