"""Looking keys up, and groups of parameters."""

from __future__ import annotations

from omegaconf import OmegaConf
from torch import nn

from nxd_jax.training.utils.model_utils import get_param_groups_by_weight_decay
from nxd_jax.training.utils.utils import get_attribute_from_cfg


def test_a_key_is_found_at_its_place_or_anywhere() -> None:
    cfg = OmegaConf.create({"a": {"b": {"size": 1}}, "size": 3, "c": {"size": 2, "other": None, "link": "${a.b}"}})
    assert get_attribute_from_cfg(cfg, "c.size") == 2
    assert get_attribute_from_cfg(cfg, "zzz.size") == 3
    assert get_attribute_from_cfg(cfg, "b") == {"size": 1}
    assert get_attribute_from_cfg(cfg, "c.other", 5) is None
    assert get_attribute_from_cfg(cfg, "nowhere", 5) == 5
    assert get_attribute_from_cfg({"x": {"y": 4}}, "y") == 4


def test_groups_by_weight_decay() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    model[0].weight.requires_grad_(False)
    groups = get_param_groups_by_weight_decay(model, ["bias"], 0.1)
    assert [(len(g["params"]), g["weight_decay"]) for g in groups] == [(1, 0.1), (2, 0.0)]
