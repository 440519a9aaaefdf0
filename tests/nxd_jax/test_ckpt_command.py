"""`nxd-ckpt` and `nxd_convert_zero_checkpoints`: what they print, what they write, and what they refuse."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors")
import neuronx_distributed as nxd_api
import torch.distributed as dist
import torch_xla

from nxd_jax import ckpt
from nxd_jax.checkpoint import original
from nxd_jax.optimizer import convert_zero_checkpoints
from nxd_jax.parallel_layers import parallel_state
from tests.nxd_jax.checkpoint import hub_model, job
from tests.nxd_jax.checkpoint.hub_model import CONFIG, Tiny
from tests.nxd_jax.conftest import Nxd
from torch_bridge.mesh import world

Saved = types.SimpleNamespace


def build(tp: int = 1, zero1: bool = False, seed: int = 0, fuse: bool = True) -> Any:
    config = nxd_api.neuronx_distributed_config(
        tensor_parallel_size=tp, optimizer_config={"zero_one_enabled": zero1, "grad_clipping": False}
    )
    torch.manual_seed(seed)
    model = nxd_api.initialize_parallel_model(config, lambda: Tiny(fuse=fuse))
    return model, nxd_api.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=0.1)


def values(made: Any) -> dict[str, torch.Tensor]:
    return {**job.weights(made[0]), **job.moments(*made)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    """A checkpoint of 4 ranks (tp 2, ZeRO-1) as `nxd.save_checkpoint` and as NxD itself write it, and its values."""
    path = tmp_path_factory.mktemp("saved")
    world.configure(world.World(4))
    made = build(2, zero1=True)
    for p in made[0].parameters():
        p.grad = torch.full_like(p, 0.5) + p.detach()
    made[1].step()
    torch_xla.sync()
    scheduler = torch.optim.lr_scheduler.StepLR(made[1], 1)
    nxd_api.save_checkpoint(path / "ours", "t", *made, scheduler, {"step": 3})
    original.export_original(path / "theirs", "t", *made, scheduler, {"step": 3})
    (path / "config.json").write_text(json.dumps(CONFIG))
    yield Saved(path=path, ours=path / "ours", theirs=path / "theirs", config=path / "config.json", values=values(made))
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    world.configure(None)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """`run(0, "inspect", path)`: the command's output, given its exit status."""

    def call(status: int, *arguments: Any, command: Any = ckpt.main) -> str:
        found = command([str(a) for a in arguments])
        shown = capsys.readouterr()
        assert found == status, shown
        return shown.out if status != 2 else shown.err

    return call


def loaded(nxd: Nxd, path: pathlib.Path, tag: str | None = None, size: int = 1, **how: Any) -> dict[str, torch.Tensor]:
    nxd(size, tp=how.get("tp", 1))
    made = build(seed=9, **how)
    assert nxd_api.load_checkpoint(path, tag, *made) == {"step": 3}
    return values(made)


# -- inspect -------------------------------------------------------------------------------------------


def test_inspect(saved: Saved, run: Any) -> None:
    shown = run(0, "inspect", saved.ours, "--tensors")
    assert shown.startswith("t: nxd, ") and "written by world 4, tp 2" in shown
    assert "model: 12 tensors of float32" in shown and "besides: scheduler.pt, user_content.pt, random" in shown
    line = next(s for s in shown.splitlines() if "gate_up_proj" in s and s.startswith("model"))
    assert line.split(maxsplit=2)[1:] == ["model.layers.0.mlp.gate_up_proj.weight", "float32   [16, 6]              4 x [1, 4, 6]"]
    shown = run(0, "inspect", saved.theirs / "t", "--tensors")
    assert "t: original, " in shown and "written by tp 2, pp 1, dp 2, ep 1, ZeRO-1" in shown and "2 x [8, 6]" in shown


def test_inspect_as_json(saved: Saved, run: Any, tmp_path: pathlib.Path) -> None:
    found = json.loads(run(0, "inspect", saved.ours, "--tag", "t", "--json", "--tensors"))
    assert found["complete"] and found["layout"]["tp"] == 2
    assert found["tensors"]["model"]["lm_head.weight"] == {"shape": [16, 6], "dtype": "float32", "shards": 4, "shard_shape": [4, 6]}
    found = json.loads(run(0, "inspect", hub_model.folder(tmp_path, hub_model.weights()), "--json"))
    assert found["format"] == "safetensors" and found["tensors"] == {"model": 13, "optimizer": 0}


def test_inspect_lists_tags(saved: Saved, run: Any, tmp_path: pathlib.Path) -> None:
    shutil.copytree(saved.theirs, tmp_path, dirs_exist_ok=True)
    (tmp_path / "next").mkdir()
    (tmp_path / "next/checkpoint").write_text("1")
    shown = run(0, "inspect", tmp_path)
    assert [s.split()[:3] for s in shown.splitlines()[:2]] == [["t", "complete", "original"], ["next", "unfinished", "unknown"]]
    assert [t["complete"] for t in json.loads(run(0, "inspect", tmp_path, "--json"))["tags"]] == [True, False]
    shutil.rmtree(tmp_path / "t")
    assert "holds no complete checkpoint (next: begun, but without the `done`" in run(2, "verify", tmp_path)
    assert "has no complete checkpoint 'x'; complete ones are: none" in run(2, "inspect", tmp_path, "--tag", "x")


def test_inspect_tensors_of_several_tags(saved: Saved, run: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest complete one's; none is silently left out."""
    shutil.copytree(saved.ours, tmp_path, dirs_exist_ok=True)
    (tmp_path / "next").mkdir()
    (tmp_path / "next/checkpoint").write_text("1")
    assert ckpt.main(["inspect", str(tmp_path), "--tensors"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("t: nxd, ") and "gate_up_proj" in shown.out
    assert shown.err == f"nxd-ckpt: the newest complete tag of {tmp_path}, which has 1 other tag: --tag names another\n"
    assert "lm_head.weight" in json.loads(run(0, "inspect", tmp_path, "--tensors", "--json"))["tensors"]["model"]
    shutil.rmtree(tmp_path / "t")
    assert "no complete checkpoint whose tensors could be listed (next: begun" in run(2, "inspect", tmp_path, "--tensors")


# -- convert -------------------------------------------------------------------------------------------


def test_ours_to_nxds_files_and_back(saved: Saved, run: Any, nxd: Nxd, tmp_path: pathlib.Path) -> None:
    shown = run(
        0,
        "convert",
        saved.ours,
        tmp_path / "a",
        "--to",
        "original",
        "--tp",
        4,
        "--map",
        "llama",
        "--zero1",
        "--dp",
        3,
        "--xser",
        "--model-only",
    )
    assert "wrote model, 12 tensors" in shown and "as original to" in shown
    run(0, "convert", saved.ours, tmp_path / "a", "--to", "original", "--tp", 2, "--map", "llama", "--zero1", "--dp", 3, "--to-tag", "full")
    assert len(list((tmp_path / "a/full/optim").glob("*.pt"))) == 6
    run(0, "verify", tmp_path / "a", "--tag", "full", "--against", saved.ours)
    shown = run(0, "convert", tmp_path / "a/full", tmp_path / "b", "--to", "nxd", "--map", "llama", "--config", saved.config)
    assert "wrote model and optimizer, 12 tensors" in shown
    assert run(0, "verify", tmp_path / "b", "--against", saved.ours).endswith("no problems\n")
    for path, how in ((tmp_path / "a", {"zero1": False, "fuse": False}), (tmp_path / "b", {"tp": 2, "zero1": True, "size": 2})):
        assert job.differing(loaded(nxd, path, "full", **how), saved.values) == []


def test_files_without_zero1_and_with_separate_q_k_v(saved: Saved, run: Any, nxd: Nxd, tmp_path: pathlib.Path) -> None:
    run(
        0,
        "convert",
        saved.theirs,
        tmp_path / "a",
        "--to",
        "original",
        "--tp",
        4,
        "--map",
        "llama",
        "--separate-qkv",
        "--config",
        saved.config,
    )
    state = torch.load(tmp_path / "a/t/model/dp_rank_00_tp_rank_03_pp_rank_00.pt", weights_only=True)
    assert state["model.layers.0.self_attn.qkv_proj.weight_k"].shape == (1, 6)
    assert sorted(torch.load(tmp_path / "a/t/optim/dp_rank_00_tp_rank_03_pp_rank_00.pt", weights_only=True)) == ["param_groups", "state"]
    assert job.differing(loaded(nxd, tmp_path / "a"), saved.values) == []


def test_safetensors_both_ways(saved: Saved, run: Any, nxd: Nxd, tmp_path: pathlib.Path) -> None:
    common = ("--map", "llama", "--config", saved.config)
    shown = run(0, "convert", saved.ours, tmp_path / "hub", "--to", "safetensors", *common, "--max-shard-gb", "1e-6")
    assert "wrote model, 12 tensors" in shown and (tmp_path / "hub/model-00002-of-00003.safetensors").exists()
    run(0, "verify", tmp_path / "hub", "--against", saved.ours, "--map", "llama")
    run(0, "convert", tmp_path / "hub", tmp_path / "back", "--to", "nxd", "--map", "llama")
    nxd(2, tp=2)
    model, _ = build(2)
    nxd_api.load_checkpoint(tmp_path / "back", "converted", model)
    found = job.weights(model)
    assert job.differing(found, {n: saved.values[n] for n in found}) == []
    checksums = [run(0, "verify", p, "--checksum").splitlines()[0] for p in (saved.ours, tmp_path / "back")]
    assert checksums[0] == checksums[1] and checksums[0].startswith("model sha256 ")


def test_copies_of_kv_heads_and_another_dtype(run: Any, tmp_path: pathlib.Path) -> None:
    hub = hub_model.folder(tmp_path / "hub", hub_model.weights())
    run(0, "convert", hub, tmp_path / "a", "--to", "original", "--tp", 4, "--kv-multiplier", 2, "--map", "llama", "--dtype", "bfloat16")
    copied = ("--kv-multiplier", 2, "--map", "llama", "--config", hub / "config.json")
    run(0, "convert", tmp_path / "a", tmp_path / "out", "--to", "safetensors", *copied)
    found = hub_model.weights()
    shown = run(1, "verify", tmp_path / "out", "--against", hub)
    assert "problem: model: lm_head.weight is torch.bfloat16 in the first, torch.float32 in the second" in shown
    hub_model.folder(tmp_path / "half", {n: t.bfloat16() for n, t in found.items()})
    run(0, "verify", tmp_path / "out", "--against", tmp_path / "half")
    assert "query heads are in the order of the ranks that wrote them, 4, and --tp is 2: convert to safetensors" in run(
        2, "convert", tmp_path / "a", tmp_path / "b", "--to", "original", "--tp", 2, *copied
    )
    assert "--kv-multiplier changes the order of query heads: give the model's config.json" in run(
        2, "convert", tmp_path / "a", tmp_path / "b", "--to", "safetensors", "--kv-multiplier", 2, "--map", "llama"
    )


def test_rules_instead_of_a_map(saved: Saved, run: Any, tmp_path: pathlib.Path) -> None:
    common = ("convert", saved.theirs, tmp_path, "--to", "nxd", "--model-only", "--config", saved.config)
    shown = run(2, *common)
    for text in (
        "how 2 tensor-parallel ranks share out model.embed_tokens.weight, model.layers.0.input_layernorm.weight, ",
        "give a map (--map llama)",
        "--split '.*down_proj.weight=1' (along dim 1)",
    ):
        assert text in shown
    rules = ["--split", ".*norm.*=none", "--split", ".*(o_proj|down_proj).*=1", "--split", ".*gate_up.*=0x2", "--split", ".*=0"]
    run(0, *common, *rules)
    run(0, "verify", tmp_path, "--against", saved.ours)
    assert "a rule is NAMES=DIM, NAMES=DIMxFUSED or NAMES=none" in run(2, *common, "--split", "a=b")
    assert "is no regular expression" in run(2, *common, "--split", "(=1")


def test_what_the_index_says_is_a_rule(saved: Saved, run: Any, tmp_path: pathlib.Path) -> None:
    """A checkpoint that was converted with rules says how its tensors are shared out; norms, which no rule divides, still need one."""
    hub = hub_model.folder(tmp_path / "hub", hub_model.weights())
    run(0, "convert", hub, tmp_path / "a", "--to", "nxd", "--map", "llama")
    shown = run(2, "convert", tmp_path / "a", tmp_path / "b", "--to", "original", "--tp", 2)
    assert "how 2 tensor-parallel ranks are to share out model.layers.0.input_layernorm.weight is not known: give a map" in shown
    run(0, "convert", tmp_path / "a", tmp_path / "b", "--to", "original", "--tp", 2, "--split", ".*norm.*=none")
    run(0, "verify", tmp_path / "b", "--against", tmp_path / "a")


def test_names_of_an_optimizers_parameters(saved: Saved, run: Any, tmp_path: pathlib.Path) -> None:
    shutil.copytree(saved.theirs, tmp_path / "theirs")
    for path in (tmp_path / "theirs/t/optim").glob("*.pt"):
        state = torch.load(path)
        first = state["param_groups"][0]
        state["param_groups"] = [{**first, "params": [0, 1]}, {**first, "params": first["params"][2:]}]
        torch.save(state, path)
    common = ("convert", tmp_path / "theirs", tmp_path / "out", "--to", "nxd", "--map", "llama", "--config", saved.config)
    assert "groups of [2, 6] numbered parameters, and which are which is not in NxD's files: list their names" in run(2, *common)
    names = list(torch.load(tmp_path / "theirs/t/model/dp_rank_00_tp_rank_00_pp_rank_00.pt"))
    (tmp_path / "names").write_text("\n".join(names))
    run(0, *common, "--param-names", tmp_path / "names")
    run(0, "verify", tmp_path / "out", "--against", saved.ours)


def test_nothing_complete_is_overwritten(saved: Saved, run: Any, tmp_path: pathlib.Path) -> None:
    hub = hub_model.folder(tmp_path / "hub", hub_model.weights())
    to_nxd = ("convert", hub, tmp_path / "a", "--to", "nxd", "--map", "llama")
    run(0, *to_nxd)
    assert "has a complete checkpoint 'converted' already: give another name (--to-tag), or --force" in run(2, *to_nxd)
    run(0, *to_nxd, "--force")
    to_hub = ("convert", tmp_path / "a", hub, "--to", "safetensors", "--map", "llama")
    assert "holds .safetensors files already: give another folder, or --force" in run(2, *to_hub)
    run(0, *to_hub, "--force")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["converted"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--to", "nxd", "--zero1"), "--dp, --ep, --zero1 and --xser say how NxD's files are written; --to nxd holds full tensors"),
        (("--to", "original", "--dp", "2"), "--dp cuts the optimizer's state among ranks: give --zero1 as well"),
        (("--to", "original", "--tp", "0"), "--tp must be a positive number, got 0"),
        (("--to", "safetensors", "--max-shard-gb", "0"), "--max-shard-gb must be positive"),
        (("--to", "nxd", "--config", "nowhere.json"), "--config nowhere.json: there is no such file"),
        (("--to", "nxd", "--map", "gpt"), "there is no name map 'gpt', only llama"),
        (("--to", "original", "--tp", "3", "--map", "llama"), "embed_tokens.weight: dim 0 of shape [16, 6] does not divide by 3 ranks"),
    ],
)
def test_options_that_do_not_fit(saved: Saved, run: Any, tmp_path: pathlib.Path, options: tuple[str, ...], message: str) -> None:
    assert message in run(2, "convert", saved.ours, tmp_path / "out", *options)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


# -- verify --------------------------------------------------------------------------------------------


def test_verify_finds_what_is_wrong(saved: Saved, run: Any, tmp_path: pathlib.Path) -> None:
    assert "there is no" in run(2, "verify", tmp_path / "nowhere")
    shutil.copytree(saved.ours, tmp_path / "a")
    index = tmp_path / "a/t/model/tensors.json"
    text = index.read_text()
    found = json.loads(text)
    found["tensors"]["lm_head.weight"]["stored"] = [8, 12]
    found["tensors"]["absent"] = found["tensors"]["lm_head.weight"]
    index.write_text(json.dumps(found))
    shown = run(1, "verify", tmp_path / "a")
    assert "problem: model/lm_head.weight has shape [16, 6], the index says [8, 12]" in shown
    assert (
        "problem: model/absent: absent is in " in shown
        and "tensors.json, but not among the arrays" in shown
        and shown.endswith("2 problems\n")
    )
    index.write_text(text[:-20])
    assert "tensors.json is damaged" in run(1, "verify", tmp_path / "a")
    index.write_text(text)
    shutil.rmtree(tmp_path / "a/t/optim/arrays")
    assert "problem: optim/" in run(1, "verify", tmp_path / "a")


def test_verify_random_states(saved: Saved, run: Any, tmp_path: pathlib.Path) -> None:
    shutil.copytree(saved.ours, tmp_path, dirs_exist_ok=True)
    place = tmp_path / "t/random"
    states = (place / "00000.pt").read_bytes()
    assert run(0, "verify", tmp_path).endswith("no problems\n")
    (place / "00000.pt").write_bytes(b"")
    assert f"problem: {place / '00000.pt'} is empty" in run(1, "verify", tmp_path)
    (place / "00000.pt").write_bytes(states[:300])
    assert f"problem: {place / '00000.pt'} is damaged" in run(1, "verify", tmp_path)
    (place / "00000.pt").unlink()
    assert f"problem: the random states are missing: {place} is empty" in run(1, "verify", tmp_path)
    place.rmdir()
    assert f"problem: the random states are missing: {place} is not there" in run(1, "verify", tmp_path)
    place.mkdir()
    (place / "00000.pt").write_bytes(states)
    index = tmp_path / "t/model/tensors.json"
    index.write_text(index.read_text().replace('"processes": 1', '"processes": 2'))
    assert "problem: random states of 1 of 2 processes are missing: 00001.pt in" in run(1, "verify", tmp_path)


def test_verify_a_converted_checkpoint(saved: Saved, run: Any, tmp_path: pathlib.Path) -> None:
    """It has no random states, and that is said."""
    run(0, "convert", saved.theirs, tmp_path, "--to", "nxd", "--map", "llama", "--config", saved.config)
    shown = run(0, "verify", tmp_path)
    assert "note: no random states" in shown and shown.endswith("no problems\n")


def test_verify_nxds_files(saved: Saved, run: Any, tmp_path: pathlib.Path) -> None:
    run(0, "verify", saved.theirs)
    shutil.copytree(saved.theirs, tmp_path / "a")
    file = tmp_path / "a/t/model/dp_rank_00_tp_rank_01_pp_rank_00.pt"
    state = torch.load(file)
    state["lm_head.weight"][0, 0] = float("nan")
    torch.save(state, file)
    assert f"note: model/{file.name}: lm_head.weight has 1 values that are infinite or not numbers" in run(0, "verify", tmp_path / "a")
    assert "problem: model/" in run(1, "verify", tmp_path / "a", "--finite")
    assert "problem: model: lm_head.weight differs in 1 of 96 values" in run(1, "verify", tmp_path / "a", "--against", saved.ours)
    file.write_bytes(file.read_bytes()[:200])
    assert f"{file.name} is damaged" in run(1, "verify", tmp_path / "a")
    file.rename(file.with_name("dp_rank_00_tp_rank_02_pp_rank_00.pt"))
    assert "files of 2 ranks out of 3: that of dp 0, tp 1, pp 0 is missing" in run(1, "verify", tmp_path / "a")


def test_verify_against_another_model(run: Any, tmp_path: pathlib.Path) -> None:
    full = hub_model.weights()
    a = hub_model.folder(tmp_path / "a", full)
    more = {**full, "more": torch.ones(1), "lm_head.weight": torch.ones(2, 2)}
    del more["model.embed_tokens.weight"]
    shown = run(1, "verify", a, "--against", hub_model.folder(tmp_path / "b", more))
    for text in (
        "model: model.embed_tokens.weight is only in the first",
        "model: more is only in the second",
        "model: lm_head.weight has shape [16, 6] in the first, [2, 2] in the second",
    ):
        assert text in shown


def test_the_command_starts() -> None:
    found = subprocess.run([sys.executable, "-m", "nxd_jax.ckpt", "--help"], capture_output=True, text=True, check=True)
    assert "inspect" in found.stdout and "convert" in found.stdout and "verify" in found.stdout


# -- nxd_convert_zero_checkpoints ----------------------------------------------------------------------


def test_zero1_states_for_other_numbers_of_ranks(saved: Saved, run: Any, tmp_path: pathlib.Path) -> None:
    main = convert_zero_checkpoints.main
    common = ("--convert_type", "full_to_sharded", "--dp_size", 2)
    shown = run(0, "--input_dir", saved.theirs / "t", "--output_dir", tmp_path / "full", "--convert_type", "sharded_to_full", command=main)
    assert "wrote 2 files to" in shown
    full = torch.load(tmp_path / "full/optim/dp_rank_00_tp_rank_00_pp_rank_00.pt", weights_only=True)
    assert full["base_state"][0]["exp_avg"].shape == full["shape_info"][0]
    run(0, "--input_dir", tmp_path / "full/optim", "--output_dir", tmp_path / "back", *common, command=main)
    for path in (saved.theirs / "t/optim").glob("*.pt"):
        before, after = (torch.load(p, weights_only=True) for p in (path, tmp_path / "back" / path.name))
        assert before["param_groups"] == after["param_groups"] and before["shape_info"] == after["shape_info"]
        for index, own in before["base_state"].items():
            assert own.keys() == after["base_state"][index].keys()
            assert all(torch.equal(v, after["base_state"][index][k]) for k, v in own.items())
    assert "already: give an empty output_dir" in run(
        2, "--input_dir", tmp_path / "full/optim", "--output_dir", tmp_path / "back", *common, command=main
    )


def test_zero1_options(saved: Saved, tmp_path: pathlib.Path) -> None:
    convert = convert_zero_checkpoints.convert
    with pytest.raises(ValueError, match="convert_type must be 'sharded_to_full' or 'full_to_sharded', got 'x'"):
        convert(saved.theirs / "t", tmp_path, "x")
    with pytest.raises(ValueError, match="full_to_sharded needs dp_size"):
        convert(saved.theirs / "t", tmp_path, "full_to_sharded")
    with pytest.raises(ValueError, match="dp_size=4: sharded_to_full writes whole rows"):
        convert(saved.theirs / "t", tmp_path, "sharded_to_full", 4)
    with pytest.raises(FileNotFoundError, match="holds no files such as dp_rank_00_tp_rank_00_pp_rank_00.pt"):
        convert(tmp_path, tmp_path / "out", "sharded_to_full")
    torch.save({"state": {}, "param_groups": []}, tmp_path / "dp_rank_00_tp_rank_00_pp_rank_00.pt")
    with pytest.raises(ValueError, match="is not the state of a ZeRO-1 optimizer"):
        convert(tmp_path, tmp_path / "out", "sharded_to_full")
