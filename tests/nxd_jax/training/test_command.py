"""`nxdt-train` as users start it: plain, under torchrun, after a stop, and users' own orchestrators."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from nxd_jax.training import command, own_code
from tests import quick
from tests.nxd_jax.training import yaml_runs

ORCHESTRATOR = Path(__file__).with_name("orchestrator.py")
S = "distributed_strategy"
TP2 = f"{S}.tensor_model_parallel_size=2"
FOUR = ("trainer.devices=4", TP2, f"{S}.pipeline_model_parallel_size=2", f"{S}.sequence_parallel=True", "trainer.max_steps=4")
PROGRAM = (sys.executable, "-m", "neuronx_distributed_training")


def run(words: Sequence[str], folder: Path, **environ: str) -> str:
    """What a command wrote to stderr and stdout; it must end well."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "NEURON_", "NXD_JAX_", "COMPILE", "TRAIN_ITERS"))
    }
    done = subprocess.run(
        [str(w) for w in words], cwd=folder, env={**kept, **quick.environment(), **environ}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-1000:]
    return done.stderr + done.stdout


def torchrun(count: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(count))


@pytest.mark.thorough(keep=1)
@pytest.mark.usefixtures("ranks", "variables")
@pytest.mark.parametrize(("count", "says"), [(2, "ranks 0 to 1 of 4 in process 0 of 2"), (4, "nxdt-train: rank 0 of 4")])
def test_processes_train_as_one_does(count: int, says: str, tmp_path: Path) -> None:
    """Fixture 5: TP 2 x PP 2 in this process, in two with two ranks each, and in four."""
    file = yaml_runs.write(tmp_path)
    said = run((*torchrun(count), "-m", "neuronx_distributed_training", file, *FOUR, "exp_manager.name=several"), tmp_path)
    assert says in said
    found = yaml_runs.losses(tmp_path / "experiments" / "several")
    one = yaml_runs.train(file, *FOUR, "exp_manager.name=one")
    assert len(one) == 4 and found == pytest.approx(one, rel=1e-5)


def test_users_own_orchestrators_run(tmp_path: Path) -> None:
    """Fixture 1, with a copy of the original's programs, plain and under torchrun; the file's folder and name as they say it."""
    yaml_runs.write(tmp_path, {"num_key_value_heads": 4})
    changes = (
        "trainer.devices=2",
        TP2,
        "model.qkv_linear=False",
        "model.num_layers=1",
        "trainer.max_steps=3",
        "exp_manager.create_checkpoint_callback=False",
    )
    config = (f"--config-path={tmp_path}", "--config-name=conf")
    run((sys.executable, ORCHESTRATOR, *config, *changes, "exp_manager.name=plain"), tmp_path, XLA_USE_BF16="0")
    run((*torchrun(2), ORCHESTRATOR, *config, *changes, "exp_manager.name=two"), tmp_path, XLA_USE_BF16="0")
    one, two = (yaml_runs.losses(tmp_path / "experiments" / name) for name in ("plain", "two"))
    assert len(one) == 3 and two == pytest.approx(one, rel=1e-5)


@pytest.mark.usefixtures("ranks", "variables")
def test_train_iters_compile_and_going_on(tmp_path: Path) -> None:
    """Fixture 23, in two processes with ZeRO-1: three steps, saved in the background, then on to six as in one process; ten steps for compilation."""
    file = yaml_runs.write(tmp_path)
    changes = ("trainer.devices=2", f"{S}.zero1=True", "model.num_layers=1", "~model.optim.sched", "exp_manager.async_checkpointing=True")
    words = (file, *changes)
    two = (*torchrun(2), "-m", "neuronx_distributed_training", *words)
    whole = yaml_runs.train(file, *changes, "exp_manager.name=whole")

    def kept() -> list[str]:
        return [p.name for p in (tmp_path / "experiments" / "hf_llama" / "checkpoints").iterdir()]

    assert "nxdt-train: rank 0 of 2" in run(two, tmp_path, COMPILE="0", TRAIN_ITERS="3")
    assert kept() == ["hf_llama--step=3-consumed_samples=12.0.ckpt"]
    assert "2 ranks" in run((*PROGRAM, *words, "exp_manager.create_tensorboard_logger=True"), tmp_path, COMPILE="1")
    assert kept() == ["hf_llama--step=3-consumed_samples=12.0.ckpt"]
    run(two, tmp_path)
    assert kept() == ["hf_llama--step=6-consumed_samples=24.0.ckpt"]
    parts = yaml_runs.losses(tmp_path / "experiments" / "hf_llama")
    assert len(whole) == 6 and parts == pytest.approx(whole, rel=1e-5)


OWN = """
from nxd_jax.training import registry
from tests.nxd_jax.training import small
from tests.nxd_jax.training.lightning_modules.own_modules import OfUpstream
from neuronx_distributed_training.lightning_modules.data.hf_data_module import HFDataModule


class Model(OfUpstream):
    pass


small.WORDS = 256
registry.register("mine", HFDataModule, Model)
"""


def test_the_installed_command_finds_users_code(tmp_path: Path) -> None:
    """A console script has neither the working folder nor the file's in sys.path. The model is the user's, and no config.json is named."""
    file = yaml_runs.write(tmp_path / "conf", count=8)
    (tmp_path / "conf" / "own_model.py").write_text(OWN)
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "nxdt-train"
    script.write_text("import sys\nfrom nxd_jax.training.command import main\nsys.exit(main())\n")
    root = str(Path(__file__).parents[3])
    words = (sys.executable, script, file, "--import", "own_model", "model_source=mine", "~model.model_config", "trainer.max_steps=2")
    quiet = ("exp_manager.create_checkpoint_callback=False", "model.do_layer_norm_weight_decay=True")
    said = run((*words, *quiet), tmp_path, PYTHONPATH=os.pathsep.join((root, f"{root}/aliases")))
    assert "nxdt-train:" in said and len(yaml_runs.losses(tmp_path / "conf" / "experiments")) == 2


def test_code_beside_a_file_is_found_after_all_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a_module_of_mine.py").write_text("import nothing_of_this_name\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", before := list(sys.path))
    own_code.find_beside(Path("there/conf.yaml"))
    assert sys.path[-2:] == [str(tmp_path), str(tmp_path / "there")] and sys.path[:-2] == before[: len(sys.path) - 2]
    with pytest.raises(
        SystemExit, match=r"nxdt-train --import: there is no module nowhere.at_all: give it as package.module; it is looked for"
    ):
        own_code.load(["nowhere.at_all"])
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        own_code.load(["a_module_of_mine"])


def test_mistakes_are_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = yaml_runs.write(tmp_path)
    wrong = ["trainer.max_steps=0", "+trainer.max_stesp=5", "data.global_batch_size=3", "trainer.devices=2"]
    with pytest.raises(SystemExit) as ended:
        command.main([str(file), *wrong])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "max_stesp" in said and "max_steps" in said and "global_batch_size" in said
    assert not (tmp_path / "experiments").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], r"say which configuration: nxdt-train CONFIG.yaml"),
        (["trainer.devices=2"], r"say which configuration"),
        (["nowhere.yaml"], r"there is no configuration file .*nowhere.yaml"),
        (
            ["nowhere.yaml", "-m", "seed=1,2"],
            r"--multirun is not there: start one training for each value: for x in 1 2; do nxdt-train CONFIG",
        ),
    ],
)
def test_no_configuration(words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=text):
        command.main(words)


def test_a_sweep_is_a_loop_of_the_shell(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("seed: 1\n")
    with pytest.raises(SystemExit, match=r"3\. To sweep over it, start one training for each value: for x in 1 2; do nxdt-train"):
        command.main([str(tmp_path / "mine.yaml"), "seed=1,2"])


def test_a_file_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text("a: 1\nb: ${a}\n")
    monkeypatch.chdir(tmp_path)
    for words in (["mine"], ["mine.yaml"], ["-cn", "mine"], ["-cp", "conf", "--config-name=mine.yaml"], ["--config-dir=conf", "-cn=mine"]):
        for show, b in ((["--show"], "3"), (["--cfg", "job"], "${a}"), (["-c", "job", "--resolve"], "3")):
            with pytest.raises(SystemExit) as ended:
                command.main([*show, *words, "a=3"])
            assert ended.value.code == 0
            assert capsys.readouterr().out == f"a: 3\nb: {b}\n"
