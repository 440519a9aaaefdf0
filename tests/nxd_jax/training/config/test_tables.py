"""The tables of keys against what reads them."""

from __future__ import annotations

import dataclasses

import pytest

from nxd_jax.training.config.keys import ROOT
from nxd_jax.training.config.keys.kinds import Key, listing, number, switch, text, whole
from nxd_jax.training.config.keys.trainer import TRAINER
from nxd_jax.training.lightning_modules.nlp_overrides import trainer_keys
from nxd_jax.training.utils.experiment_config import CallbackParams, ExpManagerConfig
from tests.nxd_jax.training.config import conf_files


def test_keys_of_the_trainer() -> None:
    assert set(trainer_keys()) <= set(TRAINER)
    assert set(TRAINER) - set(trainer_keys()) <= {"model_registry", "enable_autolog_hparams"}  # of newer versions of Lightning


def test_keys_of_the_experiment_manager() -> None:
    inside = (ROOT.inside or {})["exp_manager"].inside or {}
    assert set(inside) == {f.name for f in dataclasses.fields(ExpManagerConfig)}
    assert set(inside["checkpoint_callback_params"].inside or {}) == {f.name for f in dataclasses.fields(CallbackParams)}


def test_every_key_of_the_conf_files_is_known() -> None:
    def unknown(values: dict[str, object], key: object, path: str) -> list[str]:
        inside = getattr(key, "inside", None) or {}
        if getattr(key, "opened", False):
            return []
        found = [f"{path}{name}" for name in values if name not in inside]
        return found + [
            u for name, v in values.items() if isinstance(v, dict) and name in inside for u in unknown(v, inside[name], f"{path}{name}.")
        ]

    for name in conf_files.DIFFERENCES:
        assert unknown(conf_files.configuration(name), ROOT, "") == [], name


UNQUOTED = "without quotes, or ${oc.decode:...} around an interpolation that gives text, such as ${oc.env:NAME}"


@pytest.mark.parametrize(
    ("key", "value", "wrong"),
    [
        (whole(1), 3, ""),
        (whole(1), None, ""),
        (whole(1, null=False), None, "must not be null; it is a whole number"),
        (whole(1), True, "True must be a whole number or null"),
        (whole(1), 2.0, "2.0 must be a whole number or null"),
        (number(), "3e-4", ""),
        (number(), "fast", "'fast' must be a number or null"),
        (number(0), -1.5, "-1.5 must be at least 0"),
        (switch(), "true", f"'true' must be True or False or null: it is text, so write true {UNQUOTED}"),
        (text("a", "b"), "c", "'c' must be one of a, b or null"),
        (text(), 5, "5 must be text or null"),
        (listing(null=False), "x", "'x' must be a list"),
    ],
)
def test_values(key: Key, value: object, wrong: str) -> None:
    assert key.wrong(value) == wrong
