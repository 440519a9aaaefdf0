"""`utils.safetensors_utils`: one name for each tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nxd_jax.utils.safetensors_utils import remove_duplicate_tensors


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    state = {"lm_head.weight": weight, "embed.weight": weight, "more.weight": weight.clone(), "norm": torch.ones(3)}
    found = remove_duplicate_tensors(state)
    assert found is state and set(state) == {"embed.weight", "more.weight", "norm"}
    save_file(state, tmp_path / "model.safetensors")
    assert torch.equal(load_file(tmp_path / "model.safetensors")["embed.weight"], weight)


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_a_models_state(device: str) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)}).to(device)
    model["b"].weight = model["a"].weight
    assert set(remove_duplicate_tensors(model.state_dict())) == {"a.weight", "a.bias", "b.bias"}


def test_what_is_not_the_same_stays() -> None:
    whole = torch.arange(6.0)
    state = {"whole": whole, "half": whole[:3], "other half": whole[3:], "rows": whole.view(2, 3)}
    meta = {name: torch.empty(2, device="meta") for name in "xy"}
    none = {name: torch.empty(0) for name in "vw"}
    assert set(remove_duplicate_tensors({**state, **meta, **none})) == {*state, *meta, *none}
