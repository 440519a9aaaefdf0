"""`NeuronLTModule`'s attributes and signatures, and hyperparameters of OmegaConf in its checkpoints."""

from __future__ import annotations

import inspect
import sys
import types
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd
import pytest
import torch
from neuronx_distributed.lightning import NeuronLTModule
from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import ModelCheckpoint

from nxd_jax.lightning._plain import plain
from tests.nxd_jax.lightning import jobs

pytestmark = jobs.MARKS


def test_what_scripts_log_is_none_until_they_set_it() -> None:
    made = jobs.module()
    assert (made.loss, made.lr, made.input_ids, made.global_norm) == (None,) * 4


def test_signatures_are_lightnings() -> None:
    for name in ("log", "clip_gradients"):
        ours, theirs = (list(inspect.signature(getattr(kind, name)).parameters) for kind in (NeuronLTModule, LightningModule))
        assert ours == theirs


def test_clipping_without_an_optimizer_does_nothing() -> None:
    made = jobs.module()
    made.configure_gradient_clipping()
    made.clip_gradients()


def test_a_name_that_the_model_and_the_module_have() -> None:
    made = jobs.module()
    made.model, made.head = torch.nn.ModuleDict({"head": torch.nn.Linear(3, 3), "model": torch.nn.Linear(2, 2)}), torch.nn.Linear(2, 2)
    names = {"head.weight", "head.bias", "model.head.weight", "model.head.bias", "model.weight", "model.bias"}
    state = {name: value.clone() for name, value in made.state_dict().items()}
    assert {name for name, _ in made.named_parameters()} == set(state) == names
    for parameter in made.parameters():
        torch.nn.init.zeros_(parameter)
    made.load_state_dict(state)
    assert all(torch.equal(parameter, state[name]) for name, parameter in made.named_parameters())


def test_log_by_position(tmp_path: Path) -> None:
    class Logging(jobs.Automatic):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("most", float(batch_idx), True, False, True, True, "max")
            self.log("sum", float(batch_idx), False, False, False, True, "sum", False, False, None, True, 2)
            return loss

    _, made = jobs.fit(tmp_path, model=jobs.automatic(Logging), tp=2, devices=2)
    batches = made.num_training_batches
    assert made.progress_bar_metrics["most_epoch"] == batches - 1 and made.callback_metrics["sum"] == sum(range(batches))


class Config(dict[str, Any]):
    """A stand-in for OmegaConf's dict, whose references may lead nowhere."""


class Lists(list[Any]):
    """A stand-in for OmegaConf's list."""


class Unresolved(Exception): ...


def to_container(config: Any, resolve: bool) -> Any:
    if resolve and "${nowhere}" in config.values():
        raise Unresolved
    return {**config, "resolved": resolve}


@pytest.fixture
def omegaconf(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package, which is not installed."""
    found: Any = types.ModuleType("omegaconf")
    found.Container, found.ListConfig = (Config, Lists), Lists
    found.OmegaConf = types.SimpleNamespace(to_container=to_container)
    found.errors = types.SimpleNamespace(OmegaConfBaseException=Unresolved)
    monkeypatch.setitem(sys.modules, "omegaconf", found)


def test_plain_hyperparameters(omegaconf: None) -> None:
    given = {"cfg": Config(lr=0.1), "nested": [Config(to="${nowhere}")], "hparams_type": Config, "of": Lists, "n": 3}
    assert plain(given) == {
        "cfg": {"lr": 0.1, "resolved": True},
        "nested": [{"to": "${nowhere}", "resolved": False}],
        "hparams_type": dict,
        "of": list,
        "n": 3,
    }
    assert type(plain(given)["cfg"]) is dict and type(given["cfg"]) is Config


def test_without_omegaconf_nothing_is_looked_at() -> None:
    given = {"cfg": {"lr": 0.1}}
    assert "omegaconf" in sys.modules or plain(given) is given


def test_checkpoints_hold_plain_hyperparameters(omegaconf: None, tmp_path: Path) -> None:
    class Job(jobs.Automatic):
        def __init__(self, cfg: Any, **kwargs: Any):
            super().__init__(**kwargs)
            self.save_hyperparameters({"cfg": cfg})

    model = jobs.automatic(lambda **kwargs: Job(Config(lr=0.5), **kwargs))  # type: ignore[arg-type]
    saved = ModelCheckpoint(tmp_path, filename="last")
    jobs.fit(tmp_path, model=model, tp=2, devices=2, max_steps=1, callbacks=(saved,))
    found = nxd.load_checkpoint(str(tmp_path), "last.ckpt")
    assert type(found["hyper_parameters"]["cfg"]) is dict and found["hyper_parameters"]["cfg"]["lr"] == 0.5
