"""Checkpoints of NeMo Megatron: every rank's weights under the names of the whole model, in files that load."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_jax.checkpoint import tags
from nxd_jax.training.converters import nnm
from tests.nxd_jax.training.converters import jobs

LAYER = re.compile(r"(.*\.layers\.)(\d+)(\..*)")


def local(name: str, first: int) -> str:
    """A name as NeMo has it on a pipeline rank."""
    found = LAYER.fullmatch(name)
    return "model." + (f"{found[1]}{int(found[2]) - first}{found[3]}" if found else name)


def write(folder: Path, nxdt: Path, tp: int, pp: int, layers: int) -> None:
    """What NeMo would have saved of the same model."""
    for t in range(tp):
        for p in range(pp):
            name = f"mp_rank_{t:02d}" if pp == 1 else f"tp_rank_{t:02d}_pp_rank_{p:03d}"
            (folder / name).mkdir(parents=True)
            state = {local(k, p * (layers // pp)): v for k, v in jobs.rank(nxdt, t, p).items()}
            torch.save({"state_dict": state, "optimizer_states": [{}], "epoch": 1}, folder / name / nnm.FILE)


def call(tmp_path: Path, tp: int, pp: int, layers: int, *more: str) -> int:
    sizes = ("--tp", str(tp), "--pp", str(pp), "--n_layers", str(layers))
    return nnm.main([*sizes, "--nnm_ckpt_path", str(tmp_path / "nnm"), "--nxdt_ckpt_path", str(tmp_path / "out"), *more])


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (2, 1)])
def test_weights_and_names(tp: int, pp: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The original writes X.info.pt where the loader looks for X.pt.info.pt."""
    hub = jobs.hub(tmp_path / "hub", num_key_value_heads=8)
    nxdt = jobs.into(hub, tmp_path / "nxdt", f"--tp_size {tp} --pp_size {pp} --model_style megatron")
    write(tmp_path / "nnm", nxdt, tp, pp, 4)
    assert call(tmp_path, tp, pp, 4, "--enable_parallel_processing", "True", "--num_parallel_processes", "2") == 0
    assert "(NeMo Megatron) -> " in capsys.readouterr().out
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint", "done", "model"] and tags.completed(tmp_path) == ["out"]
    for t in range(tp):
        for p in range(pp):
            jobs.same(jobs.rank(out, t, p), jobs.rank(nxdt, t, p))
            assert (out / "model" / f"dp_rank_00_tp_rank_{t:02d}_pp_rank_{p:02d}.pt.info.pt").is_file()
    back = jobs.back(out, tmp_path / "back", f"--config {hub}/config.json --model_style megatron")
    jobs.same(jobs.weights(back), jobs.weights(hub))
    assert call(tmp_path, tp, pp, 4) == 0 and (tmp_path / "out_v1" / "model").is_dir()
    assert call(tmp_path, tp, pp, 4) == 0 and (tmp_path / "out_v2" / "model").is_dir()


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((2, 2, 3), "--n_layers 3 must be a multiple of --pp 2"),
        ((4, 2, 4), "tp_rank_02_pp_rank_000/model_optim_rng.ckpt.* missing .4 of 8"),
        ((1, 2, 4), "tp_rank_01_pp_rank_000, tp_rank_01_pp_rank_001 more than these"),
        ((2, 2, 2), "has model.language_model.encoder.layers.1.* give each pipeline rank 1 layers, counted from 0"),
    ],
)
def test_what_is_refused(sizes: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub = jobs.hub(tmp_path / "hub", num_key_value_heads=8)
    write(tmp_path / "nnm", jobs.into(hub, tmp_path / "nxdt", "--tp_size 2 --pp_size 2 --model_style megatron"), 2, 2, 4)
    assert call(tmp_path, *sizes) == 2
    assert re.search(said, capsys.readouterr().err) and not (tmp_path / "out").exists()
    torch.save({"weights": 1}, tmp_path / "nnm" / "tp_rank_00_pp_rank_000" / nnm.FILE)
    assert call(tmp_path, 2, 2, 4) == 2 and "has no state_dict: it is no checkpoint of NeMo" in capsys.readouterr().err
