"""Settings that can be run, those that cannot, and what each error says."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nxd_jax.modules.moe.moe_config_validator import MoeConfigValidator


def settings(source: str = "megatron", model: dict[str, Any] | None = None, **moe: Any) -> SimpleNamespace:
    return SimpleNamespace(model_source=source, model=SimpleNamespace(moe=SimpleNamespace(**moe), **(model or {})))


def hugging_face(folder: Path, config: dict[str, Any], **moe: Any) -> SimpleNamespace:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return settings("hf", {"model_config": str(path)}, **moe)


def check(config: Any) -> Any:
    MoeConfigValidator(config).validate_moe_config()
    return config.model.moe.capacity_factor


@pytest.mark.parametrize("factor", [None, 1.0, 2, 0.5])
def test_dropping(factor: Any) -> None:
    assert check(settings(dropless=False, capacity_factor=factor)) == factor
    assert check(settings(capacity_factor=factor)) == factor


@pytest.mark.parametrize(("factor", "wanted"), [(None, 0.0), (2.0, 0.0), (0.0, 0.0), (-1.5, -1.5)])
@pytest.mark.parametrize("activation", ["silu", "swiglu"])
def test_dropless(activation: str, factor: Any, wanted: float, caplog: pytest.LogCaptureFixture) -> None:
    """A factor below 0 stays: it drops nothing, as 0 does."""
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        assert check(settings(model={"activation": activation}, dropless=True, capacity_factor=factor, glu_mlp=True)) == wanted
    text = f"Dropless mode expects a capacity_factor set to 0.0. Current value: {factor}. Setting capacity_factor to 0.0."
    assert (text in caplog.text) is (factor != wanted)


def test_the_model_configuration_may_be_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's tests replace what reads it."""
    monkeypatch.setattr(MoeConfigValidator, "_load_hf_config", lambda self: {"hidden_act": "silu", "model_type": "mixtral"})
    assert check(settings("hf", {"model_config": "nowhere.json"}, dropless=True, capacity_factor=1.0)) == 0.0


def test_dropless_of_hugging_face(tmp_path: Path) -> None:
    assert check(hugging_face(tmp_path, {"hidden_act": "silu"}, dropless=True, capacity_factor=None)) == 0.0
    dbrx = {"model_type": "dbrx", "ffn_config": {"ffn_act_fn": {"name": "silu"}}}
    assert check(hugging_face(tmp_path, dbrx, dropless=True, capacity_factor=0.0)) == 0.0


def test_dicts_and_other_sources() -> None:
    moe = {"dropless": True, "capacity_factor": 1.0}
    MoeConfigValidator({"model_source": "mine", "model": {"moe": moe}}).validate_moe_config()
    assert moe["capacity_factor"] == 0.0
    MoeConfigValidator({"model": {"moe": {}}}).validate_moe_config()


ERRORS = {
    "no moe": (AttributeError, SimpleNamespace(model_source="hf", model=SimpleNamespace()), "MoE configuration is missing in model config: .* Add model.moe"),
    "empty moe": (AttributeError, {"model": {"moe": None}}, "no moe section"),
    "no model": (AttributeError, {}, "no moe section"),
    "zero": (ValueError, settings(dropless=False, capacity_factor=0.0), "Dropping requires a capacity factor greater than 0.0, got .* raise it"),
    "negative": (ValueError, settings(capacity_factor=-1), "capacity_factor=-1 with dropless=False"),
    "word": (ValueError, settings(capacity_factor="None"), "capacity_factor='None' must be a number, or null"),
    "flag": (ValueError, settings(capacity_factor=True), "capacity_factor=True must be a number"),
    "no glu": (
        ValueError,
        settings(model={"activation": "silu"}, dropless=True, glu_mlp=False, capacity_factor=0.0),
        "Dropless mode requires GLU_MLP to be True: set glu_mlp=True with dropless=True, or dropless=False",
    ),
    "megatron": (
        ValueError,
        settings(model={"activation": "gelu"}, dropless=True, capacity_factor=0.0),
        "For Megatron models, dropless mode is only supported with SiLU or SwiGLU activation function.*must be silu or swiglu, got 'gelu'; change",
    ),
    "megatron without": (ValueError, settings(dropless=True, capacity_factor=0.0), "model.activation must be silu or swiglu, got None"),
    "no file": (ValueError, settings("hf", {"model_config": "nowhere.json"}, dropless=True, capacity_factor=0.0), "JSON file not found: nowhere.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    kind, config, text = ERRORS[name]
    with pytest.raises(kind, match=text):
        MoeConfigValidator(config).validate_moe_config()


def test_errors_of_hugging_face(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match="Dropless mode is only supported with SiLU activation function: .*hidden_act must be silu, got 'gelu'",
    ):
        check(hugging_face(tmp_path, {"hidden_act": "gelu"}, dropless=True, capacity_factor=0.0))
    dbrx = {"model_type": "dbrx", "hidden_act": "silu", "ffn_config": {"ffn_act_fn": {"name": "gelu"}}}
    with pytest.raises(ValueError, match=r"ffn_config.ffn_act_fn.name of this dbrx model must be silu, got 'gelu'"):
        check(hugging_face(tmp_path, dbrx, dropless=True, capacity_factor=0.0))
