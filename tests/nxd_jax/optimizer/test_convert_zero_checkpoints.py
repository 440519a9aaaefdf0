"""`nxd_convert_zero_checkpoints` with NxD's own options: full states and back, bit for bit."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from nxd_jax.checkpoint import original_files, original_writing
from nxd_jax.optimizer.convert_zero_checkpoints import main


def state(dp: int, size: int, tp: int) -> dict[str, Any]:
    """What rank `dp` of `size` keeps of parameters of 5 rows and of 4."""
    whole = [torch.arange(5 * 3.0).view(5, 3) + 100 * tp, torch.arange(4.0) + 100 * tp]
    base, master = {}, {}
    for k, t in enumerate(whole):
        rows = -(-len(t) // size)
        padded = torch.cat([t, t.new_zeros(rows * size - len(t), *t.shape[1:])])
        base[k] = {"step": torch.tensor(3.0), "exp_avg": padded.chunk(size)[dp].clone()}
        master[k] = padded.chunk(size)[dp] + 0.5 * (padded.chunk(size)[dp] != 0)
    groups = [{"lr": 0.1, "params": [0, 1]}]
    shapes = {k: t.shape for k, t in enumerate(whole)}
    return {"state": {}, "param_groups": groups, "base_state": base, "shape_info": shapes, "sharded_master_weights": master}


def write(folder: pathlib.Path, size: int, xser: bool = False) -> pathlib.Path:
    for dp in range(size):
        for tp in range(2):
            original_writing.write(folder / "optim" / original_files.Rank(dp, tp).file_name(), state(dp, size, tp), xser)
    return folder


def read(path: pathlib.Path) -> Any:
    return original_files.File(path).whole()


def run(*arguments: Any) -> int:
    return main([str(a) for a in arguments])


@pytest.mark.parametrize("xser", [False, True])
def test_full_and_back(tmp_path: pathlib.Path, xser: bool, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in", 3, xser)
    assert run("--input_dir", source, "--output_dir", tmp_path / "full", "--convert_to_full", "--num_workers", 4) == 0
    assert capsys.readouterr().out == f"wrote 2 files to {tmp_path / 'full/optim'}\n"
    names = sorted(p.name for p in (tmp_path / "full/optim").iterdir() if p.suffix == ".pt" and "info" not in p.name)
    assert names == ["full_tp_rank_00_pp_rank_00.pt", "full_tp_rank_01_pp_rank_00.pt"]
    for tp, name in enumerate(names):
        torch.testing.assert_close(read(tmp_path / "full/optim" / name), state(0, 1, tp), rtol=0, atol=0)
    assert run("--input_dir", tmp_path / "full", "--output_dir", tmp_path / "back", "--convert_to_sharded", "--dp_size", 3) == 0
    assert (tmp_path / "back/optim/dp_rank_00_tp_rank_00_pp_rank_00.pt.tensors").is_dir() is xser
    for dp in range(3):
        for tp in range(2):
            path = tmp_path / "back/optim" / original_files.Rank(dp, tp).file_name()
            torch.testing.assert_close(read(path), state(dp, 3, tp), rtol=0, atol=0)


def test_from_one_number_of_ranks_to_another(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "in", 2)
    assert run("--input_dir", tmp_path / "in", "--output_dir", tmp_path / "out", "--convert_to_sharded", "--dp_size", 4) == 0
    torch.testing.assert_close(read(tmp_path / "out/optim" / original_files.Rank(3, 1).file_name()), state(3, 4, 1), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--convert_to_sharded"], "full_to_sharded needs dp_size, the number of data-parallel ranks to write for, got None"),
        (["--convert_to_full", "--dp_size", "2"], "dp_size=2: sharded_to_full writes whole rows"),
    ],
)
def test_sizes_that_do_not_fit(tmp_path: pathlib.Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in", 1)
    assert run("--input_dir", tmp_path / "in", "--output_dir", tmp_path / "out", *arguments) == 2
    assert message in capsys.readouterr().err


def test_what_there_is_already(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in", 1)
    full = ("--input_dir", tmp_path / "full", "--convert_to_full")
    assert run("--input_dir", source, "--output_dir", tmp_path / "full", "--convert_to_full") == 0
    assert run(*full, "--output_dir", tmp_path / "again") == 2
    assert "holds full_tp_rank_00_pp_rank_00.pt: these are full states already" in capsys.readouterr().err
    assert run("--input_dir", source, "--output_dir", tmp_path / "full", "--convert_to_sharded", "--dp_size", 2) == 2
    assert "holds full_tp_rank_00_pp_rank_00.pt already: give an empty output_dir" in capsys.readouterr().err
    write(tmp_path / "full", 1)
    assert run("--input_dir", tmp_path / "full", "--output_dir", tmp_path / "o", "--convert_to_sharded", "--dp_size", 2) == 2
    assert "holds full states and parts (full_tp_rank_00_pp_rank_00.pt and dp_rank_00_tp_rank_00_pp_rank_00.pt)" in capsys.readouterr().err


def test_one_of_the_three_is_needed(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--input_dir", tmp_path, "--output_dir", tmp_path)
    assert "one of the arguments --convert_to_full --convert_to_sharded --convert_type is required" in capsys.readouterr().err
