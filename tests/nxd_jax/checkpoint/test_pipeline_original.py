"""NxD's own files of a pipeline, one for each rank: written by hand they load into any layout, and what is written here is the same, file by file."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd_api
import pytest
import torch
from neuronx_distributed.modules.lora import LoraConfig
from torch import nn

from nxd_jax.checkpoint import pipeline_ranks
from nxd_jax.pipeline import NxDPPModel
from tests.nxd_jax.checkpoint import job, pipeline_files
from tests.nxd_jax.checkpoint.pipeline_files import MOMENTS, Written, drawn
from tests.nxd_jax.checkpoint.pipeline_job import Layout, Model, values
from tests.nxd_jax.checkpoint.test_original import read
from tests.nxd_jax.conftest import Nxd

Full = dict[str, torch.Tensor]


def same(made: Any, full: Full, moments: dict[str, Full] | None = MOMENTS, tied: bool = True) -> None:
    """A job holds these values."""
    found, buffers = job.weights(made[0]), made[0].state_dict()
    for name, value in full.items():
        if name.endswith("scale"):
            assert torch.equal(buffers[name].cpu(), value), name
        elif not (tied and name == "head.weight"):
            assert torch.equal(found[name], value), name
    state = job.moments(*made[:2]) if moments else {}
    for kind, own in (moments or {}).items():
        for name, value in own.items():
            if not name.endswith("scale") and not (tied and name == "head.weight"):
                assert torch.equal(state[f"{kind}/{name}"], value), (kind, name)
    assert all(v == 7 for k, v in state.items() if k.startswith("step/"))


# -- in --------------------------------------------------------------------------------------------------


@pytest.mark.core(keep=2)
@pytest.mark.parametrize(
    ("written", "layout"),
    [
        (Written(2, 2, 2, stages=2, zero1=True, tied=True), Layout(1)),
        (Written(4, 2, 2, zero1=True, tied=True), Layout(8, 2, 2, 2, True)),
        (Written(2, 2, stages=2, xser=True), Layout(4, 4)),
        (Written(2, 4, 3, stages=2, zero1=True, tied=True, xser=True), Layout(4, 2, zero1=True, stages=2, schedule="zbv")),
        (Written(4, 1, tied=True), Layout(2, zero1=True)),
    ],
    ids=str,
)
def test_files_of_nxd_load_into_any_layout(nxd: Nxd, tmp_path: Path, written: Written, layout: Layout) -> None:
    full = drawn(0, written.tied)
    written.write(tmp_path / "t", full, MOMENTS)
    layout.start(nxd)
    made = layout.build(seed=5, tied=written.tied)
    assert nxd_api.load_checkpoint(tmp_path, None, *made) == {"steps": 7}
    same(made, full, tied=written.tied)
    assert [(g["lr"], g["weight_decay"]) for g in made[1].param_groups] == [(0.004, 0.1), (0.004, 0.0)] and made[2].last_epoch == 4


def test_a_group_in_an_order_of_its_own_stays_in_it(nxd: Nxd, tmp_path: Path) -> None:
    written = Written(2)
    files = written.files(drawn(0), MOMENTS)
    turned = {name: dict(data) for name, data in files.items()}
    for name, data in turned.items():
        if name.startswith("optim"):
            sizes = [len(g["params"]) for g in data["param_groups"]]
            order = [*reversed(range(sizes[0])), *range(sizes[0], sum(sizes))]
            data["state"] = {k: data["state"][old] for k, old in enumerate(order)}
        path = tmp_path / "t" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(data, path)
    (tmp_path / "t/done").write_text("1")
    nxd(1)
    model, _, _ = Layout(1).build()
    by_call = ["embedding", *(f"layers.{k}" for k in range(4)), "norm", "head"]
    named = sorted(model.named_parameters(), key=lambda item: [item[0].startswith(f"{n}.") for n in by_call].index(True))
    matrices, vectors = ([p for n, p in named if (p.dim() > 1) == big] for big in (True, False))
    optimizer = torch.optim.AdamW([{"params": matrices[::-1]}, {"params": vectors}], lr=0.1)
    nxd_api.load_checkpoint(tmp_path, "t", model, optimizer)
    for name, p in named:
        assert torch.equal(optimizer.state[p]["exp_avg"].cpu(), MOMENTS["exp_avg"][name]), name


def test_files_of_parallel_layers_save(nxd: Nxd, tmp_path: Path) -> None:
    """Older: model and optimizer in one file for each rank."""
    written, full = Written(2, 2, stages=2, tied=True), drawn(0, True)
    for pp in range(2):
        for tp in range(2):
            path = tmp_path / f"old/tp_rank_{tp:02d}_pp_rank_{pp:02d}/checkpoint.pt"
            path.parent.mkdir(parents=True)
            torch.save({"model": written.model(full, tp, pp), "optimizer": written.optimizer(MOMENTS, tp, pp, 0), "epoch": 3}, path)
    layout = Layout(4, 4)
    layout.start(nxd)
    made = layout.build(seed=5, tied=True)
    assert nxd_api.load_checkpoint(tmp_path, "old", *made[:2]) == {"epoch": 3}
    same(made, full)
    shutil.rmtree(tmp_path / "old/tp_rank_01_pp_rank_01")
    with pytest.raises(FileNotFoundError, match=r"has files of 3 ranks out of 4: that of dp 0, tp 1, pp 1 is missing \(1 are\)"):
        nxd_api.load_checkpoint(tmp_path, "old", *made[:2])


# -- out -------------------------------------------------------------------------------------------------


@pytest.mark.thorough(keep=5)
@pytest.mark.core(keep=1)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("written", "layout"),
    [
        (Written(2, 2, 2, stages=2, zero1=True, tied=True), Layout(8, 2, 2, 2, True)),
        (Written(4, 2, 2, zero1=True, tied=True, xser=True), Layout(16, 4, 2, 1, True)),
        (Written(2, 2, stages=2), Layout(4, 2, 2, 2, schedule="zbv")),
        (Written(2, 2, tied=True), Layout(8, 2, 2)),
    ],
    ids=str,
)
def test_what_is_written_is_what_nxd_writes(
    nxd: Nxd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: Written, layout: Layout, background: bool
) -> None:
    """Names and their order, numbers of parameters, groups, values: of each file."""
    full = drawn(0, written.tied)
    written.write(tmp_path / "t", full, MOMENTS)
    layout.start(nxd)
    made = layout.build(seed=5, tied=written.tied)
    nxd_api.load_checkpoint(tmp_path, "t", *made)
    monkeypatch.setenv("NXD_JAX_CHECKPOINT_FORMAT", "original")
    nxd_api.save_checkpoint(tmp_path, "u", *made, use_xser=written.xser, async_save=background)
    nxd_api.finalize_checkpoint()
    expected = written.files(full, MOMENTS)
    found = {str(p.relative_to(tmp_path / "u")) for part in ("model", "optim") for p in (tmp_path / "u" / part).glob("*.pt")}
    assert {name for name in found if not name.endswith(".info.pt")} == set(expected)
    for name, data in expected.items():
        _equal(read(tmp_path / "u" / name, written.xser), data, name)


def _equal(found: Any, expected: Any, path: str) -> None:
    if isinstance(expected, dict) and path.startswith("model"):
        assert list(found) == list(expected), path
    if isinstance(expected, torch.Tensor):
        expected = torch.where(expected == 99.0, 0.0, expected) if expected.dim() else expected  # rows that pad
        assert torch.equal(found, expected), path
    elif isinstance(expected, dict):
        for key, value in expected.items():
            _equal(found[key], value, f"{path} {key}")
        if "param_groups" not in expected and "lr" not in expected:
            assert set(found) == set(expected), path
    elif isinstance(expected, list):
        assert len(found) == len(expected), path
        for a, b in zip(found, expected, strict=True):
            _equal(a, b, path)
    else:
        assert found == expected, path


def test_training_goes_on_after_both_ways(nxd: Nxd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 with master weights, which stand for the weights; back into the same pipeline, and into another layout."""
    monkeypatch.setenv("NXD_JAX_CHECKPOINT_FORMAT", "original")
    layout = Layout(8, 2, 2, zero1=True)
    layout.start(nxd)
    made = layout.build(dtype=torch.bfloat16, tied=True)
    layout.train(made, 0, 2)
    held = values(made)
    nxd_api.save_checkpoint(tmp_path, "t", *made, use_xser=True, avoid_saving_lower_precision_weights=True)
    assert len(list((tmp_path / "t/model/dp_rank_00_tp_rank_00_pp_rank_01.pt.tensors").iterdir())) == 2  # the layers' buffers
    expected = layout.train(made, 2, 4)
    for other in (layout, Layout(2, zero1=True)):
        other.start(nxd)
        made = other.build(seed=1, dtype=torch.bfloat16, tied=True)
        nxd_api.load_checkpoint(tmp_path, "t", *made)
        assert job.differing(values(made), held) == []
        if other is layout:
            assert other.train(made, 2, 4) == expected


def test_a_decoder_of_transformers(nxd: Nxd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced by running it: its tied head has its own name on the last rank, and a number of its own in that rank's optimizer."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("NXD_JAX_CHECKPOINT_FORMAT", "original")
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    nxd(2, pp=2)
    model = NxDPPModel(
        transformers.GPT2LMHeadModel(config),
        transformer_layer_cls=transformers.models.gpt2.modeling_gpt2.GPT2Block,
        auto_partition=True,
        input_names=["input_ids", "labels"],
        output_loss_value_spec=(True, False),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    nxd_api.save_checkpoint(tmp_path, "t", model, optimizer)
    names = [list(torch.load(tmp_path / f"t/model/dp_rank_00_tp_rank_00_pp_rank_{pp:02d}.pt")) for pp in range(2)]
    assert [own[:3] for own in names] == [
        ["transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.ln_1.weight"],
        ["transformer.h.1.ln_1.weight", "transformer.h.1.ln_1.bias", "transformer.h.1.attn.c_attn.weight"],
    ]
    assert names[1][-3:] == ["transformer.ln_f.weight", "transformer.ln_f.bias", "lm_head.weight"]
    groups = [torch.load(tmp_path / f"t/optim/dp_rank_00_tp_rank_00_pp_rank_{pp:02d}.pt")["param_groups"] for pp in range(2)]
    assert [own[0]["params"] for own in groups] == [list(range(len(own))) for own in names]
    nxd(1)
    again = transformers.GPT2LMHeadModel(config)
    stepper = torch.optim.SGD(again.parameters(), lr=1.0)
    nxd_api.load_checkpoint(tmp_path, "t", again, stepper)
    pairs = zip(model.local_parameters(), again.parameters(), strict=True)
    assert stepper.param_groups[0]["lr"] == 0.3 and all(torch.equal(a.cpu(), b) for a, b in pairs)


@pytest.mark.parametrize("base", [False, True])
def test_adapters(nxd: Nxd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: bool) -> None:
    """Of a `LoraModel`, with the base's weights or without."""
    monkeypatch.setenv("NXD_JAX_CHECKPOINT_FORMAT", "original")
    layout = Layout(4, 2, 2)
    layout.start(nxd)
    options = {"save_lora_base": base, "merge_lora": False, "lora_save_dir": str(tmp_path / "lora")}
    lora = LoraConfig(lora_rank=2, lora_alpha=4, target_modules=["up", "down", "head"], **options)
    config = layout.config() | {"lora_config": lora}
    made = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = nxd_api.initialize_parallel_model(config, Model)
        optimizer = nxd_api.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=0.1)
        made.append((model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)))
    layout.train(made[0], 0, 1)
    nxd_api.save_checkpoint(tmp_path, "t", *made[0][:2])
    names = [list(torch.load(tmp_path / f"t/model/dp_rank_00_tp_rank_00_pp_rank_{pp:02d}.pt", weights_only=False)) for pp in range(2)]
    adapted = [[n for n in own if "lora_" in n and n != "lora_config"] for own in names]
    assert [len(own) for own in adapted] == [8, 10] and any("embedding" in n for n in names[0]) == base
    nxd_api.load_checkpoint(tmp_path, "t", *made[1][:2])
    one, two = ({n: t for n, t in values(m).items() if "lora_" in n} for m in made)
    assert job.differing(one, two) == [] and len(one) == 18 * 4


# -- mistakes --------------------------------------------------------------------------------------------


@pytest.fixture
def alone(nxd: Nxd) -> Any:
    nxd(1)
    return Layout(1).build()


def test_files_that_are_missing(alone: Any, tmp_path: Path) -> None:
    folder = Written(4, 2).write(tmp_path / "t", drawn(0), MOMENTS)
    kept = shutil.move(folder / "model/dp_rank_00_tp_rank_01_pp_rank_02.pt", tmp_path)
    with pytest.raises(FileNotFoundError) as found:
        nxd_api.load_checkpoint(tmp_path, "t", alone[0])
    assert (
        "has files of 7 ranks out of 8: that of dp 0, tp 1, pp 2 is missing, model/dp_rank_00_tp_rank_01_pp_rank_02.pt (1 are). Copy the files of "
        in str(found.value)
    )
    shutil.move(kept, folder / "model")
    for path in folder.glob("model/*_pp_rank_03.pt"):
        path.unlink()
    with pytest.raises(
        ValueError,
        match=r"are of different runs, or some are missing: those of the model of tp 2, pp 3 and those of the optimizer of tp 2, pp 4",
    ):
        nxd_api.load_checkpoint(tmp_path, "t", alone[0])
    shutil.rmtree(folder / "optim")
    with pytest.raises(
        RuntimeError, match=r"the files are of pipeline ranks 0 to 2: if there were more ranks, copy theirs \(pp_rank_03\)"
    ) as error:
        nxd_api.load_checkpoint(tmp_path, "t", alone[0])
    assert "missing in the checkpoint: head.weight, norm.weight, norm.bias, layers.3.scale, layers.3.norm.weight" in str(error.value)


def test_a_file_of_another_size(nxd: Nxd, alone: Any, tmp_path: Path) -> None:
    folder = Written(2, 2).write(tmp_path / "t", drawn(0))
    other = Written(4, 2).write(tmp_path / "u", drawn(0))
    for path in other.glob("model/*_pp_rank_01.pt"):
        shutil.copy(path, folder / "model")
    with pytest.raises(RuntimeError, match=r"missing in the checkpoint: head.weight, norm.weight, norm.bias, layers.2.scale, "):
        nxd_api.load_checkpoint(tmp_path, "t", alone[0])
    shutil.rmtree(folder)
    Written(2, 2).write(folder, drawn(0))
    shutil.copy(Written(2, 4).write(tmp_path / "v", drawn(0)) / "model/dp_rank_00_tp_rank_01_pp_rank_01.pt", folder / "model")
    with pytest.raises(RuntimeError, match=r"layers.2.up.weight has different shapes on tensor-parallel ranks: \[\(4, 8\), \(8, 8\)\]"):
        nxd_api.load_checkpoint(tmp_path, "t", alone[0])
    for t in range(2):
        changed = torch.load(folder / f"model/dp_rank_00_tp_rank_{t:02d}_pp_rank_00.pt") | {"norm.bias": torch.ones(8)}
        torch.save(changed, folder / f"model/dp_rank_00_tp_rank_{t:02d}_pp_rank_00.pt")
        shutil.copy(
            tmp_path / "u/model" / f"dp_rank_00_tp_rank_{t:02d}_pp_rank_03.pt", folder / f"model/dp_rank_00_tp_rank_{t:02d}_pp_rank_01.pt"
        )
    with pytest.raises(
        RuntimeError, match="norm.bias is not the same in the files of pipeline ranks 0 and 1: they are of different checkpoints"
    ):
        nxd_api.load_checkpoint(tmp_path, "t", alone[0], strict=False)


def test_another_model(nxd: Nxd, tmp_path: Path) -> None:
    """Names come with the pipeline rank that has them, also if the optimizer does not fit either; nothing changes."""
    Written(4).write(tmp_path / "t", drawn(0), MOMENTS)
    layout = Layout(4, 2, 2)
    layout.start(nxd)
    made = layout.build(layers=2, more=True)
    before = values(made)
    with pytest.raises(RuntimeError) as found:
        nxd_api.load_checkpoint(tmp_path, "t", *made)
    assert "missing in the checkpoint: layers.1.gate.weight (pipeline rank 1), layers.1.gate.bias (pipeline rank 1); " in str(found.value)
    assert "unexpected in the checkpoint: layers.2.down.weight (pipeline rank 2), " in str(found.value)
    assert job.differing(values(made), before) == []
    with pytest.raises(
        ValueError, match=r"optim/dp_rank_00_tp_rank_00_pp_rank_02.pt has groups of \[2, 3\] parameters, there are groups of \[0, 0\] here"
    ):
        nxd_api.load_checkpoint(tmp_path, "t", *made, strict=False)


def test_weights_that_are_not_tied_in_the_files(nxd: Nxd, tmp_path: Path) -> None:
    Written(2).write(tmp_path / "t", drawn(0))
    nxd(1)
    model, _, _ = Layout(1).build(tied=True)
    message = (
        r"embedding.weight \(pipeline rank 0\) and head.weight \(pipeline rank 1\) are one tied weight here, and have different values"
    )
    with pytest.raises(RuntimeError, match=message):
        nxd_api.load_checkpoint(tmp_path, "t", model)


def test_an_optimizer_without_its_model(alone: Any, tmp_path: Path) -> None:
    folder = Written(2).write(tmp_path / "t", drawn(0), MOMENTS)
    with pytest.raises(ValueError, match=r"has the optimizer of 2 pipeline ranks, each with its own parameters: pass model= as well"):
        nxd_api.load_checkpoint(tmp_path, "t", optimizer=alone[1])
    shutil.rmtree(folder / "model")
    with pytest.raises(
        FileNotFoundError, match=r"has the optimizer of 2 pipeline ranks, but no model that would say which parameters each rank has"
    ):
        nxd_api.load_checkpoint(tmp_path, "t", optimizer=alone[1])


def test_what_cannot_be_written(nxd: Nxd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_CHECKPOINT_FORMAT", "original")
    layout = Layout(4, 2, 2)
    layout.start(nxd)
    model, optimizer, _ = made = layout.build()
    with pytest.raises(
        ValueError, match=r"a state dict does not say which tensors each pipeline rank's file of NxD has: give the model itself"
    ):
        nxd_api.save_checkpoint(tmp_path, "t", model.state_dict())
    with pytest.raises(ValueError, match=r"which parameters that has is in the model: pass model= as well"):
        nxd_api.save_checkpoint(tmp_path, "t", optimizer=optimizer)
    layout.train(made, 0, 1)
    with pytest.raises(
        ValueError, match=r"the state dict of a pipeline's optimizer does not say which parameters are which: give the optimizer itself"
    ):
        nxd_api.save_checkpoint(tmp_path, "t", model, optimizer.state_dict())
    foreign = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ValueError, match=r"1 of the optimizer's 25 parameters are not the model's: give the model that it was made for"):
        nxd_api.save_checkpoint(tmp_path, "t", model, foreign)
    monkeypatch.setattr(NxDPPModel, "names_by_rank", lambda self: [["embedding.weight"], ["elsewhere.weight"]])
    with pytest.raises(
        NotImplementedError, match=r"elsewhere.weight \(pipeline rank 1\) lies with another process, .* start the script with nxd-run"
    ):
        nxd_api.save_checkpoint(tmp_path, "t", model)
    assert not list(tmp_path.iterdir())


class Unused(Model):
    """A model with a weight that no stage uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 2)


def test_weights_that_no_stage_uses(nxd: Nxd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """NxD's files do not have them, so none are missed."""
    monkeypatch.setenv("NXD_JAX_CHECKPOINT_FORMAT", "original")
    layout = Layout(2, 2)
    layout.start(nxd)
    model = nxd_api.initialize_parallel_model(layout.config(), Unused)
    optimizer = nxd_api.initialize_parallel_optimizer(layout.config(), torch.optim.SGD, model.parameters(), lr=0.1)
    nxd_api.save_checkpoint(tmp_path, "t", model, optimizer)
    assert "no stage of the pipeline uses unused.weight, unused.bias: NxD's files do not have them" in caplog.text
    assert Written(2).names(1) == list(torch.load(tmp_path / "t/model/dp_rank_00_tp_rank_00_pp_rank_01.pt"))
    nxd_api.load_checkpoint(tmp_path, "t", model, optimizer)
    nxd(1)
    with pytest.raises(RuntimeError, match="missing in the checkpoint: unused.weight, unused.bias"):
        nxd_api.load_checkpoint(tmp_path, "t", Unused())


def test_stages_that_are_not_known_yet(nxd: Nxd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that is traced by running it, and takes more than token ids."""
    monkeypatch.setenv("NXD_JAX_CHECKPOINT_FORMAT", "original")
    nxd(2, pp=2)
    model = NxDPPModel(Branch(), transformer_layer_cls=nn.Linear, pipeline_cuts=["first"], input_names=["x"], output_loss_value_spec=True)
    with pytest.raises(
        RuntimeError, match=r"the stages of Branch are known when the first batch is there: call run_train or run_eval before, or trace\(\)"
    ):
        nxd_api.save_checkpoint(tmp_path, "t", model)
    model.run_train(x=torch.ones(1, 3))
    nxd_api.save_checkpoint(tmp_path, "t", model)
    assert list(torch.load(tmp_path / "t/model/dp_rank_00_tp_rank_00_pp_rank_01.pt")) == ["second.weight", "second.bias"]
    again = NxDPPModel(Branch(), transformer_layer_cls=nn.Linear, pipeline_cuts=["first"], input_names=["x"], output_loss_value_spec=True)
    nxd_api.load_checkpoint(tmp_path, "t", again)
    assert torch.equal(again.second.weight.cpu(), model.second.weight.cpu())


class Branch(nn.Module):
    """A model that symbolic tracing refuses, with an input that is no token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(int(x.dim() > 1)):
            x = x + 1
        return self.second(x).sum()


def test_places_of_tensors(nxd: Nxd) -> None:
    assert pipeline_ranks.said("a", None) == "a" and pipeline_ranks.said("a", [0, 2]) == "a (pipeline ranks 0, 2)"
    nxd(4, pp=2)
    made = Layout(4, 2).build()
    assert {pipeline_ranks.rank_of(p) for p in made[0].parameters()} == {0, 1}
    assert pipeline_ranks.rank_of(torch.ones(1, device="xla")) is None is pipeline_ranks.rank_of(torch.ones(1))
    assert dataclasses.replace(Written(2), stages=2).names(0)[0] == "embedding.weight" and len(pipeline_files.SHAPES) == 28
