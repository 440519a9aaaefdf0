"""LoraConfig: its fields, what it refuses and how it says so; which modules get an adapter."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from nxd_jax.modules.lora import LoraConfig, LoraLinear, LoraModel, get_lora_model
from nxd_jax.modules.lora.config import as_config
from nxd_jax.modules.lora.targets import matches, usual_targets

DEFAULTS = {
    "lora_rank": 16, "target_modules": None, "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none", "use_rslora": False, "init_lora_weights": "default",
    "modules_to_save": None, "lora_verbose": False, "load_lora_from_ckpt": False, "lora_load_tag": None, "lora_save_dir": "lora_adapter",
    "merge_lora": False, "save_lora_base": False, "save_lora_config_adapter": False, "merge_sharded_lora": True, "enable_lora": True,
}  # fmt: skip


def test_fields_and_defaults() -> None:
    config = LoraConfig()
    assert config.to_dict() == {**DEFAULTS, "r": 16}
    assert LoraConfig(4, ["q"], 32.0).lora_alpha == 32.0
    assert config.scaling == 0.5 and LoraConfig(use_rslora=True).scaling == 2.0
    assert LoraConfig(target_modules=("q", "v")).target_modules == ["q", "v"]  # type: ignore[arg-type]


def test_the_documented_call() -> None:
    import neuronx_distributed

    config = neuronx_distributed.modules.lora.LoraConfig(
        enable_lora=True, lora_rank=16, lora_alpha=32, lora_dropout=0.05, bias="none", target_modules=["q_proj", "v_proj", "k_proj"]
    )
    assert type(config) is LoraConfig and neuronx_distributed.modules.lora.LoRAModel is LoraModel
    from neuronx_distributed.modules.lora.layer import LoraLinear as Linear
    from neuronx_distributed.modules.lora.tp_layer import LoraGQAQKVParallelLinear, LoraParallelLinear

    assert Linear is LoraLinear and LoraParallelLinear.__module__ == LoraGQAQKVParallelLinear.__module__ == "nxd_jax.modules.lora.tp_layer"
    with pytest.raises(AttributeError, match="has no attribute 'moe_of_the_future'"):
        neuronx_distributed.modules.moe_of_the_future  # noqa: B018


def test_json_copies_and_dicts() -> None:
    config = LoraConfig(lora_rank=4, target_modules=["q"], bias="all", modules_to_save=["head"])
    assert LoraConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert LoraConfig.from_dict({"r": 4, "target_modules": ["q"]}).lora_rank == 4
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config == as_config(config.to_dict())


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rank": 4}, TypeError, r"LoraConfig has no 'rank': its fields are lora_rank, target_modules, .*enable_lora"),
    ({"lora_rank": 4.0}, TypeError, "lora_rank must be an int, got 4.0"),
    ({"lora_rank": True}, TypeError, "lora_rank must be an int, got True"),
    ({"lora_rank": 0}, ValueError, "lora_rank=0 must be at least 1"),
    ({"lora_alpha": "8"}, TypeError, "lora_alpha must be a number, got '8'"),
    ({"lora_alpha": 0}, ValueError, "lora_alpha=0 must be positive"),
    ({"lora_alpha": float("nan")}, ValueError, "lora_alpha=nan must be positive"),
    ({"lora_dropout": 1.0}, ValueError, "lora_dropout=1.0 must be a probability below 1"),
    ({"lora_dropout": None}, TypeError, "lora_dropout must be a number, got None"),
    ({"bias": "some"}, ValueError, "bias must be 'none', 'all' or 'lora_only', got 'some'"),
    ({"bias": True}, ValueError, "bias must be 'none', 'all' or 'lora_only', got True"),
    ({"init_lora_weights": "zero"}, ValueError, "init_lora_weights must be 'default' or 'gaussian', got 'zero'"),
    ({"use_rslora": "yes"}, TypeError, r"LoraConfig: use_rslora must be True or False \(or 1 or 0\), got 'yes'"),
    ({"enable_lora": 2}, TypeError, r"LoraConfig: enable_lora must be True or False \(or 1 or 0\), got 2"),
    ({"target_modules": []}, ValueError, r"target_modules=\[\] must name at least one module"),
    ({"target_modules": [""]}, ValueError, "by names that are not empty"),
    ({"target_modules": [3]}, TypeError, "target_modules must be a list of module names, a regular expression or None, got"),
    ({"target_modules": {"q": 1}}, TypeError, "target_modules must be a list of module names"),
    ({"target_modules": "q_(proj"}, ValueError, "no regular expression .*; for plain names pass a list"),
    ({"modules_to_save": "head"}, TypeError, "modules_to_save must be a list of module names or None, got 'head'"),
    ({"lora_load_tag": 3}, TypeError, "lora_load_tag must be a str or None, got 3"),
    ({"lora_save_dir": ""}, TypeError, "lora_save_dir must be the path of a directory, got ''"),
    ({"merge_lora": True}, ValueError, "merge_lora=True with save_lora_base=False saves nothing.*Set save_lora_base=True too"),
]


@pytest.mark.parametrize(("arguments", "error", "text"), BAD, ids=lambda v: str(next(iter(v.items()))) if isinstance(v, dict) else "")
def test_what_is_refused(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        LoraConfig(**arguments)


def test_one_and_zero_stand_for_true_and_false() -> None:
    found = LoraConfig(use_rslora=1, save_lora_base=1, merge_lora=1, enable_lora=0)  # type: ignore[arg-type]
    assert (found.use_rslora, found.merge_lora, found.enable_lora, found.lora_verbose) == (True, True, False, False)
    assert found == LoraConfig(use_rslora=True, save_lora_base=True, merge_lora=True, enable_lora=False) and found.enable_lora is False


def test_what_dicts_are_refused() -> None:
    with pytest.raises(ValueError, match="LoraConfig has no 'lora_rang': its fields are"):
        as_config({"lora_rang": 3})
    with pytest.raises(ValueError, match="r=3 and lora_rank=4 disagree"):
        LoraConfig.from_dict({"r": 3, "lora_rank": 4})
    with pytest.raises(TypeError, match="lora_config must be a LoraConfig or a dict of its fields, got list"):
        as_config([])


# -- targets -----------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.my_q_proj = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)


class Model(nn.Module):
    def __init__(self, model_type: str | None = "llama") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(3))
        self.head = nn.Linear(4, 4)
        if model_type:
            self.config = type("Config", (), {"model_type": model_type})()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[0].q_proj(x))


def adapted(**options: Any) -> list[str]:
    return list(LoraModel(Model(), LoraConfig(lora_rank=2, **options))._layers)


def test_which_modules_match() -> None:
    assert adapted(target_modules=["q_proj"]) == [f"layers.{k}.q_proj" for k in range(3)]
    assert adapted(target_modules=["1.q_proj", "head"]) == ["layers.1.q_proj", "head"]
    assert adapted(target_modules=r"layers\.[02]\..*k_proj") == ["layers.0.k_proj", "layers.2.k_proj"]
    assert adapted(target_modules=None) == adapted(target_modules=["q_proj"])
    assert not matches("my_q_proj", ["q_proj"]) and not matches("layers.0.q_proj", "q_proj")
    fused = nn.Module()
    fused.config, fused.qkv_proj = Model().config, nn.Linear(2, 2)
    assert usual_targets(fused) == ["qkv_proj"]


def test_no_match_names_modules_that_are_there(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"target_modules=\['query'\] matches no module. The model has .*layers\.\d\.q_proj.*head"):
        adapted(target_modules=["query"])
    with pytest.raises(ValueError, match=r"modules_to_save=\['lm_head'\] matches no module"):
        adapted(target_modules=["q_proj"], modules_to_save=["lm_head"])
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        adapted(target_modules=["q_proj", "query"])
    assert "target_modules: no module is called 'query'. The model has" in caplog.text
    with pytest.raises(ValueError, match="pass target_modules: there are no usual ones for a model with config.model_type 'new'"):
        LoraModel(Model("new"), LoraConfig())
    with pytest.raises(ValueError, match="model_type None"):
        LoraModel(Model(None), LoraConfig())
    with pytest.raises(ValueError, match="the usual ones of bloom, query_key_value, are not in the model. It has"):
        LoraModel(Model("bloom"), LoraConfig())


def test_modules_that_cannot_be_adapted() -> None:
    with pytest.raises(
        ValueError,
        match="target_modules matches layers.1, a Attention, which LoRA cannot adapt. It adapts Linear, Embedding, Conv2d, Column",
    ):
        adapted(target_modules=["layers.1"])
    with pytest.raises(
        ValueError, match="head is one of modules_to_save, which train as they are, but target_modules gives head an adapter"
    ):
        adapted(target_modules=["head"], modules_to_save=["head"])
    with pytest.raises(ValueError, match="layers.1 is one of modules_to_save.* gives layers.1.q_proj an adapter"):
        adapted(target_modules=["q_proj"], modules_to_save=["layers.1"])


def test_what_is_no_model_for_lora() -> None:
    config = LoraConfig(target_modules=["q_proj"])
    with pytest.raises(TypeError, match="LoraModel takes a torch.nn.Module, got function"):
        LoraModel(lambda: 0, config)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="LoraModel with enable_lora=False: use the model itself, or get_lora_model"):
        LoraModel(Model(), LoraConfig(enable_lora=False))
    with pytest.raises(ValueError, match="has LoRA adapters already: merge_and_unload"):
        LoraModel(LoraModel(Model(), config), config)

    class Pipeline(nn.Module):
        def cut_pipeline_stage(self) -> None: ...

    with pytest.raises(ValueError, match="give NxDPPModel the LoraModel, or neuronx_distributed_config a lora_config"):
        LoraModel(Pipeline(), config)


def test_get_lora_model() -> None:
    model = Model()
    assert get_lora_model(model, None) is model and get_lora_model(model, LoraConfig(enable_lora=False)) is model
    assert isinstance(get_lora_model(model, {"lora_rank": 2, "target_modules": ["q_proj"]}), LoraModel)


def test_a_module_that_occurs_twice_gets_one_adapter() -> None:
    model = Model()
    model.layers[2].q_proj = model.layers[0].q_proj
    lora = LoraModel(model, LoraConfig(lora_rank=2, target_modules=["q_proj"]))
    assert model.layers[2].q_proj is model.layers[0].q_proj and isinstance(model.layers[0].q_proj, LoraLinear)
    assert list(lora._layers) == ["layers.0.q_proj", "layers.1.q_proj"]


def test_verbose(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "nxd_jax"):
        adapted(target_modules=["head"], lora_verbose=True)
    assert "LoRA adapters for 1 modules: head" in caplog.text


def test_fields_that_the_original_saves() -> None:
    config = LoraConfig(lora_rank=4, target_modules=["q"], lora_save_dir="d")
    assert LoraConfig.get_selected_fields() == [
        "bias", "init_lora_weights", "lora_alpha", "lora_dropout", "lora_rank", "use_rslora", "target_modules", "modules_to_save", "save_lora_base",
        "merge_lora", "save_lora_config_adapter",
    ]  # fmt: skip
    saved = config.selected_fields_to_save()
    assert sorted(saved) == sorted(LoraConfig.get_selected_fields()) and (saved["lora_rank"], saved["target_modules"]) == (4, ["q"])
    assert LoraConfig.from_dict(saved) == LoraConfig(lora_rank=4, target_modules=["q"])
