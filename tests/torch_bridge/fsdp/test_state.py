"""Sharded checkpoints: names as torch_xla writes them, files of all ranks, joining them, and going on from them."""

from __future__ import annotations

import io
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm
from torch import nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP
from torch_xla.distributed.fsdp import consolidate_sharded_ckpts, consolidate_sharded_model_checkpoints, consolidate_sharded_state_dicts

import torch_bridge
from tests.torch_bridge.fsdp.models import Net, adam, nested, net, train, whole
from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.per_rank import rank_paths
from torch_bridge.recorder import first_rank_files

Make = Callable[[], FSDP]
_SEP = "_FSDP_SHARD_SEPARATOR_"


def saved(model: FSDP, optimizer: torch.optim.Optimizer, folder: pathlib.Path) -> str:
    """As scripts save; the prefix of the files."""
    ckpt = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata(), "optimizer": optimizer.state_dict()}
    xm.save(ckpt, f"{folder}/final_rank-{xm.get_ordinal()}-of-{xm.xrt_world_size()}.pth", master_only=False)
    return str(folder / "final")


def test_names(hosted: Hosted) -> None:
    hosted(2)
    model = FSDP(nn.Sequential(FSDP(nn.Linear(3, 4)), nn.Linear(4, 2, bias=False), nn.BatchNorm1d(2, affine=False)))
    inner = f"_fsdp_shard{_SEP}_fsdp_wrapped_module{_SEP}_fpw_module{_SEP}"
    assert list(model.state_dict()) == [
        f"{inner}1{_SEP}weight",
        f"_fsdp_wrapped_module.0.{inner}weight",
        f"_fsdp_wrapped_module.0.{inner}bias",
        "_fsdp_wrapped_module.2.running_mean",
        "_fsdp_wrapped_module.2.running_var",
        "_fsdp_wrapped_module.2.num_batches_tracked",
    ]
    metadata = model.get_shard_metadata()
    assert metadata["shard_info"]["_fsdp_wrapped_module.0"][f"{inner}bias"] == {
        "_orig_size": torch.Size([4]),
        "_orig_name": "_fsdp_wrapped_module._fpw_module.bias",
    }
    flat = FSDP(nn.Sequential(FSDP(nn.Linear(3, 4), flatten_parameters=True)), flatten_parameters=True)
    assert list(flat.state_dict()) == [f"_fsdp_wrapped_module.0._fsdp_shard{_SEP}_fsdp_wrapped_module{_SEP}flat_param_0"]
    assert flat.get_shard_metadata()["flatten_info"] == {
        "_fsdp_wrapped_module.0._fsdp_wrapped_module.flat_param_0": (
            ["_fpw_module.weight", "_fpw_module.bias"],
            [torch.Size([4, 3]), torch.Size([4])],
            [12, 4],
        )
    }


KINDS: dict[str, dict[str, Any]] = {
    "parameters": {},
    "rows": {"shard_param_on_dim_0": True},
    "flat": {"flatten_parameters": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_four_ranks_are_joined_and_loaded_bit_for_bit(
    kind: str, hosted: Hosted, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing changed the weights: the joined file has those that the module was made with."""
    hosted(4)
    prefix = saved(model := nested(net(tied=kind == "flat"), **KINDS[kind]), adam(model), tmp_path)
    assert len(list(tmp_path.glob("final_rank-*-of-4.pth"))) == 4
    ranks = [torch.load(f"{prefix}_rank-{r}-of-4.pth")["shard_metadata"]["rank"] for r in range(4)]
    assert ranks == [0, 1, 2, 3]
    assert consolidate_sharded_ckpts.main(["--ckpt_prefix", prefix, "--ckpt_suffix", "_rank-*-of-*.pth"]) == 0
    assert "final_consolidated.pth" in capsys.readouterr().out
    joined = torch.load(f"{prefix}_consolidated.pth")["model"]
    fresh = Net(tied=kind == "flat")
    fresh.load_state_dict(joined)  # strict: all names and no others
    for name, value in net(tied=kind == "flat").state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name
    again, path = consolidate_sharded_model_checkpoints(prefix, "_rank-*.pth", save_model=False)
    assert path is None and all(torch.equal(again[k], v) for k, v in joined.items())
    _, path = consolidate_sharded_model_checkpoints(prefix, "_rank-*.pth", save_path=str(tmp_path / "other.pth"))
    assert path == str(tmp_path / "other.pth") and torch.load(path)["model"].keys() == joined.keys()
    (folder := tmp_path / "lr=[1, 2]").mkdir()  # as a pattern it would be another folder
    for file in tmp_path.glob("final_rank-*.pth"):
        file.rename(folder / file.name)
    again, _ = consolidate_sharded_model_checkpoints(str(folder / "final"), "_rank-*.pth", save_model=False)
    assert all(torch.equal(again[k], v) for k, v in joined.items())


def test_goes_on_from_sharded_files(hosted: Hosted, tmp_path: pathlib.Path) -> None:
    """Every rank's file, read with `each_rank`: bit for bit what training goes on to without a break."""
    hosted(4)
    model = nested(net())
    optimizer = adam(model)
    train(model, optimizer, range(2))
    prefix = saved(model, optimizer, tmp_path)
    expected = train(model, optimizer, range(2, 4)), whole(model)
    torch.manual_seed(5)
    other = nested(Net())
    ckpt = torch_bridge.each_rank(lambda rank: torch.load(f"{prefix}_rank-{rank}-of-4.pth"), xm.get_ordinal())
    assert not other.load_state_dict(ckpt["model"]).missing_keys
    optimizer = adam(other)
    optimizer.load_state_dict(ckpt["optimizer"])
    assert train(other, optimizer, range(2, 4)) == expected[0]
    assert all(torch.equal(whole(other)[k], v) for k, v in expected[1].items())
    same = nested(Net())
    same.load_state_dict(model.state_dict())  # one that was not saved
    assert all(torch.equal(whole(same)[k], v) for k, v in expected[1].items())


def test_what_cannot_be_loaded(hosted: Hosted, tmp_path: pathlib.Path) -> None:
    hosted(2)
    model = FSDP(net())
    state = model.state_dict()
    name = next(iter(state))
    for given, text in [
        (net().state_dict(), "the state of a whole module .*load it into the module before wrapping"),
        (
            {**state, name: torch.zeros(3)},
            r"is a shard of shape \[3\], and here a rank has \[128\] of \[11, 6\].*another number of ranks.*consolidate",
        ),
        ({**state, name: torch.arange(128.0).to("xla")}, r"is one rank's shard, and this process hosts 2 ranks"),
        ({**state, name: torch.zeros(128)}, r"is one rank's shard, and this process hosts 2 ranks.*torch_bridge.each_rank"),
    ]:
        with pytest.raises(ValueError, match=text):
            model.load_state_dict(given)
    all_inside = FSDP(nn.Sequential(FSDP(nn.Linear(2, 2))))
    with pytest.raises(ValueError, match=r"the state of a whole module \(0.weight, ...\)"):
        all_inside.load_state_dict(nn.Sequential(nn.Linear(2, 2)).state_dict(), strict=False)
    around = nn.ModuleDict({"wrapped": all_inside, "plain": nn.Linear(2, 2)})
    around.load_state_dict({f"plain.{k}": v for k, v in nn.Linear(2, 2).state_dict().items()}, strict=False)
    around.load_state_dict(around.state_dict())
    with pytest.raises(ValueError, match="assign=True.*leave assign out"):
        model.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({k: v for k, v in state.items() if k != name})


def test_what_cannot_be_saved(hosted: Hosted, tmp_path: pathlib.Path) -> None:
    hosted(2)
    model = FSDP(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r'should have its number once, as in f"ckpt_rank-.*has it no times.*torchrun'):
        xm.save(model.state_dict(), tmp_path / "model.pth", master_only=False)
    with (tmp_path / "x").open("wb") as file, pytest.raises(TypeError, match="pass a path with the rank's number, not a BufferedWriter"):
        xm.save([model.get_shard_metadata()], file, master_only=False)
    xm.save({"a": torch.ones(1, device="xla")}, tmp_path / "rank-0.pth", master_only=False)  # the same on all ranks: one file
    assert [p.name for p in tmp_path.glob("rank-*")] == ["rank-0.pth"]
    own = torch.ones(1, device="xla") * xm.get_ordinal()
    xm.save({"a": own}, tmp_path / "rank-0.pth", master_only=False)
    assert [torch.load(tmp_path / f"rank-{r}.pth")["a"].tolist() for r in range(2)] == [[0.0], [1.0]]


def test_shards_that_only_the_master_saves(hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not in the file cannot be had back from the other ranks."""
    hosted(2)
    monkeypatch.setattr(first_rank_files, "_noted", False)
    model = FSDP(nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="is saved as rank 0 holds it"):
        xm.save(model.state_dict(), io.BytesIO())


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/tmp/0/rank-0-of-4.pth", "/tmp/0/rank-2-of-4.pth"),
        ("/runs/rank_00/step0.pth", "/runs/rank_02/step0.pth"),
        ("/a/ckpt_Rank-00000000-of-00000004.pth", "/a/ckpt_Rank-00000002-of-00000004.pth"),
        ("/tmp/0/epoch10_0.pth", "/tmp/0/epoch10_2.pth"),
        ("/tmp/epoch_0_0.pth", None),
        ("/tmp/0/model.pth", None),
    ],
)
def test_paths_of_ranks(path: str, found: str | None) -> None:
    if found is None:
        with pytest.raises(ValueError, match=f"{re.escape(path)}: this process hosts several ranks"):
            rank_paths.of_ranks(path, 0, [0, 2])
    else:
        assert rank_paths.of_ranks(path, 0, [0, 2]) == [path, found]


def test_files_that_cannot_be_joined(hosted: Hosted, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosted(2)
    model = FSDP(nn.Linear(2, 2))
    prefix = saved(model, adam(model), tmp_path)
    one = torch.load(f"{prefix}_rank-0-of-2.pth")
    with pytest.raises(ValueError, match="among 2 ranks, got 1 state dicts"):
        consolidate_sharded_state_dicts([one["model"]], one["shard_metadata"])
    with pytest.raises(ValueError, match="not in the shard metadata: it is of another model"):
        consolidate_sharded_state_dicts([one["model"]] * 2, {**one["shard_metadata"], "shard_info": {}})
    with pytest.raises(ValueError, match="not in the state dicts of ranks 1: they are of another model"):
        consolidate_sharded_state_dicts([one["model"], {}], one["shard_metadata"])
    with pytest.raises(FileNotFoundError, match=r"no file matches .*none\*.pth: ckpt_prefix and ckpt_suffix"):
        consolidate_sharded_model_checkpoints(str(tmp_path / "none"))
    (tmp_path / "final_rank-1-of-2.pth").unlink()
    with pytest.raises(ValueError, match="one file for each of 2 ranks; these are of ranks 0: some are missing"):
        consolidate_sharded_model_checkpoints(prefix)
    torch.save({"model": {}}, tmp_path / "final_rank-1-of-2.pth")
    with pytest.raises(ValueError, match="has no shard_metadata: save"):
        consolidate_sharded_model_checkpoints(prefix)
    assert consolidate_sharded_ckpts.main(["--ckpt_prefix", prefix]) == 1
    assert "has no shard_metadata" in capsys.readouterr().err


def test_torch_xlas_files(tmp_path: pathlib.Path) -> None:
    """As torch_xla writes them: padded to 128 entries, without further names of tied parameters."""
    inner = f"_fsdp_shard{_SEP}_fsdp_wrapped_module{_SEP}_fpw_module{_SEP}weight"
    full = torch.arange(6.0)
    padded = torch.cat([full, torch.zeros(250)])
    metadata = {
        "shard_info": {"": {inner: {"_orig_size": torch.Size([2, 3]), "_orig_name": "_fsdp_wrapped_module._fpw_module.weight"}}},
        "flatten_info": {},
        "buffer_info": {},
        "world_size": 2,
    }
    for rank in range(2):
        torch.save(
            {"model": {inner: padded[128 * rank :][:128]}, "shard_metadata": {**metadata, "rank": rank}}, tmp_path / f"a_rank-{rank}.pth"
        )
    found, _ = consolidate_sharded_model_checkpoints(str(tmp_path / "a"), save_model=False)
    assert list(found) == ["weight"] and torch.equal(found["weight"], full.view(2, 3))
