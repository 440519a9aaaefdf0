"""`NeuronHooksCallback`: which files it writes for which ranks, what is in them, and what is logged."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import nn

from nxd_jax.lightning.neuron_hooks_callback import NeuronHooksCallback
from nxd_jax.parallel_layers import ColumnParallelLinear, RowParallelLinear, parallel_state
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.lightning import plain
from torch_bridge.torch_xla.core import xla_model as xm

ALL = {"hooks": True, "enable_activation_dumps": True, "enable_grad_dumps": True}
NORMS = {**ALL, "dump_only_norms": True, "dump_only_master_rank": True}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(3, 4, gather_output=False, bias=False)
        self.down = RowParallelLinear(4, 2, input_is_parallel=True, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def callback(folder: Path, **settings: Any) -> NeuronHooksCallback:
    made = NeuronHooksCallback(SimpleNamespace(**{**ALL, **settings}))
    made.hooks_dump_base_directory = str(folder)
    return made


def files(folder: Path) -> dict[str, Any]:
    return {str(p.relative_to(folder)): torch.load(p) for p in sorted(folder.rglob("*.pt"))}


def step(trainer: Any, module: Any, x: torch.Tensor) -> torch.Tensor:
    """Forward and backward; returns the gradient that reaches the input."""
    x = x.detach().requires_grad_()
    module.model(x).sum().backward()
    xm.mark_step()
    assert x.grad is not None
    return x.grad


def test_every_rank_has_its_own(nxd: Nxd, tmp_path: Path) -> None:
    """World of 4 in this process: tensors that differ along tp and along dp."""
    nxd(4, tp=2)
    module, trainer = SimpleNamespace(model=Model().to("xla")), SimpleNamespace(training=True, global_step=6)
    hooks = callback(tmp_path, target_layers="up, down", hooks_interval=3)
    hooks.on_train_start(trainer, module)
    x = torch.ones(2, 3, device="xla") + parallel_state.get_data_parallel_rank()
    step(trainer, module, x)
    x.zero_()  # what was written stays what it was
    found = files(tmp_path)
    names = [f"rank_{r}_pp0_tp{r % 2}_dp{r // 2}" for r in range(4)]
    assert set(found) == {
        f"{layer}/global_step_6/{rank}_{what}_raw.pt"
        for layer in ("up", "down")
        for rank in names
        for what in ("layer_input", "layer_output", "grad_input", "grad_output")
    }
    own = {rank: {k.partition(rank + "_")[2]: v for k, v in found.items() if k.startswith("up/") and rank in k} for rank in names}
    for rank, place in zip(names, range(4), strict=True):
        assert torch.equal(own[rank]["layer_input_raw.pt"], torch.full((2, 3), 1.0 + place // 2))
        assert own[rank]["layer_output_raw.pt"].shape == (2, 2)
    assert torch.equal(own[names[2]]["layer_output_raw.pt"], 2 * own[names[0]]["layer_output_raw.pt"])
    assert not torch.equal(own[names[1]]["layer_output_raw.pt"], own[names[0]]["layer_output_raw.pt"])
    down = found["down/global_step_6/rank_1_pp0_tp1_dp0_layer_input_raw.pt"]
    assert torch.equal(down, own[names[1]]["layer_output_raw.pt"])
    assert torch.equal(found["down/global_step_6/rank_3_pp0_tp1_dp1_grad_output_raw.pt"], torch.ones(2, 2))

    (tmp_path / "up").rename(tmp_path / "before")
    trainer.global_step = 7
    step(trainer, module, x)
    trainer.global_step, trainer.training = 9, False
    step(trainer, module, x)
    hooks.on_train_end(trainer, module)
    trainer.training = True
    step(trainer, module, x)
    assert not (tmp_path / "up").exists()  # between intervals, in validation, after training


def test_norms_of_the_first_rank(nxd: Nxd, tmp_path: Path) -> None:
    nxd(2, tp=2)
    module, trainer = SimpleNamespace(model=Model().to("xla")), SimpleNamespace(training=True, global_step=0)
    hooks = callback(tmp_path, **NORMS, target_layers=["down"])
    hooks.on_train_start(trainer, module)
    step(trainer, module, torch.ones(2, 3, device="xla"))
    found = files(tmp_path / "down" / "global_step_0")
    names = ("grad_input", "grad_output", "layer_input", "layer_output")
    assert list(found) == [f"rank_0_pp0_tp0_dp0_{name}_norm.pt" for name in names]
    assert all(type(value) is float for value in found.values())
    assert found["rank_0_pp0_tp0_dp0_grad_output_norm.pt"] == 2.0


def train(folder: Path, model: nn.Module | None = None, **settings: Any) -> dict[str, Any]:
    """Two steps of a plain Trainer on the CPU; what was logged."""
    module = plain.Module()
    module.model = model or module.model
    trainer = plain.fit(folder, module, plain.batches(2), logger=CSVLogger(folder / "log"), callbacks=[callback(folder, **settings)])
    return {name: value.item() for name, value in trainer.logged_metrics.items() if name != "loss"}


LOGGED = {"enable_tb_logging_master_rank_activation_norms": True, "enable_tb_logging_master_rank_grad_norms": True}


def test_norms_are_logged(tmp_path: Path) -> None:
    logged = train(tmp_path, **NORMS, **LOGGED, target_layers="1")
    assert set(logged) == {"activation_input_norm", "activation_output_norm", "grad_input_norm", "grad_output_norm"}
    found = files(tmp_path / "1" / "global_step_1")
    assert logged["activation_output_norm"] == pytest.approx(found["rank_0_layer_output_norm.pt"])
    assert logged["grad_output_norm"] == pytest.approx(found["rank_0_grad_output_norm.pt"])


def test_norms_of_several_layers_are_told_apart(tmp_path: Path) -> None:
    logged = train(tmp_path, **{**NORMS, "enable_grad_dumps": False}, **LOGGED, target_layers="0,1")
    assert set(logged) == {f"activation_{what}_norm/{layer}" for what in ("input", "output") for layer in "01"}
    assert logged["activation_output_norm/0"] == pytest.approx(logged["activation_input_norm/1"])


def test_norms_that_cannot_be_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        NeuronHooksCallback({**ALL, **LOGGED, "dump_only_norms": True})
    assert "logs norms only with dump_only_master_rank=True and dump_only_norms=True" in caplog.text


class Unused(nn.Module):
    """A layer that is never called, and one that is called by keyword and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.used = Dict()
        self.idle = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(size=3, x=x)["y"]


class Dict(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)

    def forward(self, size: int, x: torch.Tensor) -> Any:
        return {"size": size, "y": super().forward(x)}


@pytest.mark.filterwarnings("ignore:For backward hooks to be called:UserWarning")
def test_layers_that_are_not_called(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        train(tmp_path, Unused(), target_layers=["idle", "used"])
    assert "saw no activations of the layer 'idle'" in caplog.text
    assert "saw no gradients of the layer 'used'" in caplog.text
    assert "activations of the layer 'used'" not in caplog.text
    assert files(tmp_path / "used" / "global_step_0").keys() == {"rank_0_layer_input_raw.pt", "rank_0_layer_output_raw.pt"}


def test_off(tmp_path: Path) -> None:
    assert train(tmp_path, hooks=False, target_layers="no such layer", hooks_interval="nonsense") == {}
    assert train(tmp_path) == {}
    assert not files(tmp_path)


def test_hooks_are_taken_off(tmp_path: Path) -> None:
    class Stopped(plain.Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise RuntimeError("stopped")

    module = Stopped()
    with pytest.raises(RuntimeError, match="stopped"):
        plain.fit(tmp_path, module, callbacks=[callback(tmp_path, target_layers="0")])
    assert not module.model[0]._forward_hooks and not module.model[0]._backward_hooks


def test_the_names_of_all_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, master_print_model_layers=True)
    assert capsys.readouterr().out == "Layers of the model:\n0\n1\n"


def test_where_files_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert NeuronHooksCallback(ALL).hooks_dump_base_directory == "./hooks_outputs/local/hooks_dumps"
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert NeuronHooksCallback(ALL).hooks_dump_base_directory == "./hooks_outputs/17/hooks_dumps"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, r"cfg has no `hooks`, which must be True or False\. Its settings are hooks, target_layers, .*master_print_model_layers"),
        ({"hooks": "yes"}, "hooks must be True or False, got 'yes'"),
        ({"hooks": True, "dump_only_norms": 2}, "dump_only_norms must be True or False, got 2"),
        ({"hooks": True, "hooks_interval": 0}, "hooks_interval must be a positive number of steps, got 0"),
        ({"hooks": True, "hooks_interval": True}, "hooks_interval must be a positive number of steps, got True"),
        ({"hooks": True, "target_layers": 3}, "target_layers must be names of modules, in a list or separated by commas, got 3"),
        ({"hooks": True, "target_layers": [3]}, r"target_layers must be names of modules, .* got \[3\]"),
    ],
)
def test_settings_without_meaning(settings: dict[str, Any], text: str) -> None:
    for cfg in (settings, SimpleNamespace(**settings)):
        with pytest.raises(ValueError, match=text):
            NeuronHooksCallback(cfg)


def test_layers_that_are_not_there() -> None:
    module = SimpleNamespace(model=nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])}))
    with pytest.raises(
        ValueError, match=r"no layer 'layer\.1' \(target_layers\)\. It has .*'layers\.1', .*; master_print_model_layers=True prints all"
    ):
        NeuronHooksCallback({**ALL, "target_layers": "layer.1"}).on_train_start(SimpleNamespace(), module)
    with pytest.raises(ValueError, match=r"no layer 'x' \(target_layers\)\. It has 'layers', 'layers\.0', 'layers\.1', \.\.\."):
        NeuronHooksCallback({**ALL, "target_layers": "x"}).on_train_start(SimpleNamespace(), module)
