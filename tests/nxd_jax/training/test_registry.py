"""Which classes a configuration names."""

from __future__ import annotations

import collections
from typing import Any

import pytest
from omegaconf import OmegaConf

from nxd_jax.training import registry


@pytest.fixture(autouse=True)
def entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ENTRIES", {})


def find(**cfg: Any) -> registry.Entry:
    return registry.find(OmegaConf.create(cfg))


def test_hugging_face_models_by_name() -> None:
    assert find(model_source="hf", name="hf_llama").model.__name__ == "HFLLamaModule"
    found = find(model_source="hf", name="my_mixtral_8x7b")
    assert (found.model.__name__, found.data.__name__) == ("HFMixtralModule", "HFDataModule")


def test_megatron() -> None:
    found = find(model_source="megatron", name="megatron_gpt")
    assert (found.model.__name__, found.data.__name__) == ("MegatronGPTModel", "MegatronDataModule")


def test_classes_of_yours() -> None:
    own = {"data_module": "collections.OrderedDict", "model_module": "collections.Counter"}
    assert find(**own) == registry.Entry(collections.OrderedDict, collections.Counter)
    inside = {"data": {"_target_": "collections.OrderedDict"}, "model": {"_target_": "collections.Counter"}}
    assert find(**inside) == registry.Entry(collections.OrderedDict, collections.Counter)
    mixed = find(model_source="hf", name="x", model_module="collections.Counter")
    assert mixed.model is collections.Counter and mixed.data.__name__ == "HFDataModule"
    registry.register("mine", list, dict)
    assert find(model_source="mine") == registry.Entry(list, dict)
    with pytest.raises(ValueError, match="model_source 'mine' is taken"):
        registry.register("mine", dict, list)
    with pytest.raises(ValueError, match="model_source 'hf' is taken"):
        registry.register("hf", dict, list)


@pytest.mark.parametrize(
    ("cfg", "kind", "text"),
    [
        (
            {"model_source": "megatron", "model_alignment_strategy": {"sft": {}}},
            NotImplementedError,
            r"model_alignment_strategy is not trained with model_source: megatron: convert the weights",
        ),
        ({"model_source": "huggingface"}, ValueError, r"model_source: 'huggingface' must be hf or megatron"),
        (
            {"model_module": "nowhere.at.All"},
            ValueError,
            r"model_module: 'nowhere.at.All' cannot be imported as package.module.Class.*PYTHONPATH",
        ),
        ({"data_module": "Counter"}, ValueError, r"data_module: 'Counter' cannot be imported"),
    ],
)
def test_what_cannot_be_found(cfg: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        find(**cfg)
