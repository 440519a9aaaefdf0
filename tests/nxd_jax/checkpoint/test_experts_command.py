"""`nxd-ckpt` and models with experts: what it shows, what it reads and writes without a model, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd_api
import pytest
import torch

from nxd_jax import ckpt
from nxd_jax.checkpoint import joining
from tests.nxd_jax.checkpoint.expert_by_hand import Written, drawn, moments, read
from tests.nxd_jax.checkpoint.expert_job import Layout, build, differing, start, train, values
from tests.nxd_jax.conftest import Nxd

SPLITS = ("--split", r".*\d\.up\..*=0", "--split", r".*\d\.down\..*=1", "--split", ".*(norms|embedding|head).*=none")


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
    Written(tp=2, ep=2, dp=4, zero1=True).write(tmp_path / "t", drawn(0), moments())
    shown = run(0, "inspect", tmp_path, "--tensors")
    assert "written by tp 2, pp 1, dp 4, ep 2, ZeRO-1" in shown
    lines = {line.split()[1]: line for line in shown.splitlines() if line.startswith("model ")}
    name = "layers.1.mlp.expert_mlps.mlp_op.gate_up_proj.weight"
    assert lines[name].endswith("4 x [2, 8, 12]  experts") and lines["layers.1.up.weight"].endswith("2 x [8, 8]")
    start(nxd, Layout(4, ep=2))
    nxd_api.save_checkpoint(tmp_path / "ours", "u", build(Layout(4, ep=2))[0])
    shown = run(0, "inspect", tmp_path / "ours", "--tensors")
    assert "dp 4, cp 1, ep 2" in shown
    assert next(line for line in shown.splitlines() if name in line).endswith("  experts")
    assert json.loads(run(0, "inspect", tmp_path / "ours", "--tensors", "--json"))["tensors"]["model"][name]["experts"] is True


@pytest.mark.core(keep=1)
@pytest.mark.parametrize(
    "written",
    [
        Written(tp=2, ep=2, dp=4, zero1=True),
        Written(ep=4, dp=4, zero1=True, xser=True),
        Written(tp=2, ep=2, dp=2),
        Written(ep=2, dp=4, pp=2, zero1=True),
    ],
    ids=["tp2-ep2-zero1", "ep4-zero1-xser", "tp2-ep2", "pp2-ep2-zero1"],
)
def test_to_ours_and_back(nxd: Nxd, run: Any, tmp_path: Path, written: Written) -> None:
    """Without any model: what comes back is what was there, file by file."""
    full, state = drawn(0), moments()
    folder = written.write(tmp_path / "theirs/t", full, state)
    names = names_file(tmp_path / "names", written)
    shown = run(0, "convert", tmp_path / "theirs", tmp_path / "ours", "--to", "nxd", *SPLITS, "--param-names", names)
    assert "wrote model and optimizer, 16 tensors" in shown
    run(0, "verify", tmp_path / "theirs")
    run(0, "verify", tmp_path / "ours", "--against", tmp_path / "theirs", *SPLITS)
    start(nxd, Layout(1))
    made = build(Layout(1))
    nxd_api.load_checkpoint(tmp_path / "ours", "t", *made[:2])
    found = values(made)
    assert differing({n: found[n] for n in full}, full) == []
    assert all(torch.equal(found[f"{kind}/{n}"], t) for kind, own in state.items() for n, t in own.items())
    options = ["--zero1", "--dp", written.dp] * written.zero1 + ["--xser"] * written.xser
    sizes = ("--tp", written.tp, "--pp", written.pp, "--ep", written.ep)
    run(0, "convert", tmp_path / "ours", tmp_path / "back", "--to", "original", *SPLITS, *sizes, *options)
    run(0, "verify", tmp_path / "back")
    for path in (p for p in folder.rglob("*rank*.pt") if not p.name.endswith(".info.pt")):
        same(read(tmp_path / "back/t" / path.relative_to(folder)), read(path))
    again = build(Layout(1), seed=3)
    nxd_api.load_checkpoint(tmp_path / "back", "t", *again[:2])
    assert differing(values(again), found) == []


def same(found: Any, wanted: Any) -> None:
    """A file's data; rows that pad are zeros in ours."""
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted.masked_fill(wanted == 99.0, 0.0))
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            same(found[key], value)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            same(a, b)
    else:
        assert found == wanted


def test_from_ours_for_other_ranks(nxd: Nxd, run: Any, tmp_path: Path) -> None:
    """A checkpoint of ours that one rank wrote, for four expert-parallel ranks without ZeRO-1, in files of their own."""
    layout = Layout(1)
    start(nxd, layout)
    made = build(layout)
    train(layout, made, 0, 1)
    wanted = values(made)
    nxd_api.save_checkpoint(tmp_path / "ours", "t", *made)
    run(0, "convert", tmp_path / "ours", tmp_path / "theirs", "--to", "original", *SPLITS, "--tp", 2, "--ep", 4, "--xser")
    later = tmp_path / "theirs/t/optim/dp_rank_00_ep_rank_03_tp_rank_01_pp_rank_00.pt"
    kept = read(later)["state"]
    assert sum(own["exp_avg"] is not None for own in kept.values()) == 4 and len(kept) == 16
    other = Layout(8, tp=2, ep=4)
    start(nxd, other)
    again = build(other, seed=2)
    nxd_api.load_checkpoint(tmp_path / "theirs", "t", *again[:2])
    assert differing(values(again), wanted) == []


def test_what_is_not_known(run: Any, tmp_path: Path) -> None:
    """Plain files of NxD do not say what is of experts; values do, unless they hold one number alone."""
    for e in range(2):
        path = tmp_path / f"theirs/t/model/dp_rank_00_ep_rank_{e:02d}_tp_rank_00_pp_rank_00.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"own.weight": torch.full((2, 3), 1.0 + e), "zeros": torch.zeros(2, 3), "norm": torch.ones(3), "w": torch.eye(2)}, path)
    convert = ("convert", tmp_path / "theirs/t", tmp_path / "ours", "--to", "nxd")
    assert "whether 2 expert-parallel ranks share out zeros, which hold one number alone, is not in NxD's files: give a map" in run(
        2, *convert
    )
    run(0, *convert, "--split", "zeros=experts")
    shown = run(0, "inspect", tmp_path / "ours", "--tensors")
    shapes = {line.split()[1]: line for line in shown.splitlines() if line.startswith("model ")}
    assert "[4, 3]" in shapes["own.weight"] and "[4, 3]" in shapes["zeros"] and "[2, 2]" in shapes["w"]
    back = ("convert", tmp_path / "ours", tmp_path / "back", "--to", "original")
    text = run(2, *back, "--ep", 3)
    assert "own.weight: dim 0 of shape [4, 3], the experts, does not divide by 3 expert-parallel ranks" in text
    run(0, *back, "--ep", 2)
    found = read(tmp_path / "back/converted/model/dp_rank_00_ep_rank_01_tp_rank_00_pp_rank_00.pt")
    assert torch.equal(found["own.weight"], torch.full((2, 3), 2.0)) and torch.equal(found["norm"], torch.ones(3))


def test_arguments(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "theirs/t/model"
    folder.mkdir(parents=True)
    torch.save({"weight": torch.ones(2)}, folder / "dp_rank_00_tp_rank_00_pp_rank_00.pt")
    convert = ("convert", tmp_path / "theirs/t", tmp_path / "out")
    assert "--ep must be a positive number, got 0" in run(2, *convert, "--to", "original", "--ep", 0)
    assert "--dp, --ep, --zero1 and --xser say how NxD's files are written" in run(2, *convert, "--to", "nxd", "--ep", 2)
    assert "--dp 3 must be a multiple of --ep 2" in run(2, *convert, "--to", "original", "--zero1", "--dp", 3, "--ep", 2)
    assert "no tensor is known to be of experts that 2 ranks could share out" in run(2, *convert, "--to", "original", "--ep", 2)
    assert "(of experts NAMES=experts, NAMES=experts+DIM or NAMES=experts+DIMxFUSED)" in run(
        2, *convert, "--to", "nxd", "--split", "x=expert"
    )


def test_rules() -> None:
    found = [split for _, split in joining.parse_rules(["a=experts", "b=experts+1", "c=experts+2x2", "d=0x2", "e=none"])]
    assert [(s.dim, s.stride, s.experts) for s in found] == [(None, 1, True), (1, 1, True), (2, 2, True), (0, 2, False), (None, 1, False)]
