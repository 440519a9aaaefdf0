"""`save_checkpoint` and `load_checkpoint` as scripts use them: tags, retention, background, damage, errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd
import pytest
import torch
from neuronx_distributed.parallel_layers.utils import move_all_tensor_to_cpu
from neuronx_distributed.trainer import checkpoint

from nxd_jax.checkpoint import chunk_sums
from nxd_jax.ckpt import main
from tests.nxd_jax.checkpoint import job
from torch_bridge.mesh import world


@pytest.fixture
def alone(nxd: Any) -> Any:
    """A world of one rank."""
    nxd(1)
    return nxd


class Tiny(torch.nn.Module):
    def __init__(self, width: int = 3):
        super().__init__()
        self.a = torch.nn.Linear(4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).pow(2).mean()


def tiny(width: int = 3, **options: Any) -> Any:
    config = nxd.neuronx_distributed_config(optimizer_config=options or None)
    model = nxd.initialize_parallel_model(config, Tiny, width)
    return model, nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=0.1)


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model.run_train(torch.ones(2, 4, device="xla"))
    optimizer.step()


def test_files(alone: Any, tmp_path: Path) -> None:
    model, optimizer = tiny()
    step(model, optimizer)
    nxd.save_checkpoint(tmp_path, "t", model, optimizer, user_content={"k": 1})
    names = sorted(p.name for p in (tmp_path / "t").iterdir())
    assert names == ["checkpoint", "done", "model", "optim", "random", "user_content.pt"]
    assert (tmp_path / "t" / "done").read_text() == "1" == (tmp_path / "t" / "checkpoint").read_text()
    index = json.loads((tmp_path / "t" / "model" / "tensors.json").read_text())
    assert index["tensors"]["a.weight"] == {"shape": [3, 4], "stored": [3, 4], "dtype": "float32"}


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_orbax_reads_it(alone: Any, tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    model, _ = tiny()
    nxd.save_checkpoint(tmp_path, "t", model)
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "t" / "model" / "arrays")
    assert torch.equal(torch.tensor(found["a.weight"]), model.a.weight.detach().cpu())


def test_64_bits_under_a_running_event_loop(alone: Any, tmp_path: Path) -> None:
    """A notebook's kernel has one; Orbax would then read in a thread in which JAX makes float32 of float64."""
    numbers = {"third": torch.tensor([1 / 3, 1e-300], dtype=torch.float64), "many": torch.tensor([2**40 + 1])}

    class Wide(torch.nn.Module):
        def __init__(self, filled: bool):
            super().__init__()
            for name, t in numbers.items():
                self.register_buffer(name, (t if filled else torch.zeros_like(t)).to("xla"))

    async def cell() -> Wide:
        nxd.save_checkpoint(tmp_path, "t", Wide(True))
        found = Wide(False)
        nxd.load_checkpoint(tmp_path, "t", found)
        return found

    found = asyncio.run(cell())
    assert all(torch.equal(getattr(found, name).cpu(), t) for name, t in numbers.items())


def test_interrupted_training_goes_on_bit_for_bit(nxd: Any, tmp_path: Path) -> None:
    import neuronx_distributed

    nxd(4, tp=2)
    made = job.build(2, zero1=True)
    job.train(made, 0, 3)
    neuronx_distributed.save_checkpoint(tmp_path, "three", *made, user_content={"step": 3})
    expected = job.train(made, 3, 6)  # with dropout
    weights = job.weights(made[0])

    nxd(4, tp=2)
    made = job.build(2, zero1=True, seed=9)
    torch.manual_seed(1234)
    done = neuronx_distributed.load_checkpoint(tmp_path, None, *made)["step"]
    assert job.train(made, done, 6) == expected
    assert job.differing(job.weights(made[0]), weights) == []


def test_bfloat16_keeps_master_weights(nxd: Any, tmp_path: Path) -> None:
    import neuronx_distributed

    nxd(2)
    made = job.build(zero1=True, dtype=torch.bfloat16)
    job.train(made, 0, 3)
    neuronx_distributed.save_checkpoint(tmp_path, "a", *made)
    neuronx_distributed.save_checkpoint(tmp_path, "b", *made, avoid_saving_lower_precision_weights=True)
    expected = job.train(made, 3, 6)
    for tag in "ab":
        made = job.build(zero1=True, dtype=torch.bfloat16, seed=2)
        neuronx_distributed.load_checkpoint(tmp_path, tag, *made)
        assert job.train(made, 3, 6) == expected, tag
    saved = json.loads((tmp_path / "b" / "model" / "tensors.json").read_text())["tensors"]
    assert list(saved) == ["table"]


def test_state_dicts_on_the_cpu_keep_each_ranks_values(nxd: Any, tmp_path: Path) -> None:
    import neuronx_distributed

    nxd(4, tp=2)
    made = job.build(2, zero1=True, fuse=False)
    job.train(made, 0, 1)
    weights, moments = job.weights(made[0]), {k: t.clone() for k, t in job.moments(*made[:2]).items()}
    neuronx_distributed.save_checkpoint(tmp_path, "t", *(move_all_tensor_to_cpu(x.state_dict()) for x in made[:2]))
    made = job.build(2, zero1=True, fuse=False, seed=9)
    neuronx_distributed.load_checkpoint(tmp_path, "t", *made[:2])
    assert job.differing(job.weights(made[0]), weights) == [] and job.differing(job.moments(*made[:2]), moments) == []


@pytest.mark.parametrize("optimizer_itself", [True, False])
def test_training_goes_on_from_state_dicts_bit_for_bit(nxd: Any, tmp_path: Path, optimizer_itself: bool) -> None:
    """Also of the optimizer itself beside the model's, which then says no names."""
    import neuronx_distributed

    nxd(4, tp=2)
    made = job.build(2, zero1=True, fuse=False)
    job.train(made, 0, 2)
    optimizer = made[1] if optimizer_itself else made[1].state_dict()
    neuronx_distributed.save_checkpoint(tmp_path, "t", made[0].state_dict(), optimizer, made[2])
    expected = job.train(made, 2, 4)
    weights = job.weights(made[0])
    made = job.build(2, zero1=True, fuse=False, seed=9)
    neuronx_distributed.load_checkpoint(tmp_path, "t", *made)
    assert job.train(made, 2, 4) == expected and job.differing(job.weights(made[0]), weights) == []


def test_newest_tag_and_retention(alone: Any, tmp_path: Path) -> None:
    model, _ = tiny()
    for k in (10, 9, 11):
        nxd.save_checkpoint(tmp_path, f"step_{k}", model, user_content=k, num_kept_ckpts=2)
    assert checkpoint.create_checkpoint_storage(tmp_path).completed_tags() == ["step_9", "step_11"]
    assert nxd.load_checkpoint(tmp_path, model=model) == 11
    (tmp_path / "step_11" / "done").unlink()
    assert nxd.load_checkpoint(tmp_path, model=model) == 9
    nxd.save_checkpoint(tmp_path, "step_12", model, num_kept_ckpts=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_12"]  # what was left unfinished is gone too


def test_the_same_tag_again(alone: Any, tmp_path: Path) -> None:
    model, _ = tiny()
    for k in (1, 2):
        nxd.save_checkpoint(tmp_path, "t", model, user_content=k)
    assert [p.name for p in tmp_path.iterdir()] == ["t"]
    assert nxd.load_checkpoint(tmp_path, "t", model=model) == 2


def test_without_a_tag_and_with_documented_keywords(alone: Any, tmp_path: Path) -> None:
    model, _ = tiny()
    config = nxd.neuronx_distributed_config()
    nxd.save_checkpoint(str(tmp_path), nxd_config=config, model=model, user_content={"total_steps": 1})
    nxd.save_checkpoint(checkpoint_dir_str=tmp_path, model=model, user_content={"total_steps": 2})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["save_000001", "save_000002"]
    assert nxd.load_checkpoint(tmp_path, model=model) == {"total_steps": 2}


def test_none_is_no_tag(alone: Any, tmp_path: Path) -> None:
    """As in `load_checkpoint`: the second save leaves the first as it was."""
    for steps in (1, 2):
        nxd.save_checkpoint(tmp_path, tag=None, user_content=steps)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["save_000001", "save_000002"]
    assert nxd.load_checkpoint(tmp_path, tag=None) == 2


def test_a_relative_path(alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the background, and when the script goes to another folder meanwhile."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 2).to("xla")
    nxd.save_checkpoint("runs/first", tag="a", model=model, async_save=True)
    monkeypatch.chdir("/")
    nxd.finalize_checkpoint()
    monkeypatch.chdir(tmp_path)
    assert (tmp_path / "runs" / "first" / "a").is_dir() and nxd.has_checkpoint("runs/first")
    other = torch.nn.Linear(2, 2).to("xla")
    nxd.load_checkpoint("runs/first", tag="a", model=other)
    assert torch.equal(other.weight.cpu(), model.weight.cpu())


@pytest.mark.parametrize("name", ["lr=[1, 2]", "a*b?", "back\\slash", "50%25 #1"])
@pytest.mark.parametrize("in_background", [False, True])
def test_a_path_that_looks_like_a_pattern(alone: Any, tmp_path: Path, name: str, in_background: bool) -> None:
    """Orbax takes paths for patterns of files: with [ in it nothing was found to be joined, and a complete tag could not be read."""
    model, optimizer = tiny()
    step(model, optimizer)
    want = model.a.weight.detach().cpu().clone()
    nxd.save_checkpoint(tmp_path / name, f"tag {name}", model, optimizer, async_save=in_background)
    nxd.finalize_checkpoint()
    other, its = tiny()
    nxd.load_checkpoint(tmp_path / name, None, other, its)
    assert torch.equal(other.a.weight.cpu(), want)
    (tmp_path / name / f"tag {name}").rename(tmp_path / "moved")  # its data are in the folder, not where a link was
    other, its = tiny()
    nxd.load_checkpoint(tmp_path, "moved", other, its)
    assert torch.equal(other.a.weight.cpu(), want)


@pytest.mark.usefixtures("alone")
def test_a_temporary_folder_that_looks_like_a_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "[1]").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "[1]"))
    with pytest.raises(OSError, match="set TMPDIR to a folder without"):
        nxd.save_checkpoint(tmp_path / "[2]", "t", tiny()[0])
    assert not nxd.has_checkpoint(tmp_path / "[2]")


def test_has_checkpoint(alone: Any, tmp_path: Path) -> None:
    assert not nxd.has_checkpoint(tmp_path / "none")
    nxd.save_checkpoint(tmp_path, "t", user_content=1)
    assert nxd.has_checkpoint(str(tmp_path))


def test_background_save_holds_the_state(alone: Any, tmp_path: Path) -> None:
    model, optimizer = tiny()
    step(model, optimizer)
    before = model.a.weight.detach().cpu().clone()
    nxd.save_checkpoint(tmp_path, "t", model, optimizer, async_save=True)
    for _ in range(3):
        step(model, optimizer)
    assert not torch.equal(model.a.weight.cpu(), before)
    nxd.finalize_checkpoint()
    assert (tmp_path / "t" / "done").exists()
    nxd.load_checkpoint(tmp_path, "t", model, optimizer)
    assert torch.equal(model.a.weight.cpu(), before)


def test_background_errors_are_raised_later(alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nxd_jax.checkpoint import orbax_files

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    model, _ = tiny()
    nxd.save_checkpoint(tmp_path, "good", model)
    monkeypatch.setattr(orbax_files, "save", full)
    nxd.save_checkpoint(tmp_path, "bad", model, async_save=True, num_kept_ckpts=1)
    with pytest.raises(OSError, match="No space left"):
        nxd.finalize_checkpoint()
    assert [p.name for p in tmp_path.iterdir()] == ["good"]
    with pytest.raises(OSError, match="No space left"):
        nxd.save_checkpoint(tmp_path, "bad", model)
    assert nxd.has_checkpoint(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(alone: Any, tmp_path: Path) -> None:
    model, _ = tiny()
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        nxd.save_checkpoint(tmp_path, "t", model)


def test_a_file_in_the_way(alone: Any, tmp_path: Path) -> None:
    model, _ = tiny()
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        nxd.save_checkpoint(tmp_path / "file", "t", model)


def test_memory_filesystem(alone: Any) -> None:
    model, optimizer = tiny()
    step(model, optimizer)
    before = model.a.weight.detach().cpu().clone()
    for k in range(3):
        nxd.save_checkpoint("memory://bucket/run", f"t{k}", model, optimizer, user_content=k, num_kept_ckpts=2)
    step(model, optimizer)
    storage = checkpoint.create_checkpoint_storage("memory://bucket/run")
    assert storage.completed_tags() == ["t1", "t2"] and storage.files.cat_file("bucket/run/t2/checkpoint") == b"1"
    assert nxd.load_checkpoint("memory://bucket/run", None, model, optimizer) == 2
    assert torch.equal(model.a.weight.cpu(), before)


@pytest.mark.parametrize("zero1", [False, True])
def test_parts_by_themselves(alone: Any, tmp_path: Path, zero1: bool) -> None:
    """An optimizer without its model goes by the order of parameters."""
    model, optimizer = tiny(zero_one_enabled=zero1)
    step(model, optimizer)
    nxd.save_checkpoint(tmp_path, "t", None, optimizer)
    other, again = tiny(zero_one_enabled=zero1)
    nxd.load_checkpoint(tmp_path, "t", None, again)
    assert job.differing(job.moments(other, again), job.moments(model, optimizer)) == []
    with pytest.raises(
        FileNotFoundError, match="holds no model: there is no model among checkpoint, done, optim.*Do not pass model=, or load another tag"
    ):
        nxd.load_checkpoint(tmp_path, "t", model)


def test_state_dicts(alone: Any, tmp_path: Path) -> None:
    model, optimizer = tiny()
    step(model, optimizer)
    nxd.save_checkpoint(tmp_path, "t", model.state_dict(), optimizer.state_dict())
    other, again = tiny()
    nxd.load_checkpoint(tmp_path, "t", other, again)
    assert job.differing(job.weights(model), job.weights(other)) == []
    assert job.differing(job.moments(other, again), job.moments(model, optimizer)) == []


def test_strict(alone: Any, tmp_path: Path) -> None:
    model, _ = tiny()
    nxd.save_checkpoint(tmp_path, "t", {**model.state_dict(), "more": torch.ones(20, device="xla")})
    with pytest.raises(RuntimeError, match="into Tiny: unexpected in the checkpoint: more. strict=False ignores"):
        nxd.load_checkpoint(tmp_path, "t", model)
    nxd.load_checkpoint(tmp_path, "t", model, strict=False)
    nxd.save_checkpoint(tmp_path, "u", {"a.bias": model.a.bias})
    with pytest.raises(RuntimeError, match=r"missing in the checkpoint: a\.weight"):
        nxd.load_checkpoint(tmp_path, "u", model)


def test_an_empty_dict_is_refused(alone: Any, tmp_path: Path) -> None:
    """It stayed empty without a word if strict=False."""
    model, optimizer = tiny()
    step(model, optimizer)
    nxd.save_checkpoint(tmp_path, "t", model, optimizer)
    with pytest.raises(
        ValueError, match=r"model=\{\}: .* divided among ranks as the model is.*Give the model itself, and read model.state_dict\(\)"
    ):
        nxd.load_checkpoint(tmp_path, "t", {}, strict=False)
    with pytest.raises(ValueError, match=r"optimizer=\{\}: .*Give the optimizer itself"):
        nxd.load_checkpoint(tmp_path, "t", optimizer={})


def test_other_shapes_change_nothing(alone: Any, tmp_path: Path) -> None:
    model, optimizer = tiny()
    step(model, optimizer)
    nxd.save_checkpoint(tmp_path, "t", model, optimizer)
    other, again = tiny(width=5)
    step(other, again)
    before, state = job.weights(other), job.moments(other, again)
    with pytest.raises(RuntimeError, match=r"a\.weight has shape \[3, 4\] in the checkpoint, \[5, 4\] in the model"):
        nxd.load_checkpoint(tmp_path, "t", other)
    with pytest.raises(ValueError, match=r"exp_avg/a\.weight has shape \[3, 4\]"):
        nxd.load_checkpoint(tmp_path, "t", None, again)
    assert job.differing(job.weights(other), before) == []
    assert job.differing(job.moments(other, again), state) == []


def test_other_parameters(alone: Any, tmp_path: Path) -> None:
    model, optimizer = tiny()
    step(model, optimizer)
    nxd.save_checkpoint(tmp_path, "t", None, optimizer)
    made = job.build()
    with pytest.raises(ValueError, match="has no state for embedding.weight.*was it saved from another model"):
        checkpoint.reading.load_optimizer(tmp_path / "t" / "optim", made[1], made[0])


@pytest.mark.parametrize("here", [1, 2])
def test_other_groups(alone: Any, tmp_path: Path, here: int) -> None:
    """The options of a group would be those of another one; torch refuses them, too."""

    def made(groups: int) -> Any:
        model = Tiny().to("xla")
        each = [{"params": [p], "lr": 0.1 * (k + 1)} for k, p in enumerate(model.parameters())]
        return model, torch.optim.AdamW(each if groups == 2 else model.parameters(), lr=0.3)

    model, optimizer = made(3 - here)
    nxd.save_checkpoint(tmp_path, "t", model, optimizer)
    model, optimizer = made(here)
    options = [group["lr"] for group in optimizer.param_groups]
    text = (
        r"group 0 of the optimizer has a.weight, a.bias, which were in different"
        if here == 1
        else "groups 0 and 1 of the optimizer were one group"
    )
    with pytest.raises(ValueError, match=text):
        nxd.load_checkpoint(tmp_path, "t", model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == options


def test_tensors_without_entries(nxd: Any, tmp_path: Path) -> None:
    """Orbax takes no array of them."""
    import neuronx_distributed

    def made(value: float, device: str) -> torch.nn.Module:
        model = Tiny()
        model.register_buffer("none", torch.empty(0, 3))
        model.register_buffer("whole", torch.empty(0, dtype=torch.float64))
        torch.nn.init.constant_(model.a.weight, value)
        return model.to(device)

    nxd(4)
    for k, device in enumerate(("xla", "cpu")):
        neuronx_distributed.save_checkpoint(tmp_path, str(k), made(1.0, device))
    neuronx_distributed.save_checkpoint(tmp_path, "alone", {"none": torch.empty(0, 3, device="xla")})
    nxd(2)
    for tag in ("0", "1"):
        for device in ("xla", "cpu"):
            model = made(2.0, device)
            neuronx_distributed.load_checkpoint(tmp_path, tag, model)
            assert model.a.weight.unique().tolist() == [1.0] and model.none.shape == (0, 3)
    assert main(["verify", str(tmp_path)]) == 0


def test_a_tag_in_a_folder_of_its_own(alone: Any, tmp_path: Path) -> None:
    """Loads if it is named."""
    model, optimizer = tiny()
    for step_ in (5, 6, 6):
        nxd.save_checkpoint(tmp_path, f"epoch_1/step_{step_}", model, optimizer, user_content=step_)
    assert nxd.load_checkpoint(tmp_path, "epoch_1/step_5", model, optimizer) == 5
    assert nxd.load_checkpoint(tmp_path, "epoch_1/step_6", model, optimizer) == 6
    with pytest.raises(FileNotFoundError, match="no complete checkpoint 'epoch_1/step_7'"):
        nxd.load_checkpoint(tmp_path, "epoch_1/step_7", model)
    (tmp_path / "epoch_1" / "step_5" / "done").unlink()
    with pytest.raises(FileNotFoundError):
        nxd.load_checkpoint(tmp_path, "epoch_1/step_5", model)


def test_a_tag_with_a_folder_leaves_the_tag_of_its_name(alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when its save fails."""
    model, _ = tiny()
    nxd.save_checkpoint(tmp_path, "step_1", model, user_content="plain")
    nxd.save_checkpoint(tmp_path, "run/step_1", user_content="in a folder")
    nxd.save_checkpoint(tmp_path, "run/step_2", user_content="no array")
    assert nxd.load_checkpoint(tmp_path, "run/step_2") == "no array"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "step_1"]

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.writing, "write_bytes", full)
        with pytest.raises(OSError, match="No space left on device"):
            nxd.save_checkpoint(tmp_path, "other/step_1", user_content="cut off")
    assert nxd.load_checkpoint(tmp_path, "step_1", model) == "plain"
    assert nxd.load_checkpoint(tmp_path, "run/step_1") == "in a folder"
    with pytest.raises(FileNotFoundError, match="no complete checkpoint 'other/step_1'"):
        nxd.load_checkpoint(tmp_path, "other/step_1")


def test_a_tag_with_a_folder_warns(alone: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What looks for tags does not see it."""
    nxd.save_checkpoint(tmp_path, "./plain/", user_content=0)
    assert not caplog.messages
    nxd.save_checkpoint(tmp_path, "run/step_1", user_content=1, num_kept_ckpts=1)
    (said,) = caplog.messages
    assert said.startswith("save_checkpoint(tag='run/step_1'): only load_checkpoint(tag='run/step_1') finds this tag")
    assert said.endswith(f"Give path='{tmp_path}/run' and tag='step_1' for them to see it")
    assert nxd.load_checkpoint(tmp_path) == 0
    assert nxd.load_checkpoint(f"{tmp_path}/run") == 1


def test_no_checkpoint(alone: Any, tmp_path: Path) -> None:
    model, _ = tiny()
    with pytest.raises(RuntimeError, match=f"Error: no checkpoint under directory {tmp_path}"):
        nxd.load_checkpoint(tmp_path, model=model)
    nxd.save_checkpoint(tmp_path, "t", model)
    with pytest.raises(FileNotFoundError, match="has no complete checkpoint 'u'; complete ones are: t"):
        nxd.load_checkpoint(tmp_path, "u", model)


@pytest.mark.parametrize(
    "damage",
    ["index", "objects", "arrays", "lost data", "cut off data", "a flipped bit", "a lost block", "all zeros"],
)
def test_damage(alone: Any, tmp_path: Path, damage: str) -> None:
    model, _ = tiny(5000)  # so large that its data are in a file of their own
    nxd.save_checkpoint(tmp_path, "t", model)
    folder = tmp_path / "t" / "model"
    if damage == "index":
        (folder / "tensors.json").write_text('{"format": 1, "tens')
    elif damage == "objects":
        (folder / "objects.pt").write_bytes(b"nonsense")
    elif damage != "arrays":
        data = max((folder / "arrays").glob("ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)
        _harm(data, damage)
    else:
        shutil.rmtree(folder / "arrays" / "d")
        for data in (folder / "arrays").glob("ocdbt.process_*"):
            shutil.rmtree(data)
    before = job.weights(model)
    with pytest.raises(checkpoint.reading.DamagedCheckpointError, match="Load another tag"):
        nxd.load_checkpoint(tmp_path, "t", model)
    assert job.differing(job.weights(model), before) == []


def _harm(data: Path, damage: str) -> None:
    content = bytearray(data.read_bytes())
    middle = len(content) // 2
    if damage == "a flipped bit":
        content[middle] ^= 1
    elif damage == "a lost block":
        content[middle : middle + 512] = bytes(512)
    elif damage == "all zeros":
        content[:] = bytes(len(content))
    elif damage == "cut off data":
        del content[1000:]
    data.write_bytes(content) if damage != "lost data" else data.unlink()


@pytest.mark.parametrize("damage", ["a flipped bit", "a lost block"])
def test_nxd_ckpt_finds_damage(alone: Any, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = tiny(5000)
    nxd.save_checkpoint(tmp_path, "t", model)
    _harm(max((tmp_path / "t/model/arrays").glob("ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size), damage)
    assert main(["verify", str(tmp_path / "t")]) == 1
    said = capsys.readouterr().out
    assert "model/a.weight: the arrays in" in said
    assert "bytes on disk are not those that were written, a checksum differs" in said


def test_checksums_can_be_turned_off(alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_CHECKPOINT_CHECKSUMS", "0")
    model, _ = tiny(5000)
    nxd.save_checkpoint(tmp_path, "t", model)
    saved = job.weights(model)
    monkeypatch.delenv("NXD_JAX_CHECKPOINT_CHECKSUMS")
    other, _ = tiny(5000)
    nxd.load_checkpoint(tmp_path, "t", other)
    assert job.differing(job.weights(other), saved) == []
    _harm(max((tmp_path / "t/model/arrays").glob("ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size), "a flipped bit")
    nxd.load_checkpoint(tmp_path, "t", other)  # nobody can tell
    assert job.differing(job.weights(other), saved) != []


def test_checkpoints_without_checksums(alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As earlier releases wrote them."""
    model, _ = tiny(5000)
    before = job.weights(model)
    with monkeypatch.context() as m:
        m.setattr(chunk_sums, "written", contextlib.nullcontext)
        nxd.save_checkpoint(tmp_path, "t", model)
    with torch.no_grad():
        model.a.weight.zero_()
    nxd.load_checkpoint(tmp_path, "t", model)
    assert job.differing(job.weights(model), before) == []


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, ValueError, "nothing to save"),
        ({"user_content": 1, "num_kept_ckpts": 0}, ValueError, "num_kept_ckpts must be a positive number"),
        ({"user_content": 1, "tag": "../x"}, ValueError, "cannot name a checkpoint"),
        ({"model": 3}, TypeError, "model must be a torch.nn.Module or a state dict, got int"),
    ],
)
def test_bad_arguments(alone: Any, tmp_path: Path, arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        nxd.save_checkpoint(tmp_path, **{"tag": "t", **arguments})
    assert list(tmp_path.iterdir()) == []


def test_use_zero1_dcp(alone: Any, tmp_path: Path) -> None:
    """Refused as NxD refuses it; otherwise it changes nothing."""
    model, optimizer = tiny(zero_one_enabled=True)
    with pytest.raises(AssertionError, match="give async_save=True too"):
        nxd.save_checkpoint(tmp_path, "t", model, optimizer, use_zero1_dcp=True)
    with pytest.raises(AssertionError, match="exclude each other"):
        nxd.save_checkpoint(tmp_path, "t", model, optimizer, use_zero1_dcp=True, async_save=True, avoid_saving_lower_precision_weights=True)
    assert list(tmp_path.iterdir()) == []
    nxd.save_checkpoint(tmp_path, "t", model, optimizer, use_zero1_dcp=True, async_save=True)
    nxd.finalize_checkpoint()
    nxd.load_checkpoint(tmp_path, "t", model, optimizer, use_zero1_dcp=True)


def test_names_of_nxds_files(nxd: Any) -> None:
    nxd(8, tp=2, pp=2)
    assert checkpoint._get_path("model") == "model/dp_rank_00_tp_rank_00_pp_rank_00.pt"
    assert checkpoint._get_path("optim", dp=True, ep=True) == "optim/dp_rank_00_ep_rank_00_tp_rank_00_pp_rank_00.pt"


def test_a_directory_must_be_named(alone: Any) -> None:
    with pytest.raises(TypeError, match="a checkpoint directory is a path or an address, got"):
        nxd.save_checkpoint(user_content=1)


def test_varying_content_is_refused(nxd: Any, tmp_path: Path) -> None:
    import neuronx_distributed

    from torch_bridge.recorder import sharded

    nxd(2)
    differs = sharded.from_ranks(lambda r: torch.full((3,), float(r)))
    with pytest.raises(ValueError, match="is different on each rank, and no parameter says how it is shared out"):
        neuronx_distributed.save_checkpoint(tmp_path, "t", user_content={"x": differs})


def test_drifted_copies_are_kept_in_the_same_layout(nxd: Any, tmp_path: Path) -> None:
    """A parameter that every rank should hold alike, but does not."""
    import neuronx_distributed

    from torch_bridge.recorder import sharded

    nxd(2)
    model = torch.nn.Linear(2, 2, bias=False).to("xla")
    with torch.no_grad():
        model.weight.copy_(sharded.from_ranks(lambda r: torch.full((2, 2), float(r))))
    neuronx_distributed.save_checkpoint(tmp_path, "t", model)
    with torch.no_grad():
        model.weight.mul_(0)
    neuronx_distributed.load_checkpoint(tmp_path, "t", model)
    assert [s[0, 0].item() for s in sharded.shards(model.weight.detach())] == [0.0, 1.0]
    nxd(1)
    assert world.size() == 1
    with pytest.raises(RuntimeError, match="weight was different on each rank, and ranks are laid out in another way now"):
        neuronx_distributed.load_checkpoint(tmp_path, "t", torch.nn.Linear(2, 2, bias=False).to("xla"))


def test_tags_removed_through_the_last_saves_state(alone: Any, tmp_path: Path) -> None:
    for tag in ("a", "b"):
        nxd.save_checkpoint(tmp_path, tag, user_content=1)
    assert checkpoint.g_iostate is not None
    checkpoint.g_iostate.submit_remove(-1, False, ["a"])
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_nxds_own_state(alone: Any, tmp_path: Path) -> None:
    for background in (False, True):
        state = nxd.CheckpointIOState(async_save=background)
        storage = checkpoint.create_checkpoint_storage(tmp_path)
        with pytest.raises(RuntimeError, match="needs begin"):
            state.add_save_task(1, "x.pt")
        state.begin(storage, f"t{background}")
        state.add_save_task({"a": torch.ones(2)}, "folder/x.pt")
        state.add_save_task(3, f"t{background}/user_content.pt")  # as NxD names them
        state.end(num_kept=1)
        state.wait_all()
        assert storage.completed_tags() == [f"t{background}"]
        assert torch.equal(storage.load_object(f"t{background}/folder/x.pt")["a"], torch.ones(2))
        assert nxd.load_checkpoint(tmp_path, f"t{background}") == 3
    state.submit_remove(-1, True, ["tTrue"])
    state.wait_remove()
    assert storage.completed_tags() == []
