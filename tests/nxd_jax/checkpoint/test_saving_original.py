"""`NXD_JAX_CHECKPOINT_FORMAT=original`: `save_checkpoint` writes NxD's files, and everything else about it stays as it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd_api
import pytest
import torch
import torch_xla
import torch_xla.utils.serialization as xser_format
from torch import nn

from nxd_jax.checkpoint import original_files
from nxd_jax.parallel_layers import parallel_state
from nxd_jax.parallel_layers.utils import move_all_tensor_to_cpu
from tests.nxd_jax.checkpoint import job
from tests.nxd_jax.conftest import Nxd
from torch_bridge.mesh import world
from torch_bridge.recorder import sharded


@pytest.fixture(autouse=True)
def original(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_CHECKPOINT_FORMAT", "original")


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and "tensor" not in p.name and "info" not in p.name)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("xser", [False, True])
@pytest.mark.parametrize("background", [False, True])
def test_training_goes_on_bit_for_bit(nxd: Nxd, tmp_path: Path, xser: bool, background: bool) -> None:
    """With dropout, ZeRO-1, a scheduler; in the background the state of the moment of saving is written."""
    nxd(4, tp=2)
    made = job.build(2, zero1=True)
    job.train(made, 0, 2)
    before = {name: t.clone() for name, t in {**job.weights(made[0]), **job.moments(made[0], made[1])}.items()}
    content = {"step": 2, "t": torch.arange(3.0)}
    nxd_api.save_checkpoint(tmp_path, "two", *made, user_content=content, use_xser=xser, async_save=background)
    expected = job.train(made, 2, 4)
    nxd_api.finalize_checkpoint()
    optim = [f"optim/dp_rank_{d:02d}_tp_rank_{t:02d}_pp_rank_00.pt" for d in range(2) for t in range(2)]
    model = [f"model/dp_rank_00_tp_rank_{t:02d}_pp_rank_00.pt" for t in range(2)]
    assert files(tmp_path / "two") == ["checkpoint", "done", *model, *optim, "random/00000.pt", "scheduler.pt", "user_content.pt"]
    assert (tmp_path / "two/model/dp_rank_00_tp_rank_01_pp_rank_00.pt.tensors/tensor_0.pt").exists() is xser

    nxd(4, tp=2)
    made = job.build(2, zero1=True, seed=9)
    torch.manual_seed(1234)
    found = nxd_api.load_checkpoint(tmp_path, None, *made)
    assert found.keys() == content.keys() and torch.equal(found["t"], content["t"])
    assert job.differing({**job.weights(made[0]), **job.moments(made[0], made[1])}, before) == []
    assert job.train(made, 2, 4) == expected


def test_what_scripts_read(nxd: Nxd, tmp_path: Path) -> None:
    """`xser.load` and `torch.load` of a rank's file give what that rank holds."""
    nxd(2, tp=2)
    model, _, _ = job.build(2)
    for xser in (False, True):
        nxd_api.save_checkpoint(tmp_path, f"{xser}", model, use_xser=xser)
        for r in range(2):
            path = tmp_path / f"{xser}/model/dp_rank_00_tp_rank_{r:02d}_pp_rank_00.pt"
            state = xser_format.load(os.fspath(path)) if xser else torch.load(path, weights_only=True)
            assert torch.equal(state["pair.weight"], sharded.shards(model.pair.weight)[r])


def test_bfloat16_keeps_master_weights(nxd: Nxd, tmp_path: Path) -> None:
    nxd(2)
    made = job.build(zero1=True, dtype=torch.bfloat16)
    job.train(made, 0, 2)
    nxd_api.save_checkpoint(tmp_path, "a", *made)
    nxd_api.save_checkpoint(tmp_path, "b", *made, use_xser=True, avoid_saving_lower_precision_weights=True)
    with pytest.raises(ValueError, match=r"avoid_saving_lower_precision_weights=True\) needs use_xser=True, or NXD_JAX_CHECKPOINT_FORMAT"):
        nxd_api.save_checkpoint(tmp_path, "c", *made, avoid_saving_lower_precision_weights=True)
    assert len(list((tmp_path / "b/model/dp_rank_00_tp_rank_00_pp_rank_00.pt.tensors").iterdir())) == 1  # the buffer's
    expected = job.train(made, 2, 4)
    for tag in "ab":
        made = job.build(zero1=True, dtype=torch.bfloat16, seed=2)
        nxd_api.load_checkpoint(tmp_path, tag, *made)
        assert job.train(made, 2, 4) == expected, tag


def test_tags(nxd: Nxd, tmp_path: Path) -> None:
    """The newest counts, older ones go, and a tag can be saved again."""
    nxd(1)
    model = nn.Linear(3, 2).to("xla")
    for k in (3, 1, 2, 2):
        with torch.no_grad():
            model.weight.fill_(k)
        nxd_api.save_checkpoint(tmp_path, f"step_{k}", model, user_content=k, num_kept_ckpts=2, async_save=k == 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_1", "step_2"]
    assert nxd_api.load_checkpoint(tmp_path, None, model) == 2 and model.weight[0, 0] == 2
    assert nxd_api.load_checkpoint(tmp_path, "step_1", model) == 1 and model.weight[0, 0] == 1
    (tmp_path / "step_2/done").unlink()
    assert nxd_api.load_checkpoint(tmp_path, None, model) == 1


def test_both_formats_in_one_directory(nxd: Nxd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nxd(1)
    model = nn.Linear(3, 2).to("xla")
    nxd_api.save_checkpoint(tmp_path, "t", model, user_content="original")
    assert original_files.is_original(tmp_path / "t")
    monkeypatch.setenv("NXD_JAX_CHECKPOINT_FORMAT", "nxd")
    nxd_api.save_checkpoint(tmp_path, "u", model, user_content="nxd")
    nxd_api.save_checkpoint(tmp_path, "t", model, user_content="again")
    assert not original_files.is_original(tmp_path / "t") and (tmp_path / "t/model/tensors.json").exists()
    assert [nxd_api.load_checkpoint(tmp_path, tag, model) for tag in "tu"] == ["again", "nxd"]


def test_a_save_that_fails_leaves_the_earlier_one(nxd: Nxd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nxd(1)
    model = nn.Linear(3, 2).to("xla")
    nxd_api.save_checkpoint(tmp_path, "t", model, user_content=1)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nxd_jax.checkpoint.original_writing.write", full)
    with pytest.raises(OSError, match="No space left"):
        nxd_api.save_checkpoint(tmp_path, "t", model, user_content=2)
    assert [p.name for p in tmp_path.iterdir()] == ["t"] and nxd_api.load_checkpoint(tmp_path, "t", model) == 1


def test_state_dicts(nxd: Nxd, tmp_path: Path) -> None:
    """Of a model and of a ZeRO-1 optimizer, in place of themselves; also on the CPU."""
    nxd(4, tp=2)
    model, optimizer, _ = made = job.build(2, zero1=True)
    job.train(made, 0, 1)
    nxd_api.save_checkpoint(tmp_path, "a", model, optimizer)
    nxd_api.save_checkpoint(tmp_path, "b", model.state_dict(), optimizer.state_dict())
    nxd_api.save_checkpoint(tmp_path, "c", *(move_all_tensor_to_cpu(x.state_dict()) for x in (model, optimizer)))
    for tag in "bc":
        assert files(tmp_path / "a") == files(tmp_path / tag)
        for name in (f for f in files(tmp_path / "a") if "dp_rank" in f):
            a, b = (torch.load(tmp_path / which / name, weights_only=True) for which in ("a", tag))
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_before_ranks_are_laid_out(nxd: Nxd, tmp_path: Path) -> None:
    nxd(1)
    parallel_state.destroy_model_parallel()
    model = nn.Linear(3, 2).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3, device="xla")).sum().backward()
    optimizer.step()
    torch_xla.sync()
    nxd_api.save_checkpoint(tmp_path, "t", model, optimizer)
    assert files(tmp_path / "t")[2:4] == ["model/dp_rank_00_tp_rank_00_pp_rank_00.pt", "optim/dp_rank_00_tp_rank_00_pp_rank_00.pt"]
    again = nn.Linear(3, 2).to("xla")
    second = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    nxd_api.load_checkpoint(tmp_path, "t", again, second)
    assert torch.equal(again.weight.cpu(), model.weight.cpu())
    assert torch.equal(second.state[again.weight]["momentum_buffer"].cpu(), optimizer.state[model.weight]["momentum_buffer"].cpu())


def test_an_address_that_fsspec_knows(nxd: Nxd) -> None:
    nxd(1)
    model = nn.Linear(3, 2)
    nxd_api.save_checkpoint("memory://saving_original", "t", model, user_content=3)
    again = nn.Linear(3, 2)
    assert nxd_api.load_checkpoint("memory://saving_original", None, again) == 3 and torch.equal(again.weight, model.weight)


def test_another_format(nxd: Nxd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nxd(1)
    monkeypatch.setenv("NXD_JAX_CHECKPOINT_FORMAT", "orbax")
    with pytest.raises(ValueError, match="NXD_JAX_CHECKPOINT_FORMAT='orbax': must be one of nxd, original"):
        nxd_api.save_checkpoint(tmp_path, "t", nn.Linear(3, 2))
    assert not list(tmp_path.iterdir())


def test_experts(nxd: Nxd, tmp_path: Path) -> None:
    """A file for each expert-parallel rank, of optimizers too."""
    nxd(2, ep=2)
    model = nn.Linear(3, 2).to("xla")
    nxd_api.save_checkpoint(tmp_path, "t", model, torch.optim.SGD(model.parameters(), lr=0.1))
    for part in ("model", "optim"):
        assert files(tmp_path / "t" / part) == [f"dp_rank_00_ep_rank_{e:02d}_tp_rank_00_pp_rank_00.pt" for e in range(world.size())]


@pytest.mark.parametrize(("size", "tp", "zero1"), [(1, 1, True), (2, 2, False), (4, 2, True)])
def test_means_of_rows_and_columns_load_at_other_sizes(nxd: Nxd, tmp_path: Path, size: int, tp: int, zero1: bool) -> None:
    """Adafactor's state, which one rank had all of."""
    nxd(1)
    made = job.build(zero1=True, optimizer_class=torch.optim.Adafactor)
    made[0].eval()
    job.train(made, 0, 2)
    nxd_api.save_checkpoint(tmp_path, "two", *made)
    job.train(made, 2, 3)
    expected = job.weights(made[0])

    nxd(size, tp=tp)
    made = job.build(tp, zero1, seed=1, optimizer_class=torch.optim.Adafactor)
    made[0].eval()
    nxd_api.load_checkpoint(tmp_path, "two", *made)
    job.train(made, 2, 3)
    for name, weight in job.weights(made[0]).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)


def test_means_of_several_ranks_are_not_joined(nxd: Nxd, tmp_path: Path) -> None:
    nxd(2, tp=2)
    made = job.build(2, optimizer_class=torch.optim.Adafactor)
    job.train(made, 0, 1)
    nxd_api.save_checkpoint(tmp_path, "one", *made)
    with pytest.raises(ValueError, match=r"row_var/.* is different on each rank: how it would be joined is not known"):
        nxd_api.load_checkpoint(tmp_path, "one", *job.build(2, optimizer_class=torch.optim.Adafactor))
