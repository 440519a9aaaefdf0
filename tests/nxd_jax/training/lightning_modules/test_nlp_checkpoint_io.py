"""`NLPCheckpointIO`: what the original wrote, weights alone, and checkpoints of another model."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from pytorch_lightning import Callback, Trainer

from nxd_jax.checkpoint.original import export_original
from nxd_jax.training.lightning_modules.nlp_checkpoint_io import OPTIONAL, NLPCheckpointIO, OriginalWeights
from nxd_jax.utils.full_weights import gather_full
from tests.nxd_jax.lightning.jobs import MARKS
from tests.nxd_jax.training import small
from tests.nxd_jax.training.utils import runs

pytestmark = [
    *MARKS,
    pytest.mark.usefixtures("variables"),
    pytest.mark.filterwarnings("ignore:.*is not resumable"),
    pytest.mark.filterwarnings("ignore:XLA_DOWNCAST_BF16 is deprecated"),
    pytest.mark.filterwarnings("ignore:The loop.*resum"),
]

STEPS = "trainer.max_steps=6"
LAYOUTS = {
    "dp 2": ("trainer.devices=2",),
    "tp 2, dp 2": ("trainer.devices=4", "distributed_strategy.tensor_model_parallel_size=2"),
    "pp 2": ("trainer.devices=2", "distributed_strategy.pipeline_model_parallel_size=2"),
}


class Export(Callback):
    """Writes, after a step, what the original would have written."""

    def __init__(self, folder: Path, step: int, xser: bool = False, optimizer: bool = True):
        self.folder, self.step, self.xser, self.optimizer = folder, step, xser, optimizer

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step != self.step:
            return
        content = trainer._checkpoint_connector.dump_checkpoint()
        for name in ("state_dict", "optimizer_states", "pytorch-lightning_version"):
            content.pop(name)
        content["callbacks"] = {"NeMoModelCheckpoint{'monitor': 'step'}": {"best_k_models": {}}}
        content = {k: v for k, v in content.items() if not k.endswith("Data")}  # the original keeps nothing of its data modules
        options = {"optimizer": trainer.optimizers[0], "user_content": content} if self.optimizer else {}
        export_original(str(self.folder), NAME, module.model, xser=self.xser, **options)


NAME = "small--step=3-consumed_samples=24.0.ckpt"


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("wrote", "reads", "xser"),
    [
        ("tp 2, dp 2", "pp 2", True),
        ("dp 2", "dp 2", False),
        ("pp 2", "tp 2, dp 2", False),
        ("pp 2", "pp 2", True),
        ("tp 2, dp 2", "tp 2, dp 2", False),
    ],
)
def test_the_originals_checkpoints(tmp_path: Path, wrote: str, reads: str, xser: bool) -> None:
    """Weights, moments, steps and learning rates, at the layout of ranks that wrote it and at others."""
    _, wanted = runs.run(*runs.words(tmp_path / "a", *LAYOUTS[wrote]), STEPS, callbacks=(Export(tmp_path / "nxdt", 3, xser),))
    assert (tmp_path / "nxdt" / NAME / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt").is_file()
    words = runs.words(tmp_path / "b", *LAYOUTS[reads], f"exp_manager.resume_from_checkpoint='{tmp_path / 'nxdt' / NAME}'")
    _, found = runs.run(*words, STEPS)
    torch.testing.assert_close(runs.losses(found), runs.losses(wanted)[3:], rtol=1e-5, atol=0)
    assert [seen["step"] for seen in found.seen] == [3.0, 4.0, 5.0] and [seen["samples"] for seen in found.seen] == [32.0, 40.0, 48.0]
    assert [seen["lr"] for seen in found.seen] == [seen["lr"] for seen in wanted.seen][3:]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("wrote", ["tp 2, dp 2", "pp 2"])
def test_weights_alone(tmp_path: Path, wrote: str) -> None:
    """What a converter writes: model/ without marks. Training begins at step 0 with those weights, and a restart goes on from the run's own checkpoint."""
    at: dict[int, Any] = {}

    class Keep(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: Any, *args: Any) -> None:
            at[trainer.global_step] = {name: gather_full(p) for name, p in module.named_parameters()}

    class First(Callback):
        def on_train_start(self, trainer: Trainer, module: Any) -> None:
            at[0] = {name: gather_full(p) for name, p in module.named_parameters()}

    runs.run(*runs.words(tmp_path / "a", *LAYOUTS[wrote]), STEPS, callbacks=(Keep(), Export(tmp_path / "nxdt", 3, optimizer=False)))
    for mark in ("checkpoint", "done"):
        (tmp_path / "nxdt" / NAME / mark).unlink()
    wanted = at[3]
    words = runs.words(tmp_path / "b", *LAYOUTS["dp 2"], f"exp_manager.resume_from_checkpoint='{tmp_path / 'nxdt' / NAME}'")
    _, model = runs.run(*words, STEPS, callbacks=(First(),), stop=5)
    assert [seen["step"] for seen in model.seen] == [0.0, 1.0, 2.0, 3.0, 4.0] and model.seen[0]["samples"] == 8.0
    assert wanted.keys() == at[0].keys() and all(torch.equal(w, at[0][name]) for name, w in wanted.items())
    _, model = runs.run(*words, STEPS)
    assert [seen["step"] for seen in model.seen] == [4.0, 5.0]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("xser", [True, False])
def test_moments_that_the_original_never_wrote(tmp_path: Path, xser: bool, caplog: pytest.LogCaptureFixture) -> None:
    """NxD Training writes data-parallel rank 0's shards alone, and gives them to every rank. Here they begin anew, and somebody says so."""
    runs.run(*runs.words(tmp_path / "a", *LAYOUTS["dp 2"]), "trainer.max_steps=3", callbacks=(Export(tmp_path / "nxdt", 3, xser),))
    for path in (tmp_path / "nxdt" / NAME / "optim").glob("dp_rank_01*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    words = runs.words(tmp_path / "b", *LAYOUTS["dp 2"], f"exp_manager.resume_from_checkpoint='{tmp_path / 'nxdt' / NAME}'")
    _, found = runs.run(*words, STEPS)
    assert (
        "optimizer states of 1 data-parallel rank(s), and they are shards of 2" in caplog.text and "its moments begin anew" in caplog.text
    )
    assert [seen["step"] for seen in found.seen] == [3.0, 4.0, 5.0]


def test_weight_init_only(tmp_path: Path) -> None:
    """Of the base the weights alone; of the run's own checkpoints all, although the key is still there."""
    runs.run(*runs.words(tmp_path / "a"), STEPS)
    base = tmp_path / "a" / "small" / "checkpoints" / runs.kept(tmp_path / "a")[0]
    words = runs.words(tmp_path / "b", "model.weight_init_only=True", f"exp_manager.resume_from_checkpoint='{base}'")
    _, one = runs.run(*words, STEPS)
    assert [seen["step"] for seen in one.seen] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] and one.seen[0]["samples"] == 8.0
    shutil.rmtree(tmp_path / "b")
    runs.run(*words, STEPS, stop=5)
    _, two = runs.run(*words, STEPS)
    assert runs.losses(two) == runs.losses(one)[4:]


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    runs.run(*runs.words(tmp_path / "a"), "trainer.max_steps=2", callbacks=(Export(tmp_path / "nxdt", 2),))

    class Other(small.Module):
        def build_model(self) -> Any:
            found = super().build_model()
            found.module.more = torch.nn.Linear(2, 2).to("xla") if hasattr(found, "module") else None
            return found

    own = tmp_path / "a" / "small" / "checkpoints"
    with pytest.raises(
        RuntimeError, match=r"missing in the checkpoint: .*more.*Training would have gone on from .*step=2.*another exp_manager.name"
    ):
        runs.run(*runs.words(tmp_path / "a"), STEPS, module=Other)
    said = re.escape(str(tmp_path / "nxdt" / NAME))
    with pytest.raises(
        RuntimeError, match=rf"missing in the checkpoint: .*more.*Training would have gone on from {said}.*another resume_from_checkpoint"
    ):
        runs.run(*runs.words(tmp_path / "b", f"exp_manager.resume_from_checkpoint='{tmp_path / 'nxdt' / NAME}'"), STEPS, module=Other)
    assert [p.name for p in own.iterdir()] == ["small--step=2-consumed_samples=16.0.ckpt"]


def test_where_a_runs_own_checkpoints_are(tmp_path: Path) -> None:
    io = NLPCheckpointIO(weight_init_only=True)
    assert io.takes_weights_only(tmp_path / "x.ckpt")
    io.run_folder = str(tmp_path)
    assert not io.takes_weights_only(tmp_path / "x.ckpt") and io.takes_weights_only(tmp_path / "deep" / "x.ckpt")
    io.run_folder = "s3://a/b"
    assert (
        not io.takes_weights_only("s3://a/b/x.ckpt")
        and io.takes_weights_only("s3://a/x.ckpt")
        and io.takes_weights_only(tmp_path / "x.ckpt")
    )
    assert not NLPCheckpointIO().takes_weights_only(tmp_path)


def test_values_of_the_originals_files(tmp_path: Path) -> None:
    folder = tmp_path / "x.ckpt" / "model"
    folder.mkdir(parents=True)
    torch.save({"a.weight": torch.ones(2), f"layer{OPTIONAL[0]}": torch.ones(2)}, folder / "dp_rank_00_tp_rank_00_pp_rank_00.pt")
    found = NLPCheckpointIO(ptl_version="1.8.6").load_checkpoint(tmp_path / "x.ckpt")
    weights = found["state_dict"]
    assert (
        isinstance(weights, OriginalWeights)
        and list(weights) == ["a.weight", "layer.rotary_emb.inv_freq"]
        and found["pytorch-lightning_version"] == "1.8.6"
    )
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 1, bias=False)})
    module["a"].weight = torch.nn.Parameter(torch.zeros(2))
    weights.load_into(module, strict=True)
    assert module["a"].weight.tolist() == [1.0, 1.0]
    for use in (lambda: weights["a.weight"], lambda: weights.update(a=1), lambda: weights.pop("a.weight")):
        with pytest.raises(NotImplementedError, match="in files of its ranks, and only a model says how they fit together"):
            use()
    with pytest.raises(KeyError):
        weights["b"]


def test_configurations_are_saved_as_plain_dicts(tmp_path: Path) -> None:
    io = NLPCheckpointIO()
    io.save_checkpoint({"hyper_parameters": {"cfg": OmegaConf.create({"a": [1, 2]})}, "global_step": 1}, tmp_path / "x.ckpt")
    found = torch.load(tmp_path / "x.ckpt" / "user_content.pt", weights_only=True)
    assert found["hyper_parameters"] == {"cfg": {"a": [1, 2]}} and found["global_step"] == 1
